"""Counts what an algorithm sends.

As in the FedTAN paper (section 5.3): the server's message to its clients is one
multicast, which is counted once; every client's answer is counted.

All numbers come from the TFF computation of a round itself, by following how
its results depend on each other, so they hold for any algorithm and aggregator.
"""

import dataclasses
import enum
import math
from typing import Any, Optional, Union

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.processes.phased_process import Phase
from tff_bn.processes.phased_process import PhasedComputation
from tff_bn.processes.stateful_process import Process
from tff_bn.runtime import graph_cache
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_context
from tff_bn.runtime import symbols

_MEGABYTE = 2**20


class Direction(enum.Enum):
  """Where a message goes."""

  DOWN = 'down'  # From the server to all clients.
  UP = 'up'  # From each client to the server.


@dataclasses.dataclass(frozen=True)
class Message:
  """A tensor that is sent.

  Attributes:
    exchange: In which exchange of the round, from 1.
    direction: From the server to all clients, or from each of them to it.
    dtype: The tensor's dtype.
    shape: The tensor's shape; `None` for a size, or for a whole shape, that is
      not known before the computation runs.
    metrics_only: Whether nothing but the round's metrics depends on it.
  """

  exchange: int
  direction: Direction
  dtype: tf.DType
  shape: Optional[tuple[Optional[int], ...]]
  metrics_only: bool

  @property
  def num_bytes(self) -> int:
    """The size of the tensor.

    Raises:
      ValueError: If the types do not say it.
    """
    if self.shape is None or None in self.shape or not self._is_number:
      shape = 'unknown shape' if self.shape is None else f'shape {self.shape}'
      raise ValueError(
          f'A tensor of dtype {self.dtype.name} and {shape} is sent'
          f' {self.direction.value}, whose bytes can not be counted; an'
          ' algorithm or aggregator must send numbers in tensors of static'
          ' shapes for that.'
      )
    return math.prod(self.shape) * self.dtype.size

  @property
  def is_scalar(self) -> bool:
    """Whether it is one number; a string can be a whole compressed model."""
    return self.shape == () and self._is_number

  @property
  def _is_number(self) -> bool:
    dtype = self.dtype
    return (
        dtype.is_floating
        or dtype.is_integer
        or dtype.is_bool
        or dtype.is_complex
    )


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What one round of an algorithm sends.

  Attributes:
    exchanges: How often all clients and the server exchange messages: one
      exchange goes down and up.
    download_bytes: What the server sends to every client.
    upload_bytes: What one client sends.
  """

  exchanges: int
  download_bytes: int
  upload_bytes: int

  def megabytes(self, num_clients: int) -> float:
    """All that is sent in a round.

    Args:
      num_clients: The number of clients that take part.

    Returns:
      Megabytes of 2^20 bytes: one multicast down, and every client's upload.
    """
    num_bytes = self.download_bytes + num_clients * self.upload_bytes
    return num_bytes / _MEGABYTE


def messages(next_computation: tff.Computation) -> list[Message]:
  """Lists the tensors that a round sends, those for metrics too.

  Args:
    next_computation: The `next` of a learning process, of either kind.

  Returns:
    The messages, by exchange. The server sends a value once, when a client
    needs it first; a client sends a value in each exchange that adds it up.
    A value of which `federated_select` takes parts counts as sent as a whole.
  """
  plan = _plan(next_computation)
  for_metrics, for_state, for_clients = [], [], []
  results = iter(plan.results)
  result_type = next_computation.type_signature.result
  for name, element in _elements(result_type):
    if name == 'metrics':
      group = for_metrics
    elif _is_at_clients(element):
      group = for_clients
    else:
      group = for_state
    group += (next(results) for _ in range(_num_leaves(element)))
  needed = {_key(t) for t in plan.transfers(for_state, for_clients)}
  return [
      Message(
          exchange=transfer.pass_number + 1,
          direction=(
              Direction.DOWN
              if transfer.sender is symbols.Location.SERVER
              else Direction.UP
          ),
          dtype=transfer.leaf.spec.dtype,
          shape=_shape(transfer.leaf.spec),
          metrics_only=_key(transfer) not in needed,
      )
      for transfer in plan.transfers([*for_state, *for_metrics], for_clients)
  ]


def _key(transfer: plan_lib.Transfer) -> tuple[Any, ...]:
  """Tells a transfer from others, however many results are asked for."""
  if transfer.sender is symbols.Location.SERVER:
    return (transfer.leaf,)  # Metrics may need it earlier than the state does.
  return (transfer.leaf, transfer.pass_number)


def _plan(computation: tff.Computation) -> plan_lib.Plan:
  if not isinstance(computation, tff.framework.ConcreteComputation):
    raise ValueError(
        f'What a {type(computation).__name__} sends can not be counted, only'
        ' what one computation of TFF does; give those of a phased process one'
        ' by one, or the whole process to ProcessTraffic.'
    )
  context = tff.framework.get_context_stack().current
  if isinstance(context, plan_context.PlanContext):
    return context.plan(computation)  # It may have one already.
  return plan_lib.Plan(computation, graph_cache.GraphCache())


def _elements(result_type: tff.Type) -> list[tuple[Optional[str], tff.Type]]:
  if isinstance(result_type, tff.StructType):
    return tff.structure.to_elements(result_type)
  return [(None, result_type)]


def _is_at_clients(type_spec: tff.Type) -> bool:
  return (
      isinstance(type_spec, tff.FederatedType)
      and type_spec.placement is tff.CLIENTS
  )


def _num_leaves(type_spec: tff.Type) -> int:
  if isinstance(type_spec, tff.FederatedType):
    type_spec = type_spec.member
  if isinstance(type_spec, tff.StructType):
    return sum(_num_leaves(element) for element in type_spec)
  return 1


def _shape(spec: tf.TensorSpec) -> Optional[tuple[Optional[int], ...]]:
  return None if spec.shape.rank is None else tuple(spec.shape)


def computation_traffic(next_computation: tff.Computation) -> Traffic:
  """Counts what one round sends.

  What only the round's metrics depend on is not counted. Scalars are not
  counted either, as in the FedTAN paper: weights of clients, numbers of
  examples, the number of the round, the learning rate. So a scalar variable of
  the model is missing from the count, too, and an exchange of nothing but
  scalars is none.

  Args:
    next_computation: The `next` of a learning process, of either kind.

  Returns:
    The exchanges in which clients send something for the server's or the
    clients' new state, and the bytes of all tensors that are sent for these
    states.

  Raises:
    ValueError: If the size of something that is sent is known only when the
      computation runs.
  """
  counted = [
      m
      for m in messages(next_computation)
      if not m.metrics_only and not m.is_scalar
  ]
  uploads = [m for m in counted if m.direction is Direction.UP]
  downloads = [m for m in counted if m.direction is Direction.DOWN]
  return Traffic(
      exchanges=len({m.exchange for m in uploads}),
      download_bytes=sum(m.num_bytes for m in downloads),
      upload_bytes=sum(m.num_bytes for m in uploads),
  )


class ProcessTraffic:
  """What all rounds of a process send; counted when it is asked for."""

  def __init__(self, process: Process):
    """Initializes the count.

    Args:
      process: The process, also one with phases.
    """
    self._phases = [Phase(None, process.next)]
    if isinstance(process.next, PhasedComputation):
      self._phases = process.next.phases
    self._traffic: dict[int, Traffic] = {}  # By phase.

  def until(
      self, round_num: int, num_clients: int
  ) -> dict[str, Union[int, float]]:
    """Counts what was sent in all rounds so far.

    Args:
      round_num: The number of finished rounds.
      num_clients: The number of clients that take part in a round.

    Returns:
      `exchanges` and `megabytes` (of 2^20 bytes: each multicast once, and every
      client's uploads).

    Raises:
      ValueError: If it can't be counted, see `computation_traffic`.
    """
    exchanges, megabytes = 0, 0.0
    for number, phase in enumerate(self._phases):
      num_rounds = round_num
      if phase.num_rounds is not None:
        num_rounds = min(round_num, phase.num_rounds)
      if num_rounds == 0:
        break
      # A phase is counted once: to follow a large model's computation takes
      # seconds.
      if number not in self._traffic:
        self._traffic[number] = computation_traffic(phase.computation)
      traffic = self._traffic[number]
      exchanges += num_rounds * traffic.exchanges
      megabytes += num_rounds * traffic.megabytes(num_clients)
      round_num -= num_rounds
    return dict(exchanges=exchanges, megabytes=megabytes)
