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
import collections
from collections.abc import Iterable, Mapping, Sequence
import hashlib
import json
import os
import sqlite3
from typing import Any, Optional, Union

import numpy as np
from typing_extensions import override

ClientState = Union[
    np.ndarray, Mapping[str, 'ClientState'], Sequence['ClientState']
]

_LENGTH_BYTES = 4  # Of the header's length.
_CHECKSUM_BYTES = 16
# Written to the database's header, so that other SQLite files are recognised.
_APPLICATION_ID = 0x7446424E
_FORMAT = 2
_BUSY_SECONDS = 1.0


class ClientStateStoreError(RuntimeError):
  """The stored client states can't be read or written."""


class CorruptStateError(ValueError):
  """Bytes are not what `encode_state` returned."""


def encode_state(state: Any, owner: str = '') -> bytes:
  """Encodes a nested structure of arrays, with a checksum.

  Args:
    state: Nested dictionaries with string keys, lists and tuples of NumPy
      arrays, or of what `np.asarray` turns into numeric arrays.
    owner: Whose state it is. The bytes can be decoded for this owner only.

  Returns:
    Bytes for `decode_state`.

  Raises:
    TypeError: If a leaf is not numeric, or a key is not a string.
  """
  leaves = []

  def describe(value: Any) -> Any:
    if isinstance(value, Mapping):
      if not all(isinstance(key, str) for key in value):
        raise TypeError(f'The keys {list(value)} must be strings.')
      return {'dict': [[key, describe(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
      kind = 'list' if isinstance(value, list) else 'tuple'
      return {kind: [describe(item) for item in value]}
    array = np.asarray(value)
    if array.dtype.kind not in 'biufc':
      raise TypeError(
          f'A state holds numeric arrays, not {type(value).__name__} of dtype'
          f' {array.dtype}.'
      )
    leaves.append(array.tobytes())
    return [array.dtype.str, list(array.shape)]

  header = json.dumps(describe(state), separators=(',', ':')).encode()
  body = b''.join(
      [
          len(header).to_bytes(_LENGTH_BYTES, 'little'),
          header,
          *leaves,
      ]
  )
  return _checksum(body, owner) + body


def _checksum(body: bytes, owner: str) -> bytes:
  name = owner.encode()
  digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
  digest.update(len(name).to_bytes(_LENGTH_BYTES, 'little') + name)
  digest.update(body)
  return digest.digest()


def _check_checksum(data: bytes, owner: str) -> bytes:
  """Returns the body of encoded bytes; raises a `CorruptStateError`."""
  if not isinstance(data, bytes):  # A BLOB column accepts other types.
    raise CorruptStateError('The state is not binary.')
  checksum, body = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
  if len(body) < _LENGTH_BYTES or _checksum(body, owner) != checksum:
    raise CorruptStateError('The checksum is wrong.')
  return body


def decode_state(data: bytes, owner: str = '') -> Any:
  """Decodes what `encode_state` returned.

  Args:
    data: The bytes.
    owner: Whose state it is.

  Returns:
    The structure: ordered dictionaries, lists and tuples of new arrays.

  Raises:
    CorruptStateError: If the bytes were changed or cut, or are the state of
      another owner.
  """
  body = _check_checksum(data, owner)
  start = _LENGTH_BYTES
  end = start + int.from_bytes(body[:_LENGTH_BYTES], 'little')
  header = json.loads(body[start:end])
  offset = end

  def build(description: Any) -> Any:
    nonlocal offset
    if isinstance(description, list):
      dtype, shape = np.dtype(description[0]), description[1]
      count = int(np.prod(shape, dtype=np.int64))
      array = np.frombuffer(body, dtype, count, offset).reshape(shape)
      offset += array.nbytes
      return array.copy()
    ((kind, items),) = description.items()
    if kind == 'dict':
      return collections.OrderedDict((key, build(item)) for key, item in items)
    built = [build(item) for item in items]
    return built if kind == 'list' else tuple(built)

  return build(header)


def _owner(run: str, client_id: str, round_num: int) -> str:
  return json.dumps([run, client_id, round_num])


def _checksum_of(rows: Iterable[tuple[str, int, bytes]]) -> str:
  """A checksum of clients, rounds and the checksums of their states."""
  digest = hashlib.sha256()
  for client_id, round_num, checksum in rows:
    digest.update(json.dumps([client_id, round_num, checksum.hex()]).encode())
  return digest.hexdigest()


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
  ) -> Optional[ClientState]:
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
  def put_many(self, round_num: int, states: Mapping[str, ClientState]) -> None:
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
  ) -> Optional[ClientState]:
    versions = self._versions.get(client_id, {})
    rounds = [r for r in versions if round_num is None or r <= round_num]
    if not rounds:
      return None
    newest = max(rounds)
    return decode_state(versions[newest], _owner(self._run, client_id, newest))

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
          _check_checksum(data, _owner(self._run, client_id, max(rounds)))
        rows.append((client_id, max(rounds), data[:_CHECKSUM_BYTES]))
    return _checksum_of(rows)

  @override
  def put_many(self, round_num: int, states: Mapping[str, ClientState]) -> None:
    _check_not_committed(round_num, self._committed_round)
    encoded = {
        key: encode_state(value, _owner(self._run, key, round_num))
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
    self._committed_round = _least(self._committed_round, round_num)

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


def _least(committed: Optional[int], round_num: int) -> Optional[int]:
  """The last committed round after the later ones were forgotten."""
  if committed is None or round_num < 0:
    return None
  return min(committed, round_num)


def _check_not_committed(round_num: int, committed: Optional[int]) -> None:
  if committed is not None and round_num <= committed:
    raise ValueError(
        f'Client states of round {round_num} come after those of round'
        f' {committed} were committed.'
    )


class SqliteClientStateStore(ClientStateStore):
  """A store in an SQLite file.

  What was committed survives the death of the process and of the machine, and
  the file is never left half written: SQLite rolls back what was not committed
  when it is opened next. One process at a time uses a file.
  """

  def __init__(
      self, path: Union[str, os.PathLike[str]], run: Optional[str] = None
  ):
    """Opens or creates the file.

    Args:
      path: The file.
      run: The checksum of the run that the states belong to. Default: do not
        check which run the file belongs to.

    Raises:
      ClientStateStoreError: If the file is damaged, is no file of this class,
        belongs to another run, or is in use by another process.
    """
    self._path = os.fspath(path)
    self._run = run or ''
    try:
      # With isolation_level=None the module begins no transaction of its own.
      self._connection = sqlite3.connect(
          self._path, timeout=_BUSY_SECONDS, isolation_level=None
      )
    except sqlite3.Error as e:
      raise self._error(e) from e
    try:
      # Holds the file's lock from the first transaction to `close`.
      self._execute('PRAGMA locking_mode=EXCLUSIVE')
      self._execute('PRAGMA synchronous=FULL')
      self._execute('BEGIN EXCLUSIVE')
      self._create_or_check(run)
      self._execute('COMMIT')
    except BaseException:
      self._connection.close()
      raise

  def _create_or_check(self, run: Optional[str]) -> None:
    ((application_id,),) = self._execute('PRAGMA application_id').fetchall()
    ((num_tables,),) = self._execute(
        'SELECT count(*) FROM sqlite_master'
    ).fetchall()
    if application_id == 0 and num_tables == 0:
      self._execute(f'PRAGMA application_id={_APPLICATION_ID}')
      self._execute(
          'CREATE TABLE states (client_id TEXT NOT NULL, round INTEGER NOT'
          ' NULL, state BLOB NOT NULL, PRIMARY KEY (client_id, round))'
      )
      self._execute('CREATE TABLE committed (round INTEGER NOT NULL)')
      self._execute('CREATE TABLE run (checksum TEXT NOT NULL)')
      self._execute('INSERT INTO run VALUES (?)', self._run)
      self._execute(f'PRAGMA user_version={_FORMAT}')
      return
    if application_id != _APPLICATION_ID:
      raise ClientStateStoreError(
          f'{self._path} is an SQLite file, but does not hold client states;'
          ' remove it or use another folder.'
      )
    ((version,),) = self._execute('PRAGMA user_version').fetchall()
    if version != _FORMAT:
      raise ClientStateStoreError(
          f'{self._path} was written by another version of tff_bn, whose format'
          ' this one does not know; start the run over in another folder.'
      )
    ((found,),) = self._execute('SELECT checksum FROM run').fetchall()
    if run in (None, found):
      self._run = found
      return
    if self.committed_round:
      raise ClientStateStoreError(
          f'{self._path} holds the client states of a run with other settings,'
          ' data or another model; use another folder.'
      )
    # Nothing has come of that run.
    self._execute('DELETE FROM states')
    self._execute('UPDATE run SET checksum = ?', self._run)

  def _execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
    try:
      return self._connection.execute(statement, values)
    except sqlite3.Error as e:
      raise self._error(e) from e

  def _error(self, error: sqlite3.Error) -> ClientStateStoreError:
    text = str(error)
    subject = f"{self._path}, which holds the clients' states,"
    if 'locked' in text:
      return ClientStateStoreError(
          f'{self._path} is in use by another process; wait for its end or use'
          ' another folder.'
      )
    if 'disk is full' in text:
      return ClientStateStoreError(
          f'{subject} cannot be written: no space is left on the disk. Once'
          ' there is, the same command goes on from the last checkpoint.'
      )
    damages = ('malformed', 'not a database', 'Could not decode')
    if any(damage in text for damage in damages):
      return ClientStateStoreError(
          f'{subject} is damaged ({text}). Put back an intact copy of the run,'
          ' or start it over in another folder.'
      )
    return ClientStateStoreError(
        f'{subject} cannot be read or written at present ({text}). Nothing was'
        ' removed; once it can be, the same command goes on from the last'
        ' checkpoint.'
    )

  def _begin(self) -> None:
    if not self._connection.in_transaction:
      self._execute('BEGIN EXCLUSIVE')

  @property
  @override
  def committed_round(self) -> Optional[int]:
    rows = self._execute('SELECT round FROM committed').fetchall()
    return rows[0][0] if rows else None

  @override
  def get(
      self, client_id: str, round_num: Optional[int] = None
  ) -> Optional[ClientState]:
    condition, values = '', ()
    if round_num is not None:
      condition, values = ' AND round <= ?', (round_num,)
    rows = self._execute(
        f'SELECT round, state FROM states WHERE client_id = ?{condition}'
        ' ORDER BY round DESC LIMIT 1',
        client_id,
        *values,
    ).fetchall()
    if not rows:
      return None
    ((round_num, data),) = rows
    try:
      return decode_state(data, _owner(self._run, client_id, round_num))
    except CorruptStateError as e:
      raise ClientStateStoreError(self._damaged(client_id)) from e

  def _damaged(self, client_id: str) -> str:
    return (
        f'The state of client {client_id!r} in {self._path} is damaged, or is'
        " another client's. Put back an intact copy of the run, or start it"
        ' over in another folder.'
    )

  @property
  @override
  def newest_round(self) -> Optional[int]:
    ((newest,),) = self._execute('SELECT max(round) FROM states').fetchall()
    return newest

  @override
  def checksum(self, round_num: int, *, verify: bool = False) -> str:
    state = 'state' if verify else f'substr(state, 1, {_CHECKSUM_BYTES})'
    rows = self._execute(
        f'SELECT client_id, round, {state} FROM states AS newest WHERE round ='
        ' (SELECT max(round) FROM states WHERE client_id = newest.client_id AND'
        ' round <= ?) ORDER BY client_id',
        round_num,
    )

    def checked():
      # One state in memory at a time.
      for client_id, state_round, data in rows:
        if verify:
          try:
            _check_checksum(data, _owner(self._run, client_id, state_round))
          except CorruptStateError as error:
            raise CorruptStateError(self._damaged(client_id)) from error
        yield client_id, state_round, data[:_CHECKSUM_BYTES]

    try:
      return _checksum_of(checked())
    except sqlite3.Error as error:
      raise self._error(error) from error

  @override
  def put_many(self, round_num: int, states: Mapping[str, ClientState]) -> None:
    committed = self.committed_round
    _check_not_committed(round_num, committed)
    encoded = [
        (key, encode_state(value, _owner(self._run, key, round_num)))
        for key, value in states.items()
    ]
    # One transaction from here to `commit`: what the process does not live to
    # commit, SQLite rolls back.
    self._begin()
    for client_id, data in encoded:
      self._execute(
          'DELETE FROM states WHERE client_id = ? AND round > ?',
          client_id,
          -1 if committed is None else committed,
      )
      self._execute(
          'INSERT INTO states VALUES (?, ?, ?)', client_id, round_num, data
      )

  @override
  def commit(self, round_num: int) -> None:
    self._begin()
    self._set_committed_round(round_num)
    self._execute('COMMIT')

  def _set_committed_round(self, round_num: Optional[int]) -> None:
    self._execute('DELETE FROM committed')
    if round_num is not None:
      self._execute('INSERT INTO committed VALUES (?)', round_num)

  @override
  def forget_after(self, round_num: int) -> None:
    self._begin()
    self._execute('DELETE FROM states WHERE round > ?', round_num)
    self._set_committed_round(_least(self.committed_round, round_num))
    self._execute('COMMIT')

  @override
  def prune(self, oldest_kept_round: int) -> None:
    # Inside the transaction of the next `commit`, if one is open: pruning must
    # not make anything durable that was put since the last one.
    in_transaction = self._connection.in_transaction
    self._begin()
    self._execute(
        'DELETE FROM states WHERE round < (SELECT max(newer.round) FROM states'
        ' AS newer WHERE newer.client_id = states.client_id AND newer.round <='
        ' ?)',
        oldest_kept_round,
    )
    if not in_transaction:
      self._execute('COMMIT')

  @override
  def client_ids(self) -> tuple[str, ...]:
    rows = self._execute('SELECT DISTINCT client_id FROM states').fetchall()
    return tuple(sorted(client_id for (client_id,) in rows))

  @override
  def close(self) -> None:
    # An open transaction is rolled back.
    self._connection.close()
