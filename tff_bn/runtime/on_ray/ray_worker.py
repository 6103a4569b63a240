"""The Ray actor that computes clients in a worker process."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import platform
import time
from typing import Any, Optional

import ray
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.imports import versions
from tff_bn.runtime import client_part
from tff_bn.runtime import devices
from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import symbols
from tff_bn.runtime.on_ray import transport

# Another thread than the computing one answers whether the process is alive.
CONCURRENCY_GROUPS = {'health': 1}


@dataclasses.dataclass(frozen=True)
class Task:
  """A client's part of a pass, which a worker computes.

  Attributes:
    computation: The number of the computation.
    source: The reference to the computation's proto in Ray's object store; Ray
      fetches references inside of a sequence only on demand.
    invocation: The number of the computation's invocation.
    pass_number: The number of the pass.
    client: The number of the client.
    received: By pass, the reference to the server's values: for this pass, and
      with `inputs` for all passes before it.
    inputs: The client's part of the argument; `None` if the worker has computed
      the previous passes of this client.
  """

  computation: int
  source: Sequence[Any]
  invocation: int
  pass_number: int
  client: int
  received: Mapping[int, Sequence[Any]]
  inputs: Optional[Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Description:
  """A worker's description of itself."""

  place: str  # The worker's machine and process, for messages.
  versions: Mapping[str, str]
  answers: Sequence[Any]  # Results of the checks, or their errors as texts.


class _Invocation:
  """A worker's values of an invocation."""

  def __init__(self, plan: plan_lib.Plan, device: str):
    self.plan = plan
    self.server: dict[symbols.Leaf, Any] = {}
    self.part = client_part.ClientPart(plan, device, self.server)
    # By client, the tensors that later passes need.
    self.kept: dict[int, dict[symbols.Leaf, tf.Tensor]] = {}


class Worker:
  """A Ray actor that computes one client after another on its device."""

  def __init__(self, device_type: str):
    """Initializes the worker for a `'CPU'` or a `'GPU'`."""
    devices.share_gpus()
    self._device = devices.full_name(f'{device_type}:0')
    self._graphs = imported_graph.GraphCache()
    self._plans: dict[int, plan_lib.Plan] = {}
    self._invocations: dict[int, _Invocation] = {}

  def describe(self, checks: Sequence[Callable[[], Any]]) -> Description:
    """Describes the worker and calls the program's checks."""
    return Description(
        f'{platform.node()} (process {os.getpid()})',
        versions.versions(),
        [_answer(check) for check in checks],
    )

  @ray.method(concurrency_group='health')
  def is_alive(self) -> bool:
    """Returns `True`; the program notices if no answer comes."""
    return True

  @ray.method(num_returns=2)
  def compute(
      self, task: Task
  ) -> tuple[bool, Optional[tuple[list[Any], list[Any], float]]]:
    """Computes a client's part of a pass.

    Returns:
      Whether the worker could compute the task, which it can't if it does not
      have the values of the previous passes. If it could: the arrays of the
      pass's `folded`, except for the server's leaves; the arrays of its
      `results`; and the seconds that this took.
    """
    start = time.monotonic()
    invocation = self._invocation(task)
    tensors = invocation.kept.pop(task.client, None)
    first = task.pass_number
    if task.inputs is not None:
      values = [transport.unpack(value, ray.get) for value in task.inputs]
      tensors = invocation.part.begin(values)
      first = 0
    elif tensors is None:
      return False, None
    for number, stored in task.received.items():
      self._receive(invocation, number, stored)
    try:
      for number in range(first, task.pass_number + 1):
        invocation.part.compute(tensors, number)
    except tf.errors.OpError as error:
      # The error's node and operation can't be sent.
      raise type(error)(None, None, error.message) from None
    part = invocation.plan.passes[task.pass_number]
    folded = [leaf for leaf in part.folded if leaf in tensors]
    invocation.kept[task.client] = {leaf: tensors[leaf] for leaf in part.kept}
    folded_arrays = transport.to_arrays(folded, [tensors[f] for f in folded])
    result_arrays = transport.to_arrays(
        part.results, [tensors[leaf] for leaf in part.results]
    )
    return True, (folded_arrays, result_arrays, time.monotonic() - start)

  def release(self, invocation: int) -> None:
    """Frees the values of an invocation, given by its number."""
    self._invocations.pop(invocation, None)

  def forget(self, computations: Sequence[int]) -> None:
    """Frees the plans of computations, given by their numbers."""
    for computation in computations:
      self._plans.pop(computation, None)

  def _invocation(self, task: Task) -> _Invocation:
    if task.invocation not in self._invocations:
      if task.computation not in self._plans:
        (proto,) = ray.get(list(task.source))
        self._plans[task.computation] = plan_lib.Plan(
            tff.framework.deserialize_computation(proto), self._graphs
        )
      self._invocations[task.invocation] = _Invocation(
          self._plans[task.computation], self._device
      )
    return self._invocations[task.invocation]

  def _receive(
      self, invocation: _Invocation, number: int, stored: Sequence[Any]
  ) -> None:
    leaves = invocation.plan.passes[number].received
    if not leaves or leaves[0] in invocation.server:
      return
    (arrays,) = ray.get(list(stored))
    for leaf, array in zip(leaves, arrays, strict=True):
      invocation.server[leaf] = transport.from_array(leaf, array)


def _answer(check: Callable[[], Any]) -> Any:
  try:
    return check()
  # A check can fail in any way; the program reports the error.
  except Exception as error:
    return f'{type(error).__name__}: {error}'
