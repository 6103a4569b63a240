"""Decides which clients of an invocation are computed at once."""

from collections.abc import Iterator, Sequence
import contextlib
import itertools
import math
import statistics
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tff_bn.common import batch_arrays
from tff_bn.common import cores
from tff_bn.runtime import bulk_plan
from tff_bn.runtime import client_dataset
from tff_bn.runtime import client_portions
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib

# Computing a client by itself costs 1 to 2 ms more than computing it among
# others, and the functions for several clients take about half a second to
# trace. So they are built after this many clients for each pass,
_MIN_CLIENTS_SEEN = 300
# if half of them took less than this.
_MAX_SECONDS = 0.03
# The size of the data and values of the clients that are computed at once.
_MAX_BYTES = 2**26
# XLA takes several seconds to compile the function. Then small steps are
# several times as fast, but convolutions of larger batches are slower.
_MIN_COMPILED_CLIENTS = cores.MIN_COMPILED_CLIENTS
_MAX_COMPILED_FLOPS = 8e6
# It compiles a function for each number of clients.
_COMPILED_CLIENTS = 50

# A portion and its clients' values: the values of one client, or what
# `client_portions.SeveralClients` takes.
PortionOfValues = tuple[client_portions.Portion, Sequence[Any]]

# Each client's values, in the order of `plan.client_inputs`.
_Clients = Sequence[Sequence[Any]]


class Portioning:
  """Puts the clients of a plan into portions.

  Where XLA compiles, last digits differ. So that decision depends on nothing
  but the round itself, and a run that is resumed has the same results. The
  others may depend on times, because they don't change a bit.
  """

  def __init__(self) -> None:
    self._num_clients_seen = 0
    self._seconds = math.inf
    # Of all clients, in the first invocation and in all later ones.
    self._first_seconds = math.inf
    self._later_seconds = 0.0
    # By `is_compiled`.
    self._bulk_plans: dict[bool, bulk_plan.BulkPlan] = {}
    self._is_possible: Optional[bool] = None
    self._can_compile = True
    # By the number of samples in a batch.
    self._flops: dict[int, float] = {}

  def saw(self, seconds: Sequence[float]) -> None:
    """Takes note of how long each client of an invocation was computed."""
    if self._num_clients_seen:
      self._later_seconds += sum(seconds)
    else:
      self._first_seconds = sum(seconds)
    self._num_clients_seen += len(seconds)
    self._seconds = statistics.median(seconds)

  def uses_all_cpus(self) -> bool:
    """Returns whether portions run on all logical CPUs.

    XLA compiles their functions again for each CPU. So that has to wait until
    the clients took as long as in the first invocation, which compiles.
    """
    return self._later_seconds >= self._first_seconds

  def portions(
      self, invocation: execution.Invocation, num_threads: int, are_cpus: bool
  ) -> list[PortionOfValues]:
    """Returns the portions of an invocation's clients, in their order.

    Args:
      invocation: The invocation.
      num_threads: The number of portions that are computed concurrently.
      are_cpus: Whether only CPUs compute clients.
    """
    plan = invocation.plan
    clients: _Clients = []
    if are_cpus and len(invocation.values) > 1:
      clients = self._in_arrays(invocation)
    portions: list[PortionOfValues] = []
    start = 0
    if clients:
      for size, bulk in self._bulks(plan, clients, num_threads):
        numbers = range(start, start + size)
        columns = list(zip(*clients[start : start + size]))
        portions.append((client_portions.Portion(plan, numbers, bulk), columns))
        start += size
    return portions + [
        (client_portions.Portion(plan, range(number, number + 1)), values)
        for number, values in enumerate(invocation.values[start:], start)
    ]

  @contextlib.contextmanager
  def watching(self, portions: Sequence[PortionOfValues]) -> Iterator[None]:
    """Notices in a `with` block that XLA cannot compile one of the portions.

    From then on, it is not asked again.

    Raises:
      execution.NotCompiledError: In place of TensorFlow's error.
    """
    try:
      yield
    except bulk_plan.COMPILATION_ERRORS as error:
      if not any(p.bulk and p.bulk.is_compiled for p, _ in portions):
        raise
      self._can_compile = False
      self._bulk_plans.pop(True, None)
      raise execution.NotCompiledError from error

  def _is_worth_tracing(self, plan: plan_lib.Plan) -> bool:
    num_passes = sum(bool(part.clients.outputs) for part in plan.passes)
    return (
        self._num_clients_seen >= _MIN_CLIENTS_SEEN * num_passes
        and self._seconds <= _MAX_SECONDS
    )

  def _in_arrays(self, invocation: execution.Invocation) -> _Clients:
    """Returns each client's values with its batches as arrays.

    The result is empty if that is impossible or useless.
    """
    plan = invocation.plan
    if not (
        self._is_worth_tracing(plan)
        or len(invocation.values) >= _MIN_COMPILED_CLIENTS
    ):
      return []
    if self._is_possible is None:
      self._is_possible = bulk_plan.is_possible(plan)
    if not self._is_possible:
      return []
    clients = []
    for values in invocation.values:
      client = [in_arrays(value) for value in values]
      if any(value is None for value in client):
        return []
      clients.append(client)
    return clients

  def _bulks(
      self, plan: plan_lib.Plan, clients: _Clients, num_threads: int
  ) -> Iterator[tuple[int, bulk_plan.BulkPlan]]:
    """Yields how many of the next clients are computed at once, and how.

    The clients that are left are computed one by one.
    """
    sizes = _batch_sizes(clients)
    equal_size = next(iter(sizes)) if len(sizes) == 1 else 0
    ordinary = self._bulk_plan(plan, is_compiled=False)
    num_bytes = [
        ordinary.client_bytes(dict(zip(plan.client_inputs, client)))
        for client in clients
    ]
    rest = len(clients)
    if equal_size and self._compiles(plan, equal_size, num_bytes):
      compiled = self._bulk_plan(plan, is_compiled=True)
      while rest >= _COMPILED_CLIENTS:
        yield _COMPILED_CLIENTS, compiled
        rest -= _COMPILED_CLIENTS
    if not self._is_worth_tracing(plan) or (
        ordinary.needs_equal_batches and not equal_size
    ):
      return
    most = math.ceil(rest / num_threads)
    while rest:
      totals = itertools.accumulate(num_bytes[-rest:][:most])
      size = max(1, sum(total <= _MAX_BYTES for total in totals))
      yield size, ordinary
      rest -= size

  def _compiles(
      self, plan: plan_lib.Plan, batch_size: int, num_bytes: Sequence[int]
  ) -> bool:
    """Returns whether XLA compiles clients with batches of the same size."""
    if (
        len(num_bytes) < _MIN_COMPILED_CLIENTS
        or max(num_bytes) * _COMPILED_CLIENTS > _MAX_BYTES
        or not self._can_compile
    ):
      return False
    if batch_size not in self._flops:
      self._flops[batch_size] = bulk_plan.compiled_flops(plan, batch_size)
    return self._flops[batch_size] <= _MAX_COMPILED_FLOPS

  def _bulk_plan(
      self, plan: plan_lib.Plan, *, is_compiled: bool
  ) -> bulk_plan.BulkPlan:
    if is_compiled not in self._bulk_plans:
      forms = plan.array_forms  # Not the plan, to which the result belongs.
      self._bulk_plans[is_compiled] = bulk_plan.BulkPlan(
          plan, is_compiled, lambda key: forms[key].build(is_compiled)
      )
    return self._bulk_plans[is_compiled]


def _batch_sizes(clients: _Clients) -> set[int]:
  """Returns the sizes of all batches, and 0 if a client has none."""
  sizes: set[int] = set()
  for client in clients:
    for value in client:
      if isinstance(value, batch_arrays.BatchArrays):
        sizes.update(value.sizes.tolist() or [0])
  return sizes


def of(plan: plan_lib.Plan) -> Portioning:
  """Returns the plan's only `Portioning`."""
  if plan.portioning is None:
    plan.portioning = Portioning()
  return plan.portioning


def in_arrays(value: Any) -> Any:
  """Returns a dataset as `BatchArrays`; `None` if only reading tells them."""
  if isinstance(value, np.ndarray):
    return value  # The other checks are slow for many clients.
  if isinstance(value, client_dataset.ClientDataset):
    return value.arrays()
  if isinstance(value, tf.data.Dataset):
    return batch_arrays.of_dataset(value)
  return value
