"""Measures the traffic of an algorithm.

As in the FedTAN paper (appendix G), a message from the server to all clients
is a multicast, which counts once; the messages of all clients count.

All numbers are derived from the dependencies in the TFF computation of a round,
so they hold for any algorithm and aggregator.
"""

from collections.abc import Mapping
import dataclasses
import enum
import math
from typing import Any, NamedTuple, Optional, Union

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.processes import phased_process
from tff_bn.processes import stateful_process
from tff_bn.processes.short_rounds import ShortRounds
from tff_bn.processes.stateful_process import Process
from tff_bn.runtime import element_structure
from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_context
from tff_bn.runtime import symbols

_MEGABYTE = 2**20


class Direction(enum.Enum):
  """The direction of a message."""

  DOWN = 'down'  # From the server to all clients.
  UP = 'up'  # From each client to the server.


@dataclasses.dataclass(frozen=True)
class Message:
  """A tensor sent between the server and the clients.

  Attributes:
    exchange: The exchange of the round in which it is sent, from 1.
    direction: From the server to all clients, or from each client to the
      server.
    dtype: The tensor's dtype.
    shape: The tensor's shape. A size, or the whole shape, is `None` if it is
      unknown before the computation runs.
    metrics_only: Whether only the round's metrics depend on the tensor.
    name: Its place in the structure that the sender computed, such as
      `update.trainable.kernel_0` (a variable of the model by name) or
      `global_model_weights.trainable[0]` (by position); empty if it is not part
      of a structure.
  """

  exchange: int
  direction: Direction
  dtype: tf.DType
  shape: Optional[tuple[Optional[int], ...]]
  metrics_only: bool
  name: str = ''

  @property
  def num_bytes(self) -> int:
    """The size of the tensor in bytes.

    Raises:
      ValueError: If the dtype or the shape does not determine the size.
    """
    sizes = [size for size in self.shape or () if size is not None]
    if self.shape is None or None in self.shape or not self._is_number:
      shape = 'unknown shape' if self.shape is None else f'shape {self.shape}'
      raise ValueError(
          f'A tensor of dtype {self.dtype.name} and {shape} is sent'
          f' {self.direction.value}, so the bytes cannot be counted; use an'
          ' algorithm and aggregators that send numbers in tensors of static'
          ' shapes.'
      )
    return math.prod(sizes) * self.dtype.size

  @property
  def is_scalar(self) -> bool:
    """Whether the tensor is one number (a string may be a whole model)."""
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
  """The traffic of one round of an algorithm.

  Attributes:
    exchanges: The number of exchanges of messages between the server and the
      clients; an exchange goes down and up.
    download_bytes: The bytes that the server sends to every client.
    upload_bytes: The bytes that one client sends.
  """

  exchanges: int
  download_bytes: int
  upload_bytes: int

  def megabytes(self, num_clients: int) -> float:
    """Returns the traffic of a round: one multicast and all uploads.

    Args:
      num_clients: The number of clients that take part.

    Returns:
      Megabytes of 2^20 bytes.
    """
    num_bytes = self.download_bytes + num_clients * self.upload_bytes
    return num_bytes / _MEGABYTE


def messages(next_computation: tff.Computation) -> list[Message]:
  """Lists the tensors that a round sends, including metrics.

  Args:
    next_computation: The `next` of a `LearningProcess` or
      `StatefulLearningProcess`.

  Returns:
    The messages in the order of their exchanges. The server sends a value once,
    when a client first needs it; a client sends a value in each exchange that
    aggregates it. Of a value that `federated_select` slices, the server sends
    the slices of one client; the keys are not counted.
  """
  plan = _plan(next_computation)
  for_metrics: list[symbols.Leaf] = []
  for_state: list[symbols.Leaf] = []
  for_clients: list[symbols.Leaf] = []
  results = iter(plan.results)
  result_type = next_computation.type_signature.result
  elements = [(None, result_type)]
  if isinstance(result_type, tff.StructType):
    elements = tff.structure.to_elements(result_type)
  for name, element in elements:
    if name == 'metrics':
      group = for_metrics
    elif getattr(element, 'placement', None) is tff.CLIENTS:
      group = for_clients
    else:
      group = for_state
    group += (next(results) for _ in element_structure.leaf_types(element))
  needed = {_key(t) for t in plan.transfers(for_state, for_clients)}
  found = []
  for transfer in plan.transfers([*for_state, *for_metrics], for_clients):
    is_down = transfer.sender is symbols.Location.SERVER
    spec = transfer.leaf.spec
    found.append(
        Message(
            exchange=transfer.pass_number + 1,
            direction=Direction.DOWN if is_down else Direction.UP,
            dtype=spec.dtype,
            shape=None if spec.shape.rank is None else tuple(spec.shape),
            metrics_only=_key(transfer) not in needed,
            name=transfer.leaf.name,
        )
    )
  return found


def _key(transfer: plan_lib.Transfer) -> tuple[Any, ...]:
  """Returns a key of the transfer that does not depend on the results."""
  if transfer.sender is symbols.Location.SERVER:
    return (transfer.leaf,)  # Metrics may need it earlier than the state does.
  return (transfer.leaf, transfer.pass_number)


def _plan(computation: tff.Computation) -> plan_lib.Plan:
  if not isinstance(computation, tff.framework.ConcreteComputation):
    raise ValueError(
        f'The traffic of a {type(computation).__name__} cannot be counted; pass'
        ' a TFF computation, such as one phase of a phased process or the'
        ' computation of a short round, or pass the whole process to'
        ' ProcessTraffic.'
    )
  context = tff.framework.get_context_stack().current
  if isinstance(context, plan_context.PlanContext):
    return context.plan(computation)  # It may have one already.
  return plan_lib.Plan(computation, imported_graph.GraphCache())


def computation_traffic(next_computation: tff.Computation) -> Traffic:
  """Counts the exchanges and bytes of one round.

  As in the FedTAN paper, scalars are not counted: clients' weights, numbers of
  examples, the number of the round, the learning rate, but also scalar
  variables of the model. An exchange of scalars only does not count. Tensors
  for the round's metrics are not counted either.

  Args:
    next_computation: The `next` of a `LearningProcess` or
      `StatefulLearningProcess`.

  Returns:
    The exchanges in which clients send tensors for the new state of the server
    or the clients, and the bytes of all tensors sent for these states.

  Raises:
    ValueError: If the size of a tensor is unknown before the computation runs.
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


class Round(NamedTuple):
  """A kind of round of a process.

  Attributes:
    title: Its phase, and whether it is short; empty if all rounds are alike.
    computation: The computation of such a round.
  """

  title: str
  computation: tff.Computation


def kinds_of_rounds(process: Process) -> list[Round]:
  """Lists the kinds of rounds that a process has.

  Args:
    process: The process, possibly with phases or short rounds.

  Returns:
    The rounds of each phase in order, full ones before short ones.
  """
  kinds = []
  phases = phased_process.phases_of(process).phases
  for number, (_, computation) in enumerate(phases, start=1):
    title = f'phase {number}' if len(phases) > 1 else ''
    if not isinstance(computation, ShortRounds):
      kinds.append(Round(title, computation))
      continue
    for name, part in (
        ('full round', computation.full),
        ('short round', computation.short),
    ):
      kinds.append(Round(f'{title}, {name}' if title else name, part))
  return kinds


class ProcessTraffic:
  """Counts the traffic of all rounds of a process."""

  def __init__(self, process: Process):
    """Initializes the counter.

    Args:
      process: The process, possibly with phases.

    Raises:
      TypeError: If it is no process.
    """
    stateful_process.check_process(process)
    self._phases = phased_process.phases_of(process)
    self._traffic: dict[int, Traffic] = {}  # By the computation's id.

  def until(
      self,
      round_num: int,
      num_clients: int,
      metrics: Optional[Mapping[str, Any]] = None,
  ) -> dict[str, Union[int, float]]:
    """Counts the traffic of all rounds so far.

    Args:
      round_num: The number of finished rounds.
      num_clients: The number of clients that take part in a round.
      metrics: For a process with short rounds, such as SCAFFOLD's:
        `output.metrics['client_work']['correction']` of the round `round_num`.
        Its `full_rounds` and `repeated_rounds` say how many rounds so far were
        not short, see `tff_bn.processes.short_rounds`. Other processes need
        none. Default: all rounds are short, unless the number of clients makes
        that impossible.

    Returns:
      `exchanges` and `megabytes` (of 2^20 bytes: each multicast once, and every
      client's uploads). A round that was repeated counts twice.

    Raises:
      ValueError: See `computation_traffic`.
    """
    exchanges, megabytes = 0, 0.0
    num_full, num_repeated = 0, 0
    if metrics is not None:
      num_full = int(metrics.get('full_rounds', 0))
      num_repeated = int(metrics.get('repeated_rounds', 0))

    def add(computation: tff.Computation, num_rounds: int) -> None:
      nonlocal exchanges, megabytes
      if num_rounds:
        traffic = self._traffic_of(computation)
        exchanges += num_rounds * traffic.exchanges
        megabytes += num_rounds * traffic.megabytes(num_clients)

    for (_, computation), num_rounds in zip(
        self._phases.phases,
        self._phases.rounds_of_phases(round_num),
        strict=True,
    ):
      if isinstance(computation, ShortRounds):
        # All phases with short rounds send the same, so it does not matter to
        # which of them a full round belongs.
        full = min(num_full, num_rounds)
        if metrics is None and not computation.may_be_short(num_clients):
          full = num_rounds
        repeated = min(num_repeated, full)
        add(computation.full, full)
        add(computation.short, num_rounds - full + repeated)
        num_full -= full
        num_repeated -= repeated
      else:
        add(computation, num_rounds)
    return dict(exchanges=exchanges, megabytes=megabytes)

  def _traffic_of(self, computation: tff.Computation) -> Traffic:
    # The analysis of a large model's computation takes seconds.
    if id(computation) not in self._traffic:
      self._traffic[id(computation)] = computation_traffic(computation)
    return self._traffic[id(computation)]
