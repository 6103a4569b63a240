"""Clients that threads of this process compute."""

import collections
from collections.abc import Generator, Sequence
import concurrent.futures
import functools
import time
from typing import Any, Optional

import tensorflow as tf

from tff_bn.runtime import arguments
from tff_bn.runtime import client_part
from tff_bn.runtime import devices as devices_lib
from tff_bn.runtime import execution
from tff_bn.runtime import symbols

# The number of clients per thread that may wait to be aggregated.
_CLIENTS_AHEAD = 2


class LocalClients(execution.Clients):
  """Computes client i on device i modulo the number of devices."""

  def __init__(
      self,
      invocation: execution.Invocation,
      devices: Sequence[devices_lib.Device],
  ):
    self._plan = invocation.plan
    self._values = invocation.values
    self._devices = devices
    self._parts = [
        client_part.ClientPart(invocation.plan, device.name, invocation.server)
        for device in devices
    ]
    # Each client's tensors for later passes; `None` before the first pass.
    self._kept: list[Optional[dict[symbols.Leaf, tf.Tensor]]] = [
        None for _ in self._values
    ]
    self.seconds: list[float] = [0.0 for _ in self._values]
    self._results: list[dict[symbols.Leaf, Any]] = [{} for _ in self._values]

  def results(self, leaf: symbols.Leaf) -> list[Any]:
    """See the base class."""
    return [results[leaf] for results in self._results]

  def compute(self, number: int) -> Generator[Sequence[Any], None, None]:
    """See the base class."""
    clients = range(len(self._values))
    num_threads = sum(device.num_threads for device in self._devices)
    if num_threads == 1 or len(clients) == 1:
      for client in clients:
        yield self._compute(client, number)
      return
    running: collections.deque[concurrent.futures.Future[list[tf.Tensor]]] = (
        collections.deque()
    )
    try:
      for client in clients:
        if len(running) >= _CLIENTS_AHEAD * num_threads:
          yield running.popleft().result()
        device = self._devices[client % len(self._devices)]
        running.append(
            device.submit(functools.partial(self._compute, client, number))
        )
      while running:
        yield running.popleft().result()
    finally:
      for future in running:
        future.cancel()
      concurrent.futures.wait(running)

  def _compute(self, client: int, number: int) -> list[tf.Tensor]:
    """Computes a client's part of a pass; returns the values to aggregate."""
    start = time.monotonic()
    part = self._parts[client % len(self._parts)]
    tensors = self._kept[client]
    if tensors is None:
      tensors = part.begin(self._values[client])
    part.compute(tensors, number)
    plan = self._plan.passes[number]
    for leaf in plan.results:
      self._results[client][leaf] = arguments.to_python(
          tensors[leaf], leaf.type
      )
    folded = [tensors[leaf] for leaf in plan.folded if leaf in tensors]
    self._kept[client] = {leaf: tensors[leaf] for leaf in plan.kept}
    self.seconds[client] += time.monotonic() - start
    return folded
