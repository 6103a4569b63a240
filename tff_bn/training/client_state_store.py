"""The clients' states between rounds, in an SQLite file.

A client's state is a nested structure (dictionaries, lists, tuples) of NumPy
arrays, stored bit for bit with dtypes and shapes.

The store belongs to checkpoints of the server's state. `put_many` writes states
and `commit` makes them durable *before* the server's checkpoint of that round
is published. A run that continues from a checkpoint calls `forget_after` with
its round. So states without their checkpoint are forgotten, and a checkpoint
without its states is recognized by the states' `checksum`.
"""

from collections.abc import Iterator, Mapping
import hashlib
import json
import os
import sqlite3
from typing import Any, Optional, Union

from tff_bn.training import client_state_codec

# Written to the database's header, to recognize other SQLite files.
_APPLICATION_ID = 0x7446424E
_FORMAT = 2
_BUSY_SECONDS = 1.0
# The states that are kept in memory. If the process dies before the next
# `commit`, they are lost, as what is in the file would be.
_MAX_PENDING_BYTES = 2**26


class ClientStateStoreError(RuntimeError):
  """The stored client states can't be read or written."""


class ClientStateStore:
  """A store of the clients' states, by client id and round.

  The version of round r is the client's state after round r. A client that was
  not sampled in a round has no version of it; its newest older version applies.
  The store keeps all versions of committed rounds until `prune`, and of the
  rounds since the last `commit` only the newest version of each client.

  Until `commit`, states stay in memory unless they are too large for it. So the
  file gets them once for a checkpoint, and not in each round.

  Committed states survive the death of the process and of the machine. SQLite
  rolls back uncommitted changes when it opens the file. Only one process at a
  time can use a file.

  Attributes:
    path: The file.
  """

  def __init__(
      self, path: Union[str, os.PathLike[str]], run: Optional[str] = None
  ):
    """Opens or creates the file of the run whose checksum is `run`.

    By default, the states of any run are accepted.

    Raises:
      ClientStateStoreError: If the file is damaged, is no file of this class,
        belongs to another run, or is in use by another process.
    """
    self.path = os.fspath(path)
    self._run = run or ''
    # The round, the state and its size in bytes, by client id.
    self._pending: dict[str, tuple[int, client_state_codec.ClientState, int]]
    self._pending = {}
    self._pending_bytes = 0
    try:
      # With isolation_level=None the module begins no transactions itself.
      self._connection = sqlite3.connect(
          self.path, timeout=_BUSY_SECONDS, isolation_level=None
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
    application_id = self._select_one('PRAGMA application_id')
    if application_id == 0 and not self._select_one(
        'SELECT count(*) FROM sqlite_master'
    ):
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
          f'{self.path} is an SQLite file, but does not hold client states;'
          ' remove it or use another folder.'
      )
    if self._select_one('PRAGMA user_version') != _FORMAT:
      raise ClientStateStoreError(
          f'{self.path} has the format of another version of tff_bn, which'
          ' this version cannot read; start the run over in another folder.'
      )
    found = self._select_one('SELECT checksum FROM run')
    if run in (None, found):
      self._run = found
      return
    if self.committed_round:
      raise ClientStateStoreError(
          f'{self.path} holds the client states of a run with other settings,'
          ' data or another model; use another folder.'
      )
    # That run has no finished round.
    self._execute('DELETE FROM states')
    self._execute('UPDATE run SET checksum = ?', self._run)

  def _execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
    try:
      return self._connection.execute(statement, values)
    except sqlite3.Error as e:
      raise self._error(e) from e

  def _select_one(self, statement: str) -> Any:
    ((value,),) = self._execute(statement)
    return value

  def _error(self, error: sqlite3.Error) -> ClientStateStoreError:
    text = str(error)
    subject = f"{self.path}, which holds the clients' states,"
    if 'locked' in text:
      return ClientStateStoreError(
          f'{self.path} is in use by another process; wait for its end or use'
          ' another folder.'
      )
    if 'disk is full' in text:
      return ClientStateStoreError(
          f'{subject} cannot be written: no space is left on the disk. Free'
          ' some space and run the same command again; it continues from the'
          ' last checkpoint.'
      )
    damages = ('malformed', 'not a database', 'Could not decode')
    if any(damage in text for damage in damages):
      return ClientStateStoreError(
          f'{subject} is damaged ({text}). Put back an intact copy of the run,'
          ' or start it over in another folder.'
      )
    return ClientStateStoreError(
        f'{subject} cannot be read or written at present ({text}). Nothing was'
        ' removed. When the file is accessible again, the same command'
        ' continues from the last checkpoint.'
    )

  def _damaged(self, client_id: str) -> str:
    return (
        f'The state of client {client_id!r} in {self.path} is damaged, or is'
        " another client's. Put back an intact copy of the run, or start it"
        ' over in another folder.'
    )

  def _begin(self) -> None:
    if not self._connection.in_transaction:
      self._execute('BEGIN EXCLUSIVE')

  def _flush(self) -> None:
    """Writes the states that are in memory, in the transaction of `commit`."""
    if not self._pending:
      return
    committed = self.committed_round
    # If the process dies before `commit`, SQLite rolls this back.
    self._begin()
    for client_id, (round_num, state, _) in self._pending.items():
      self._execute(
          'DELETE FROM states WHERE client_id = ? AND round > ?',
          client_id,
          -1 if committed is None else committed,
      )
      self._execute(
          'INSERT INTO states VALUES (?, ?, ?)',
          client_id,
          round_num,
          client_state_codec.encode_state(
              state, self._owner(client_id, round_num)
          ),
      )
    self._pending.clear()
    self._pending_bytes = 0

  @property
  def committed_round(self) -> Optional[int]:
    """The round of the last `commit`; `None` before the first."""
    return self._select_one('SELECT max(round) FROM committed')

  @property
  def newest_round(self) -> Optional[int]:
    """The newest round of all states; `None` if there are no states."""
    self._flush()
    return self._select_one('SELECT max(round) FROM states')

  def get(
      self, client_id: str, round_num: Optional[int] = None
  ) -> Optional[client_state_codec.ClientState]:
    """Returns a client's newest state; `None` if it has none.

    The state must not be changed. If `round_num` is given, versions of later
    rounds are ignored.
    """
    if client_id in self._pending:
      found_round, state, _ = self._pending[client_id]
      if round_num is None or found_round <= round_num:
        return state
      self._flush()  # It replaces versions of rounds that are not committed.
    rows = self._execute(
        'SELECT round, state FROM states WHERE client_id = ?1 AND'
        ' (?2 IS NULL OR round <= ?2) ORDER BY round DESC LIMIT 1',
        client_id,
        round_num,
    ).fetchall()
    if not rows:
      return None
    ((found_round, data),) = rows
    return self._decoded(client_id, found_round, data)

  def newest(
      self, round_num: Optional[int] = None
  ) -> Iterator[tuple[str, client_state_codec.ClientState]]:
    """Yields the id and the newest state of each client, sorted by id.

    If `round_num` is given, versions of later rounds are ignored. Only one
    state is in memory at a time. The store must not be changed meanwhile.
    """
    for client_id, found_round, data in self._newest('state', round_num):
      yield client_id, self._decoded(client_id, found_round, data)

  def _newest(
      self, column: str, round_num: Optional[int] = None
  ) -> Iterator[tuple[str, int, Any]]:
    """Yields the id, round and a column of each client's newest state."""
    self._flush()
    rows = self._execute(
        f'SELECT client_id, round, {column} FROM states AS newest WHERE round ='
        ' (SELECT max(round) FROM states WHERE client_id = newest.client_id AND'
        ' (?1 IS NULL OR round <= ?1)) ORDER BY client_id',
        round_num,
    )
    try:
      yield from rows
    except sqlite3.Error as error:
      raise self._error(error) from error

  def _owner(self, client_id: str, round_num: int) -> str:
    """Returns the owner of a client's state after a round, for its checksum."""
    return json.dumps([self._run, client_id, round_num])

  def _decoded(
      self, client_id: str, round_num: int, data: bytes
  ) -> client_state_codec.ClientState:
    try:
      return client_state_codec.decode_state(
          data, self._owner(client_id, round_num)
      )
    except client_state_codec.CorruptStateError as e:
      raise ClientStateStoreError(self._damaged(client_id)) from e

  def checksum(self, round_num: int, *, verify: bool = False) -> str:
    """Returns a hexadecimal checksum of the clients' states after a round.

    It covers all clients with a state, the rounds of their states, and every
    bit of them.

    Args:
      round_num: The round.
      verify: Whether to read every state, and to raise a `CorruptStateError` if
        one is damaged.
    """
    state = 'state'
    if not verify:
      state = f'substr(state, 1, {client_state_codec.CHECKSUM_BYTES})'
    digest = hashlib.sha256()
    for client_id, state_round, data in self._newest(state, round_num):
      if verify:
        try:
          client_state_codec.check_checksum(
              data, self._owner(client_id, state_round)
          )
        except client_state_codec.CorruptStateError as error:
          raise client_state_codec.CorruptStateError(
              self._damaged(client_id)
          ) from error
      checksum = data[: client_state_codec.CHECKSUM_BYTES].hex()
      digest.update(json.dumps([client_id, state_round, checksum]).encode())
    return digest.hexdigest()

  def put_many(
      self, round_num: int, states: Mapping[str, client_state_codec.ClientState]
  ) -> None:
    """Stores the states after a round that is not committed, by client id.

    The store takes over the arrays, without a copy where it can: they become
    read-only.

    Raises:
      ValueError: If the round was already committed.
      TypeError: If a state is not a structure of numeric arrays.
    """
    committed = self.committed_round
    if committed is not None and round_num <= committed:
      raise ValueError(
          f'round_num={round_num} is not later than round {committed}, whose'
          ' client states were committed already.'
      )
    pending = {
        client_id: (round_num, *client_state_codec.frozen(state))
        for client_id, state in states.items()
    }
    for client_id, (*_, num_bytes) in pending.items():
      *_, replaced = self._pending.get(client_id, (0,))
      self._pending_bytes += num_bytes - replaced
    self._pending.update(pending)
    if self._pending_bytes > _MAX_PENDING_BYTES:
      self._flush()

  def commit(self, round_num: int) -> None:
    """Makes all stored states durable, as the states of this round."""
    self._flush()
    self._begin()
    self._set_committed_round(round_num)
    self._execute('COMMIT')

  def _set_committed_round(self, round_num: Optional[int]) -> None:
    self._execute('DELETE FROM committed')
    if round_num is not None:
      self._execute('INSERT INTO committed VALUES (?)', round_num)

  def forget_after(self, round_num: int) -> None:
    """Drops all versions of later rounds, durably; -1 drops everything."""
    self._flush()
    self._begin()
    self._execute('DELETE FROM states WHERE round > ?', round_num)
    committed = self.committed_round
    if committed is not None:
      self._set_committed_round(
          min(committed, round_num) if round_num >= 0 else None
      )
    self._execute('COMMIT')

  def prune(self, oldest_kept_round: int) -> None:
    """Drops the versions that no kept checkpoint needs.

    Every client keeps its newest version of at most `oldest_kept_round`, the
    round of the oldest checkpoint that is kept, and all newer versions.
    """
    self._flush()
    # If the transaction of the next `commit` is open, pruning must not make its
    # states durable.
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

  def client_ids(self, round_num: Optional[int] = None) -> tuple[str, ...]:
    """Returns the ids of the clients that have a state, sorted.

    If `round_num` is given, versions of later rounds are ignored.
    """
    self._flush()
    rows = self._execute(
        'SELECT DISTINCT client_id FROM states WHERE ?1 IS NULL OR round <= ?1',
        round_num,
    ).fetchall()
    return tuple(sorted(client_id for (client_id,) in rows))

  def close(self) -> None:
    """Closes the store and drops all changes since the last `commit`."""
    self._connection.close()

  def __enter__(self) -> 'ClientStateStore':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()
