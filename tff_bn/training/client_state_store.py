"""What clients keep between rounds, by client id and round.

A client's state is a nested dictionary (lists and tuples are fine too) of NumPy
arrays. It is stored bit for bit, with dtypes and shapes.

A store goes together with checkpoints of the server's state. Versions are
written with `put_many` and become durable with `commit`, which is called
*before* the server's checkpoint of that round is published. A run that
continues from a checkpoint calls `forget_after` with its round. So a server's
checkpoint and the clients' states of its round become visible together or not
at all: states without their checkpoint are forgotten, and a checkpoint without
its states is recognised by the states' `checksum`.
"""

import abc
from collections.abc import Iterable, Mapping
from typing import Optional

from typing_extensions import override

from tff_bn.training import client_state_codec


class ClientStateStoreError(RuntimeError):
  """The stored client states can't be read or written."""


class ClientStateStore(abc.ABC):
  """The clients' states, by client id and round.

  The version of round r is what the client kept after round r. A client that
  was not sampled in a round has no version of it: its newest older one holds.

  Only the versions of committed rounds are kept apart; of the rounds since the
  last `commit` a client has one version, the newest.
  """

  @property
  @abc.abstractmethod
  def committed_round(self) -> Optional[int]:
    """The round of the last `commit`; `None` before the first."""

  @property
  @abc.abstractmethod
  def newest_round(self) -> Optional[int]:
    """The newest round of all states; `None` if there are none."""

  @abc.abstractmethod
  def checksum(self, round_num: int, *, verify: bool = False) -> str:
    """A checksum of all that clients kept after a round.

    Args:
      round_num: The round.
      verify: Whether to read every state and to check it.

    Returns:
      A number in hexadecimal digits. It depends on which clients have a state,
      of which round it is, and on every bit of it.

    Raises:
      CorruptStateError: If a state is damaged, and `verify` is set.
      ClientStateStoreError: If the states can't be read.
    """

  @abc.abstractmethod
  def get(
      self, client_id: str, round_num: Optional[int] = None
  ) -> Optional[client_state_codec.ClientState]:
    """Returns a client's newest state.

    Args:
      client_id: The client.
      round_num: If given, newer versions than of this round are ignored.

    Returns:
      A new copy of the state, or `None` if there is none.

    Raises:
      ClientStateStoreError: If the stored state is damaged.
    """

  @abc.abstractmethod
  def put_many(
      self, round_num: int, states: Mapping[str, client_state_codec.ClientState]
  ) -> None:
    """Stores what clients keep after a round.

    Args:
      round_num: The round; greater than that of the last `commit`.
      states: The states by client id.

    Raises:
      ValueError: If the round was already committed.
      TypeError: If a state is not a structure of numeric arrays.
    """

  @abc.abstractmethod
  def commit(self, round_num: int) -> None:
    """Makes everything that was put durable, as the states of this round.

    Args:
      round_num: The round, at least that of everything that was put.
    """

  @abc.abstractmethod
  def forget_after(self, round_num: int) -> None:
    """Drops all versions of later rounds, durably.

    Args:
      round_num: The round of the checkpoint from which a run continues; -1
        drops everything.
    """

  @abc.abstractmethod
  def prune(self, oldest_kept_round: int) -> None:
    """Drops the versions that no kept checkpoint needs.

    Every client keeps its newest version of at most `oldest_kept_round`, and
    everything newer.

    Args:
      oldest_kept_round: The round of the oldest checkpoint that is kept.
    """

  @abc.abstractmethod
  def client_ids(self) -> tuple[str, ...]:
    """Returns the ids of the clients that have a state, sorted."""

  @abc.abstractmethod
  def close(self) -> None:
    """Closes the store; what was put after the last `commit` is lost."""

  def __enter__(self) -> 'ClientStateStore':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()


class MemoryClientStateStore(ClientStateStore):
  """A store that ends with the process."""

  def __init__(self, run: str = ''):
    """Makes an empty store.

    Args:
      run: Which run it belongs to.
    """
    self._run = run
    self._committed_round: Optional[int] = None
    self._versions: dict[str, dict[int, bytes]] = {}

  @property
  @override
  def committed_round(self) -> Optional[int]:
    return self._committed_round

  @override
  def get(
      self, client_id: str, round_num: Optional[int] = None
  ) -> Optional[client_state_codec.ClientState]:
    versions = self._versions.get(client_id, {})
    rounds = [r for r in versions if round_num is None or r <= round_num]
    if not rounds:
      return None
    newest = max(rounds)
    return client_state_codec.decode_state(
        versions[newest], client_state_codec.owner(self._run, client_id, newest)
    )

  @property
  @override
  def newest_round(self) -> Optional[int]:
    return max((r for v in self._versions.values() for r in v), default=None)

  @override
  def checksum(self, round_num: int, *, verify: bool = False) -> str:
    rows = []
    for client_id, versions in sorted(self._versions.items()):
      rounds = [r for r in versions if r <= round_num]
      if rounds:
        data = versions[max(rounds)]
        if verify:
          client_state_codec.check_checksum(
              data, client_state_codec.owner(self._run, client_id, max(rounds))
          )
        rows.append(
            (client_id, max(rounds), data[: client_state_codec.CHECKSUM_BYTES])
        )
    return client_state_codec.checksum_of(rows)

  @override
  def put_many(
      self, round_num: int, states: Mapping[str, client_state_codec.ClientState]
  ) -> None:
    check_not_committed(round_num, self._committed_round)
    encoded = {
        key: client_state_codec.encode_state(
            value, client_state_codec.owner(self._run, key, round_num)
        )
        for key, value in states.items()
    }
    for client_id, data in encoded.items():
      versions = self._versions.setdefault(client_id, {})
      for r in _newer_than(versions, self._committed_round):
        del versions[r]
      versions[round_num] = data

  @override
  def commit(self, round_num: int) -> None:
    self._committed_round = round_num

  @override
  def forget_after(self, round_num: int) -> None:
    for client_id, versions in list(self._versions.items()):
      for r in _newer_than(versions, round_num):
        del versions[r]
      if not versions:
        del self._versions[client_id]
    self._committed_round = least(self._committed_round, round_num)

  @override
  def prune(self, oldest_kept_round: int) -> None:
    for versions in self._versions.values():
      for r in sorted(r for r in versions if r <= oldest_kept_round)[:-1]:
        del versions[r]

  @override
  def client_ids(self) -> tuple[str, ...]:
    return tuple(sorted(self._versions))

  @override
  def close(self) -> None:
    pass


def _newer_than(rounds: Iterable[int], round_num: Optional[int]) -> list[int]:
  return [r for r in rounds if round_num is None or r > round_num]


def least(committed: Optional[int], round_num: int) -> Optional[int]:
  """The last committed round after the later ones were forgotten."""
  if committed is None or round_num < 0:
    return None
  return min(committed, round_num)


def check_not_committed(round_num: int, committed: Optional[int]) -> None:
  """Raises a `ValueError` if a round is committed already."""
  if committed is not None and round_num <= committed:
    raise ValueError(
        f'Client states of round {round_num} come after those of round'
        f' {committed} were committed.'
    )
