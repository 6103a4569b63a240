"""The Ray actor that computes portions of clients in a worker process."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import platform
import time
from typing import Any, Optional

import numpy as np
import ray
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.imports import versions
from tff_bn.runtime import bulk_plan
from tff_bn.runtime import client_part
from tff_bn.runtime import client_portions
from tff_bn.runtime import devices
from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import portioning
from tff_bn.runtime import symbols
from tff_bn.runtime.on_ray import transport

# Another thread than the computing one answers whether the process is alive.
CONCURRENCY_GROUPS = {'health': 1}


@dataclasses.dataclass(frozen=True)
class Forms:
  """The forms that take arrays of a computation's parts, see `bulk_plan`.

  Attributes:
    are_compiled: Whether XLA compiles them.
    source: The reference to their protos by the key of the graph that takes a
      dataset.
  """

  are_compiled: bool
  source: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Task:
  """A portion's part of a pass, which a worker computes.

  Attributes:
    computation: The number of the computation.
    source: The reference to the computation's proto in Ray's object store; Ray
      fetches references inside of a sequence only on demand.
    invocation: The number of the computation's invocation.
    pass_number: The number of the pass.
    portion: The number of the portion.
    clients: The numbers of its clients.
    forms: What computes several clients at once; `None`: a single client is
      computed by itself.
    received: By pass, the reference to the server's values: for this pass, and
      with `inputs` for all passes before it.
    inputs: The clients' part of the argument, packed leaf by leaf; `None` if
      the worker has computed the previous passes of the portion.
  """

  computation: int
  source: Sequence[Any]
  invocation: int
  pass_number: int
  portion: int
  clients: range
  forms: Optional[Forms]
  received: Mapping[int, Sequence[Any]]
  inputs: Optional[Sequence[Any]]

  def __str__(self) -> str:
    """The clients in words."""
    if len(self.clients) == 1:
      return f'client number {self.clients[0]}'
    return f'clients number {self.clients[0]} to {self.clients[-1]}'


@dataclasses.dataclass(frozen=True)
class Description:
  """A worker's description of itself."""

  place: str  # The worker's machine and process, for messages.
  versions: Mapping[str, str]
  answers: Sequence[Any]  # Results of the checks, or their errors as texts.


class _Computation:
  """A computation's plans on a worker."""

  def __init__(self, plan: plan_lib.Plan):
    self.plan = plan
    # By whether XLA compiles.
    self._bulk_plans: dict[bool, bulk_plan.BulkPlan] = {}

  def bulk_plan(self, forms: Forms) -> bulk_plan.BulkPlan:
    """Returns the plan for several clients."""
    if forms.are_compiled not in self._bulk_plans:
      (protos,) = ray.get(list(forms.source))
      self._bulk_plans[forms.are_compiled] = bulk_plan.BulkPlan(
          self.plan,
          forms.are_compiled,
          lambda key: tff.framework.deserialize_computation(protos[key]),
      )
    return self._bulk_plans[forms.are_compiled]


class _Invocation:
  """A worker's values of an invocation."""

  def __init__(self, computation: _Computation, device: str):
    self.computation = computation
    self.server: dict[symbols.Leaf, Any] = {}
    self.part = client_part.ClientPart(device, self.server)
    # By portion, what computes it and has the tensors that later passes need.
    self.computers: dict[int, client_portions.Computer] = {}

  def new_computer(self, task: Task) -> client_portions.Computer:
    """Returns what computes a task, from its first pass on."""
    plan = self.computation.plan
    assert task.inputs is not None
    values = [transport.unpack(value, ray.get) for value in task.inputs]
    if task.forms is None:
      return client_portions.OneClient(plan, self.part, values)
    bulk = self.computation.bulk_plan(task.forms)
    return client_portions.SeveralClients(
        plan,
        client_portions.Portion(plan, task.clients, bulk),
        self.part,
        [
            list(map(portioning.in_arrays, value))
            if isinstance(leaf.type, tff.SequenceType)
            else value
            for leaf, value in zip(plan.client_inputs, values, strict=True)
        ],
    )


class Worker:
  """A Ray actor that computes one portion after another on its device."""

  def __init__(self, device_type: str):
    """Initializes the worker for a `'CPU'` or a `'GPU'`."""
    devices.share_gpus()
    self._device = devices.full_name(f'{device_type}:0')
    self._graphs = imported_graph.GraphCache()
    self._computations: dict[int, _Computation] = {}
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
  ) -> tuple[bool, Optional[tuple[list[Any], list[Any], np.ndarray]]]:
    """Computes a portion's part of a pass.

    Returns:
      Whether the worker could compute the task, which it can't if it does not
      have the values of the previous passes. If it could: the arrays of
      `client_portions.Output.folded` and `results`; and the seconds that each
      client took.
    """
    start = time.monotonic()
    invocation = self._invocation(task)
    computer = invocation.computers.pop(task.portion, None)
    first = task.pass_number
    if task.inputs is not None:
      computer = invocation.new_computer(task)
      first = 0
    elif computer is None:
      return False, None
    for number, stored in task.received.items():
      self._receive(invocation, number, stored)
    try:
      for number in range(first, task.pass_number + 1):
        output = computer.compute(number)
    except tf.errors.OpError as error:
      # The error's node and operation can't be sent.
      raise type(error)(None, None, error.message) from None
    if task.pass_number + 1 < len(invocation.computation.plan.passes):
      invocation.computers[task.portion] = computer
    folded, results = (
        transport.to_arrays(tensors.keys(), tensors.values())
        for tensors in output
    )
    seconds = (time.monotonic() - start) * computer.shares
    return True, (folded, results, seconds)

  def release(self, invocation: int) -> None:
    """Frees the values of an invocation, given by its number."""
    self._invocations.pop(invocation, None)

  def forget(self, computations: Sequence[int]) -> None:
    """Frees the plans of computations, given by their numbers."""
    for computation in computations:
      self._computations.pop(computation, None)

  def _invocation(self, task: Task) -> _Invocation:
    if task.invocation not in self._invocations:
      if task.computation not in self._computations:
        (proto,) = ray.get(list(task.source))
        plan = plan_lib.Plan(
            tff.framework.deserialize_computation(proto), self._graphs
        )
        self._computations[task.computation] = _Computation(plan)
      self._invocations[task.invocation] = _Invocation(
          self._computations[task.computation], self._device
      )
    return self._invocations[task.invocation]

  def _receive(
      self, invocation: _Invocation, number: int, stored: Sequence[Any]
  ) -> None:
    leaves = invocation.computation.plan.passes[number].received
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
