"""A worker: the process, on whatever machine, in which Ray computes clients."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import platform
from typing import Any, Optional

import ray
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.imports import versions
from tff_bn.runtime import client_part
from tff_bn.runtime import devices
from tff_bn.runtime import graph_cache
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import symbols
from tff_bn.runtime.on_ray import transport

# Beside the thread that computes, one answers whether the process is alive.
CONCURRENCY_GROUPS = {'health': 1}


@dataclasses.dataclass(frozen=True)
class Task:
  """What a worker is to compute.

  Attributes:
    computation: The number of the computation.
    source: What finds its proto in Ray's object store; in a list, so that it is
      fetched only when it is needed.
    invocation: The number of the computation's invocation.
    pass_number: The number of the pass.
    client: The number of the client.
    received: For passes, what finds the server's values in the object store:
      those of this pass; of all up to this one, if there are `inputs`.
    inputs: The client's part of the argument. `None`: the worker has computed
      the passes before for this client.
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
  """What a worker says about itself.

  Attributes:
    place: Its machine and process, for messages.
    versions: See `tff_bn.imports.versions`.
    answers: What the functions of its program's checks returned, or the errors
      that they raised as texts.
  """

  place: str
  versions: Mapping[str, str]
  answers: Sequence[Any]


class _Invocation:
  """What a worker has of an invocation."""

  def __init__(self, plan: plan_lib.Plan, device: str):
    self.plan = plan
    self.server = {}
    self.part = client_part.ClientPart(plan, device, self.server)
    # By client, what later passes need.
    self.kept: dict[int, dict[symbols.Leaf, tf.Tensor]] = {}


class Worker:
  """A Ray actor that computes one client after another on its device."""

  def __init__(self, device_type: str):
    """Initializes the worker.

    Args:
      device_type: `'CPU'` or `'GPU'`.
    """
    for gpu in tf.config.list_physical_devices('GPU'):
      # The GPU may be shared with other workers, or with the program.
      tf.config.experimental.set_memory_growth(gpu, True)
    self._device = devices.full_name(f'{device_type}:0')
    self._graphs = graph_cache.GraphCache()
    self._plans: dict[int, plan_lib.Plan] = {}
    self._invocations: dict[int, _Invocation] = {}

  def describe(self, checks: Sequence[Callable[[], Any]]) -> Description:
    """Describes the worker.

    Args:
      checks: Functions whose results the program compares with its own.

    Returns:
      The description.
    """
    return Description(
        f'{platform.node()} (process {os.getpid()})',
        versions.versions(),
        [_answer(check) for check in checks],
    )

  @ray.method(concurrency_group='health')
  def is_alive(self) -> bool:
    """Whether the process works."""
    return True

  @ray.method(num_returns=2)
  def compute(
      self, task: Task
  ) -> tuple[bool, Optional[tuple[list[Any], list[Any]]]]:
    """Computes a client's part of a pass.

    Args:
      task: The task.

    Returns:
      Whether it could be done: not, if the worker does not know the passes
      before. And, for the server, the arrays of the clients' leaves among
      `folded`, and those of `results`.
    """
    invocation = self._invocation(task)
    tensors = invocation.kept.pop(task.client, None)
    if task.inputs is None and tensors is None:
      return False, None
    for number, stored in task.received.items():
      self._receive(invocation, number, stored)
    numbers = [task.pass_number]
    if task.inputs is not None:
      values = [transport.unpack(value, ray.get) for value in task.inputs]
      tensors = invocation.part.begin(values)
      numbers = range(task.pass_number + 1)
    try:
      for number in numbers:
        invocation.part.compute(tensors, number)
    except tf.errors.OpError as error:
      # What else it holds can't be sent.
      raise type(error)(None, None, error.message) from None
    part = invocation.plan.passes[task.pass_number]
    folded = [leaf for leaf in part.folded if leaf in tensors]
    values = tuple(
        transport.to_arrays(leaves, [tensors[leaf] for leaf in leaves])
        for leaves in (folded, part.results)
    )
    invocation.kept[task.client] = {leaf: tensors[leaf] for leaf in part.kept}
    return True, values

  def release(self, invocation: int) -> None:
    """Drops what the worker has of an invocation.

    Args:
      invocation: Its number.
    """
    self._invocations.pop(invocation, None)

  def forget(self, computations: Sequence[int]) -> None:
    """Drops the plans of computations.

    Args:
      computations: Their numbers.
    """
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
  # The data may be missing in any way; the program says what is wrong.
  except Exception as error:  # pylint: disable=broad-exception-caught
    return f'{type(error).__name__}: {error}'
