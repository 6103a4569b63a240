"""Decides which clients of an invocation are computed at once."""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any

import tensorflow as tf

from tff_bn.runtime import bulk_plan
from tff_bn.runtime import client_dataset
from tff_bn.runtime import client_part
from tff_bn.runtime import client_portions
from tff_bn.runtime import devices as devices_lib
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import symbols

# Computing a client by itself costs about 2 ms more than computing it among
# others, and the function for several clients takes about a second to trace.
# So it is built after this many clients,
_MIN_CLIENTS_SEEN = 100
# if half of them took less than this.
_MAX_SECONDS = 0.03
# The size of the values of the clients that are computed at once.
_MAX_BYTES = 2**26
# XLA takes several seconds to compile the function. Then small steps are
# several times as fast, but convolutions of larger batches are slower.
_MIN_COMPILED_CLIENTS = 100
_MAX_COMPILED_FLOPS = 6e6


_Clients = Sequence[Mapping[symbols.Leaf, Any]]


class Portioning:
  """Puts the clients of a plan into portions.

  Where XLA compiles, last digits differ. So that decision depends on nothing
  but the round itself, and a run that is resumed has the same results. The
  others may depend on times, because they don't change a bit.
  """

  def __init__(self) -> None:
    self._num_clients_seen = 0
    self._seconds = math.inf
    # By `is_compiled`.
    self._bulk_plans: dict[bool, bulk_plan.BulkPlan] = {}
    # By the number of samples in a batch.
    self._flops: dict[int, float] = {}

  def saw(self, seconds: Sequence[float]) -> None:
    """Takes note of how long each client of an invocation was computed."""
    self._num_clients_seen += len(seconds)
    self._seconds = statistics.median(seconds)

  def portions(
      self,
      invocation: execution.Invocation,
      devices: Sequence[devices_lib.Device],
  ) -> Sequence[client_portions.Portion]:
    """Returns the portions of an invocation's clients, in their order."""
    plan = invocation.plan
    parts = [
        client_part.ClientPart(plan, device.name, invocation.server)
        for device in devices
    ]
    clients: _Clients = []
    if len(invocation.values) > 1 and all(map(_is_cpu, devices)):
      clients = self._in_arrays(invocation)
    bulk_plans = self._choose(plan, clients) if clients else []
    if not bulk_plans:
      return [
          client_portions.OneClient(plan, parts[n % len(parts)], values)
          for n, values in enumerate(invocation.values)
      ]
    size = bulk_plans[0].max_clients(max(_batch_sizes(clients)), _MAX_BYTES)
    if not bulk_plans[0].is_compiled:
      # XLA uses several cores by itself.
      num_threads = sum(device.num_threads for device in devices)
      size = min(size, math.ceil(len(clients) / num_threads))
    return [
        client_portions.SeveralClients(
            plan,
            bulk_plans,
            parts[n % len(parts)],
            clients[start : start + size],
        )
        for n, start in enumerate(range(0, len(clients), size))
    ]

  @property
  def _is_worth_tracing(self) -> bool:
    return (
        self._num_clients_seen >= _MIN_CLIENTS_SEEN
        and self._seconds <= _MAX_SECONDS
    )

  def _in_arrays(self, invocation: execution.Invocation) -> _Clients:
    """Returns each client's values with its batches as arrays.

    The result is empty if that is impossible or useless.
    """
    plan = invocation.plan
    if not (
        self._is_worth_tracing
        or len(invocation.values) >= _MIN_COMPILED_CLIENTS
    ) or not bulk_plan.is_possible(plan):
      return []
    clients = []
    for values in invocation.values:
      client: dict[symbols.Leaf, Any] = {}
      for leaf, value in zip(plan.client_inputs, values, strict=True):
        if isinstance(value, client_dataset.ClientDataset):
          value = value.arrays()
        if value is None or isinstance(value, tf.data.Dataset):
          return []
        client[leaf] = value
      clients.append(client)
    return clients

  def _choose(
      self, plan: plan_lib.Plan, clients: _Clients
  ) -> list[bulk_plan.BulkPlan]:
    """Returns the plans for several clients, the best one first, if any."""
    sizes = _batch_sizes(clients)
    equal_size = next(iter(sizes)) if len(sizes) == 1 else 0
    ordinary = self._bulk_plan(plan, is_compiled=False)
    if equal_size and len(clients) >= _MIN_COMPILED_CLIENTS:
      if equal_size not in self._flops:
        self._flops[equal_size] = bulk_plan.compiled_flops(plan, equal_size)
      compiled = self._bulk_plan(plan, is_compiled=True)
      if (
          self._flops[equal_size] <= _MAX_COMPILED_FLOPS
          and not compiled.has_failed
      ):
        return [compiled, ordinary]
    if self._is_worth_tracing and (
        equal_size or not ordinary.needs_equal_batches
    ):
      return [ordinary]
    return []

  def _bulk_plan(
      self, plan: plan_lib.Plan, *, is_compiled: bool
  ) -> bulk_plan.BulkPlan:
    if is_compiled not in self._bulk_plans:
      self._bulk_plans[is_compiled] = bulk_plan.BulkPlan(plan, is_compiled)
    return self._bulk_plans[is_compiled]


def _batch_sizes(clients: _Clients) -> set[int]:
  """Returns the sizes of all batches, and 0 if a client has none."""
  sizes: set[int] = set()
  for client in clients:
    for value in client.values():
      if isinstance(value, client_dataset.BatchArrays):
        sizes.update(value.sizes.tolist() or [0])
  return sizes


def of(plan: plan_lib.Plan) -> Portioning:
  """Returns the plan's only `Portioning`."""
  if plan.portioning is None:
    plan.portioning = Portioning()
  return plan.portioning


def _is_cpu(device: devices_lib.Device) -> bool:
  return tf.DeviceSpec.from_string(device.name).device_type == 'CPU'
