"""Client states in an SQLite file."""

from collections.abc import Mapping
import os
import sqlite3
from typing import Any, Optional, Union

from typing_extensions import override

from tff_bn.training import client_state_codec
from tff_bn.training import client_state_store

# Written to the database's header, so that other SQLite files are recognised.
_APPLICATION_ID = 0x7446424E
_FORMAT = 2
_BUSY_SECONDS = 1.0


class SqliteClientStateStore(client_state_store.ClientStateStore):
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
      raise client_state_store.ClientStateStoreError(
          f'{self._path} is an SQLite file, but does not hold client states;'
          ' remove it or use another folder.'
      )
    ((version,),) = self._execute('PRAGMA user_version').fetchall()
    if version != _FORMAT:
      raise client_state_store.ClientStateStoreError(
          f'{self._path} was written by another version of tff_bn, whose format'
          ' this one does not know; start the run over in another folder.'
      )
    ((found,),) = self._execute('SELECT checksum FROM run').fetchall()
    if run in (None, found):
      self._run = found
      return
    if self.committed_round:
      raise client_state_store.ClientStateStoreError(
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

  def _error(
      self, error: sqlite3.Error
  ) -> client_state_store.ClientStateStoreError:
    text = str(error)
    subject = f"{self._path}, which holds the clients' states,"
    if 'locked' in text:
      return client_state_store.ClientStateStoreError(
          f'{self._path} is in use by another process; wait for its end or use'
          ' another folder.'
      )
    if 'disk is full' in text:
      return client_state_store.ClientStateStoreError(
          f'{subject} cannot be written: no space is left on the disk. Once'
          ' there is, the same command goes on from the last checkpoint.'
      )
    damages = ('malformed', 'not a database', 'Could not decode')
    if any(damage in text for damage in damages):
      return client_state_store.ClientStateStoreError(
          f'{subject} is damaged ({text}). Put back an intact copy of the run,'
          ' or start it over in another folder.'
      )
    return client_state_store.ClientStateStoreError(
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
  ) -> Optional[client_state_codec.ClientState]:
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
      return client_state_codec.decode_state(
          data, client_state_codec.owner(self._run, client_id, round_num)
      )
    except client_state_codec.CorruptStateError as e:
      raise client_state_store.ClientStateStoreError(
          self._damaged(client_id)
      ) from e

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
    state = (
        'state'
        if verify
        else f'substr(state, 1, {client_state_codec.CHECKSUM_BYTES})'
    )
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
            client_state_codec.check_checksum(
                data,
                client_state_codec.owner(self._run, client_id, state_round),
            )
          except client_state_codec.CorruptStateError as error:
            raise client_state_codec.CorruptStateError(
                self._damaged(client_id)
            ) from error
        yield client_id, state_round, data[: client_state_codec.CHECKSUM_BYTES]

    try:
      return client_state_codec.checksum_of(checked())
    except sqlite3.Error as error:
      raise self._error(error) from error

  @override
  def put_many(
      self, round_num: int, states: Mapping[str, client_state_codec.ClientState]
  ) -> None:
    committed = self.committed_round
    client_state_store.check_not_committed(round_num, committed)
    encoded = [
        (
            key,
            client_state_codec.encode_state(
                value, client_state_codec.owner(self._run, key, round_num)
            ),
        )
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
    self._set_committed_round(
        client_state_store.least(self.committed_round, round_num)
    )
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
