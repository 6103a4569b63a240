"""Decides which clients of an invocation are computed at once."""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any, Optional

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


class Portioning:
  """Puts the clients of a plan into portions.

  The results don't depend on the portions, so these may depend on times.
  """

  def __init__(self, plan: plan_lib.Plan):
    self._plan = plan
    self._num_clients_seen = 0
    self._seconds = math.inf
    self._bulk: Optional[bulk_plan.BulkPlan] = None

  def saw(self, seconds: Sequence[float]) -> None:
    """Takes note of how long each client of an invocation was computed."""
    self._num_clients_seen += len(seconds)
    self._seconds = statistics.median(seconds)

  def portions(
      self,
      invocation: execution.Invocation,
      devices: Sequence[devices_lib.Device],
  ) -> list[client_portions.Portion]:
    """Returns the portions of an invocation's clients, in their order."""
    plan = self._plan
    parts = [
        client_part.ClientPart(plan, device.name, invocation.server)
        for device in devices
    ]
    values = self._in_arrays(invocation, devices)
    if values is None:
      return [
          client_portions.OneClient(plan, parts[n % len(parts)], values)
          for n, values in enumerate(invocation.values)
      ]
    bulk = self._bulk
    assert bulk is not None
    num_threads = sum(device.num_threads for device in devices)
    size = max(
        1,
        min(
            math.ceil(len(values) / num_threads),
            _MAX_BYTES // max(1, bulk.client_bytes(max(_batch_sizes(values)))),
        ),
    )
    return [
        client_portions.SeveralClients(
            plan, bulk, parts[n % len(parts)], values[start : start + size]
        )
        for n, start in enumerate(range(0, len(values), size))
    ]

  def _in_arrays(
      self,
      invocation: execution.Invocation,
      devices: Sequence[devices_lib.Device],
  ) -> Optional[list[Mapping[symbols.Leaf, Any]]]:
    """Returns each client's values with its batches as arrays.

    The result is `None` if the clients are to be computed one by one.
    """
    if (
        self._num_clients_seen < _MIN_CLIENTS_SEEN
        or self._seconds > _MAX_SECONDS
        or len(invocation.values) == 1
        or any(not _is_cpu(device) for device in devices)
    ):
      return None
    if self._bulk is None:
      if not bulk_plan.is_possible(self._plan):
        return None
      self._bulk = bulk_plan.BulkPlan(self._plan)
    clients = []
    for values in invocation.values:
      client: dict[symbols.Leaf, Any] = {}
      for leaf, value in zip(self._plan.client_inputs, values, strict=True):
        if isinstance(value, client_dataset.ClientDataset):
          value = value.arrays()
        if value is None or isinstance(value, tf.data.Dataset):
          return None
        client[leaf] = value
      clients.append(client)
    if self._bulk.needs_equal_batches and len(_batch_sizes(clients)) != 1:
      return None
    return clients


def _batch_sizes(clients: Sequence[Mapping[symbols.Leaf, Any]]) -> set[int]:
  """Returns the sizes of all batches, and 0 if a client has none."""
  sizes = set()
  for client in clients:
    for value in client.values():
      if isinstance(value, client_dataset.BatchArrays):
        sizes.update(value.sizes.tolist() or [0])
  return sizes


def of(plan: plan_lib.Plan) -> Portioning:
  """Returns the plan's only `Portioning`."""
  if plan.portioning is None:
    plan.portioning = Portioning(plan)
  return plan.portioning


def _is_cpu(device: devices_lib.Device) -> bool:
  return tf.DeviceSpec.from_string(device.name).device_type == 'CPU'
