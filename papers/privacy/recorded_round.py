"""Records what each client sends and receives in a round of an algorithm.

The values are those of the algorithm's own computation: they are copied where
the runtime passes them from the clients to the server's sums.
"""

from collections.abc import Generator, Iterator, Sequence
import contextlib
from typing import NamedTuple

import numpy as np

from tff_bn import runtime
from tff_bn.runtime import client_portions
from tff_bn.runtime import devices as devices_lib
from tff_bn.runtime import execution
from tff_bn.runtime import local_clients
from tff_bn.runtime import portioning

# The number of the exchange in the round, from 1, and the value's place in the
# structure that its sender computed: as in `tff_bn.analysis.Message`.
Place = tuple[int, str]


class Recording(NamedTuple):
  """The values of one round.

  Attributes:
    sent: What each client sent.
    received: What the server sent to all clients.
  """

  sent: Sequence[dict[Place, np.ndarray]]
  received: dict[Place, np.ndarray]


class RecordingContext(runtime.InProcessContext):
  """An in-process runtime that records the values of its last invocation.

  Attributes:
    recording: The values that clients sent and received; of an invocation with
      clients.
  """

  def __init__(self) -> None:
    super().__init__(client_devices=[runtime.HOST], max_concurrent_clients=1)
    self.recording = Recording([], {})

  @contextlib.contextmanager
  def clients(
      self, invocation: execution.Invocation
  ) -> Iterator[local_clients.LocalClients]:
    """See the base class. Each client is computed by itself."""
    self.recording = Recording([{} for _ in invocation.values], {})
    portions = [
        (
            client_portions.Portion(invocation.plan, range(number, number + 1)),
            values,
        )
        for number, values in enumerate(invocation.values)
    ]
    yield _RecordedClients(invocation, portions, self._devices, self.recording)


class _RecordedClients(local_clients.LocalClients):
  """Clients whose messages are recorded."""

  def __init__(
      self,
      invocation: execution.Invocation,
      portions: Sequence[portioning.PortionOfValues],
      devices: Sequence[devices_lib.Device],
      recording: Recording,
  ):
    super().__init__(invocation, portions, devices)
    self._passes = invocation.plan.passes
    self._server = invocation.server
    self._recording = recording

  def compute(self, number: int) -> Generator[execution.Computed, None, None]:
    """See the base class."""
    part = self._passes[number]
    for leaf in part.received:
      self._recording.received[number + 1, leaf.name] = np.asarray(
          self._server[leaf]
      )
    leaves = [leaf for leaf in part.folded if leaf not in self._server]
    with contextlib.closing(super().compute(number)) as clients:
      for sent, client in zip(self._recording.sent, clients, strict=True):
        for leaf, value in zip(leaves, client.values, strict=True):
          sent[number + 1, leaf.name] = np.asarray(value)
        yield client
