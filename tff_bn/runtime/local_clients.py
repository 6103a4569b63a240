"""Clients that threads of this process compute."""

import collections
from collections.abc import Generator, Sequence
import concurrent.futures
import contextlib
import functools
import itertools
import time
from typing import Any

import numpy as np

from tff_bn.common import interruptible
from tff_bn.runtime import arguments
from tff_bn.runtime import client_part
from tff_bn.runtime import client_portions
from tff_bn.runtime import devices as devices_lib
from tff_bn.runtime import execution
from tff_bn.runtime import plan_stage
from tff_bn.runtime import portioning

# The number of portions per thread that may wait to be aggregated.
_PORTIONS_AHEAD = 2


class LocalClients(client_portions.PortionedClients):
  """Clients in portions, each of which one thread computes at a time.

  Portion i is computed by a thread of device i modulo the number of devices.
  With `uses_all_cpus`, the same holds for all CPUs of a device.
  """

  def __init__(
      self,
      invocation: execution.Invocation,
      portions: Sequence[portioning.PortionOfValues],
      devices: Sequence[devices_lib.Device],
      uses_all_cpus: bool = False,
  ):
    """Initializes the clients; `portions` has them in their order."""
    plan = invocation.plan
    super().__init__(plan, len(invocation.values))
    self._cancellation = plan_stage.Cancellation()
    part_on = functools.cache(
        lambda name: client_part.ClientPart(
            name, invocation.server, self._cancellation
        )
    )
    names = [
        itertools.cycle(device.all_names if uses_all_cpus else [device.name])
        for device in devices
    ]
    parts = (part_on(next(own_names)) for own_names in itertools.cycle(names))
    self._portions = [portion for portion, _ in portions]
    self._computers = [
        client_portions.OneClient(plan, part, values)
        if portion.bulk is None
        else client_portions.SeveralClients(plan, portion, part, values)
        for part, (portion, values) in zip(parts, portions)
    ]
    self._devices = devices

  def compute(self, number: int) -> Generator[execution.Computed, None, None]:
    """See the base class."""
    with contextlib.closing(self._outputs(number)) as outputs:
      for portion, computer, (output, seconds) in zip(
          self._portions, self._computers, outputs, strict=True
      ):
        results = {
            leaf: (
                arguments.to_python(tensor, leaf.type)
                if portion.bulk is None
                # `by_client` copies each client's part.
                else np.asarray(tensor)
            )
            for leaf, tensor in output.results.items()
        }
        self._finish(portion, results, seconds * computer.shares)
        yield portion.computed(number, output.folded.values())

  def _outputs(
      self, number: int
  ) -> Generator[tuple[client_portions.Output, float], None, None]:
    """Yields each portion's output of a pass and the seconds that it took."""
    # A single client is computed by a thread, too, so that a signal can end the
    # wait for it.
    num_threads = sum(device.num_threads for device in self._devices)
    most = _PORTIONS_AHEAD * num_threads if num_threads > 1 else 1
    running: collections.deque[concurrent.futures.Future[Any]] = (
        collections.deque()
    )
    devices = itertools.cycle(self._devices)
    try:
      for computer, device in zip(self._computers, devices):
        if len(running) >= most:
          yield interruptible.result(running[0])
          running.popleft()
        running.append(
            device.submit(functools.partial(_timed, computer, number))
        )
      while running:
        yield interruptible.result(running[0])
        running.popleft()
    finally:
      if running:  # An error or a signal ends the pass.
        self._cancellation.start()
        for future in running:
          future.cancel()
        concurrent.futures.wait(running)


def _timed(
    computer: client_portions.Computer, number: int
) -> tuple[client_portions.Output, float]:
  start = time.monotonic()
  output = computer.compute(number)
  return output, time.monotonic() - start
