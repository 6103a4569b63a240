"""Clients that threads of this process compute."""

import collections
from collections.abc import Generator, Sequence
import concurrent.futures
import functools
import itertools
from typing import Any

from tff_bn.runtime import client_portions
from tff_bn.runtime import devices as devices_lib
from tff_bn.runtime import execution
from tff_bn.runtime import symbols

# The number of portions per thread that may wait to be aggregated.
_PORTIONS_AHEAD = 2


class LocalClients(execution.Clients):
  """Clients in portions, each of which one thread computes at a time.

  Portion i is computed by a thread of device i modulo the number of devices.
  """

  def __init__(
      self,
      portions: Sequence[client_portions.Portion],
      devices: Sequence[devices_lib.Device],
  ):
    """Initializes the clients; `portions` has them in their order."""
    self._portions = portions
    self._devices = devices

  @property
  def seconds(self) -> Sequence[float]:
    """See the base class."""
    return list(
        itertools.chain.from_iterable(p.seconds for p in self._portions)
    )

  def results(self, leaf: symbols.Leaf) -> list[Any]:
    """See the base class."""
    return [
        results[leaf]
        for portion in self._portions
        for results in portion.results
    ]

  def compute(self, number: int) -> Generator[execution.Computed, None, None]:
    """See the base class."""
    num_threads = sum(device.num_threads for device in self._devices)
    if num_threads == 1 or len(self._portions) == 1:
      for portion in self._portions:
        yield portion.compute(number)
      return
    running: collections.deque[
        concurrent.futures.Future[execution.Computed]
    ] = collections.deque()
    devices = itertools.cycle(self._devices)
    try:
      for portion, device in zip(self._portions, devices):
        if len(running) >= _PORTIONS_AHEAD * num_threads:
          yield running.popleft().result()
        running.append(
            device.submit(functools.partial(portion.compute, number))
        )
      while running:
        yield running.popleft().result()
    finally:
      for future in running:
        future.cancel()
      concurrent.futures.wait(running)
