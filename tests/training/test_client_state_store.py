"""Tests for the store of client states."""

import collections
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from tff_bn.training import client_state_codec
from tff_bn.training import client_state_store
from tff_bn.training.client_state_store import ClientStateStore
from tff_bn.training.client_state_store import ClientStateStoreError


@pytest.fixture(params=['in memory', 'in the file', 'in both'])
def path(tmp_path, request, monkeypatch):
  """The file of a store that keeps uncommitted states in these places."""
  limit = {'in memory': 2**26, 'in the file': 0, 'in both': 50}[request.param]
  monkeypatch.setattr(client_state_store, '_MAX_PENDING_BYTES', limit)
  return tmp_path / 'states.sqlite'


@pytest.fixture
def store(path):
  with ClientStateStore(path) as created:
    yield created


def _state(value):
  return collections.OrderedDict(
      gamma=np.full([3], value, np.float32), step=np.array(value, np.int64)
  )


def _commit(store, round_num, clients='a'):
  store.put_many(round_num, {c: _state(round_num) for c in clients})
  store.commit(round_num)


def _value(state):
  return None if state is None else int(state['step'])


def _assert_same_bits(actual, expected):
  assert type(actual) is type(expected)
  if isinstance(expected, dict):
    assert list(actual) == list(expected)
    for key, value in expected.items():
      _assert_same_bits(actual[key], value)
  elif isinstance(expected, (list, tuple)):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
      _assert_same_bits(a, e)
  else:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def test_state_comes_back_bit_for_bit(store):
  nan_with_payload = np.array([0x7FC12345, 0xFF800001], np.uint32)
  state = collections.OrderedDict(
      z=nan_with_payload.view(np.float32),
      a=collections.OrderedDict(
          zero_dim=np.array(-0.0),
          empty=np.zeros([0, 4], np.float64),
          flag=np.array([True, False]),
          count=np.array(2**62 + 1, np.int64),
          half=np.array([1.5], np.float16),
      ),
      items=[np.arange(6, dtype=np.int32).reshape(2, 3), (np.array(1.0),)],
      transposed=np.arange(6, dtype=np.float32).reshape(2, 3).T,
      nothing=collections.OrderedDict(),
  )

  store.put_many(1, {'a client': state})

  _assert_same_bits(store.get('a client'), state)


def test_numpy_scalar_becomes_an_array_without_dimensions(store):
  store.put_many(1, {'a': collections.OrderedDict(x=np.float32(2.5))})

  _assert_same_bits(
      store.get('a'), collections.OrderedDict(x=np.array(2.5, np.float32))
  )


def test_arrays_of_a_stored_state_are_read_only(store):
  state = _state(1)
  store.put_many(1, {'a': state})

  for gamma in (state['gamma'], store.get('a')['gamma']):
    with pytest.raises(ValueError, match='read-only'):
      gamma[:] = 7


def test_part_of_a_larger_array_is_copied(store):
  larger = np.zeros([2, 3], np.float32)
  store.put_many(1, {'a': collections.OrderedDict(gamma=larger[1])})
  larger[:] = 7

  np.testing.assert_array_equal(store.get('a')['gamma'], np.zeros(3))


def test_states_in_memory_are_not_copied(tmp_path):
  state = _state(1)
  with ClientStateStore(tmp_path / 'states.sqlite') as store:
    store.put_many(1, {'a': state})

    assert store.get('a')['gamma'] is state['gamma']


@pytest.mark.parametrize('bad', ['text', object(), None, ['text']])
def test_state_that_is_not_numeric_is_an_error_and_stores_nothing(store, bad):
  with pytest.raises(TypeError):
    store.put_many(1, {'a': _state(1), 'b': {'x': bad}})

  assert store.client_ids() == ()


def test_get_returns_the_newest_version_up_to_a_round(store):
  for round_num in (2, 5, 9):
    _commit(store, round_num)

  assert _value(store.get('a')) == 9
  assert [_value(store.get('a', r)) for r in (1, 2, 4, 5, 8, 9, 99)] == [
      *(None, 2, 2, 5, 5, 9, 9)
  ]
  assert store.get('b') is None


def test_newest_states_of_all_clients(store):
  for round_num, clients in ((2, 'bA'), (5, 'ca'), (9, 'b')):
    _commit(store, round_num, clients)

  found = [(client_id, _value(state)) for client_id, state in store.newest()]

  assert found == [('A', 2), ('a', 5), ('b', 9), ('c', 5)]
  for client_id, state in store.newest():
    _assert_same_bits(state, store.get(client_id))


def test_newest_states_are_checked(path):
  with ClientStateStore(path) as store:
    _commit(store, 1, 'ab')
  with contextlib.closing(sqlite3.connect(path)) as connection:
    connection.execute(
        "UPDATE states SET state = zeroblob(60) WHERE client_id = 'b'"
    )
    connection.commit()

  with (
      ClientStateStore(path) as store,
      pytest.raises(ClientStateStoreError, match="client 'b' in .* is damaged"),
  ):
    list(store.newest())


def test_between_commits_only_the_newest_version_is_kept(store):
  _commit(store, 1)
  for round_num in (2, 3, 4):
    store.put_many(round_num, {'a': _state(round_num)})
  store.commit(4)

  assert [_value(store.get('a', r)) for r in (1, 2, 3, 4)] == [1, 1, 1, 4]


def test_an_older_version_of_a_round_that_is_not_committed_is_gone(store):
  _commit(store, 1)
  store.put_many(2, {'a': _state(2)})
  assert store.newest_round == 2
  store.put_many(3, {'a': _state(3)})

  assert [_value(store.get('a', r)) for r in (1, 2, 3)] == [1, 1, 3]


def test_states_are_in_memory_up_to_a_size(tmp_path, monkeypatch):
  monkeypatch.setattr(client_state_store, '_MAX_PENDING_BYTES', 1000)
  state = {'x': np.zeros(100, np.float32)}  # 400 bytes and a header.
  with ClientStateStore(tmp_path / 'states.sqlite') as store:
    for round_num in range(1, 4):
      store.put_many(round_num, {'a': state, 'b': state})
      assert list(store._pending) == ['a', 'b']
    store.put_many(4, {'c': state})
    assert not store._pending
    store.put_many(5, {'a': state, 'b': state})
    assert list(store._pending) == ['a', 'b']
    store.put_many(6, {'d': {'x': np.zeros(1000, np.float32)}})
    assert not store._pending
    assert [client for client, _ in store.newest()] == ['a', 'b', 'c', 'd']


def test_putting_a_committed_round_again_is_an_error(store):
  _commit(store, 3)

  with pytest.raises(ValueError, match='round_num=3'):
    store.put_many(3, {'a': _state(4)})
  assert _value(store.get('a')) == 3


def test_forget_after_drops_later_versions_and_their_commits(store):
  for round_num in (1, 2, 3):
    _commit(store, round_num, ['a', f'only {round_num}'])

  store.forget_after(2)

  assert store.committed_round == 2
  assert store.client_ids() == ('a', 'only 1', 'only 2')
  assert _value(store.get('a')) == 2
  store.put_many(3, {'a': _state(30)})
  assert _value(store.get('a')) == 30


def test_forget_after_does_not_raise_the_committed_round(store):
  _commit(store, 1)

  store.forget_after(5)

  assert store.committed_round == 1


def test_forget_everything(store):
  _commit(store, 0)

  store.forget_after(-1)

  assert store.client_ids() == ()
  assert store.committed_round is None


def test_prune_keeps_what_the_kept_checkpoints_need(store):
  for round_num, clients in ((1, 'ab'), (2, 'a'), (4, 'ab'), (6, 'a')):
    _commit(store, round_num, clients)

  store.prune(3)

  # Client a: 2 is its newest up to round 3; client b: 1 is.
  assert [_value(store.get('a', r)) for r in (1, 2, 4, 6)] == [None, 2, 4, 6]
  assert [_value(store.get('b', r)) for r in (1, 2, 4)] == [1, 1, 4]
  assert store.committed_round == 6


def test_prune_leaves_a_client_whose_versions_are_all_newer(store):
  _commit(store, 5)

  store.prune(3)

  assert _value(store.get('a')) == 5


def test_committed_states_survive_closing(path):
  with ClientStateStore(path) as store:
    assert store.committed_round is None
    _commit(store, 1)
    store.put_many(2, {'a': _state(2), 'b': _state(2)})

  with ClientStateStore(path) as store:
    assert store.committed_round == 1
    assert store.client_ids() == ('a',)
    assert _value(store.get('a')) == 1


def test_prune_does_not_commit_what_was_put(path):
  with ClientStateStore(path) as store:
    _commit(store, 1)
    store.put_many(2, {'a': _state(2)})
    store.prune(1)

  with ClientStateStore(path) as store:
    assert _value(store.get('a')) == 1


def test_killed_writer_leaves_the_last_commit(path):
  script = f"""
import numpy as np
from tff_bn.training import client_state_store
from tff_bn.training.client_state_store import ClientStateStore
client_state_store._MAX_PENDING_BYTES = 0
store = ClientStateStore({str(path)!r})
# Larger than SQLite's cache, so that uncommitted pages reach the file.
big = np.zeros([400_000])
store.put_many(1, {{c: {{'step': np.array(1), 'big': big}} for c in 'abcdef'}})
store.commit(1)
store.put_many(2, {{c: {{'step': np.array(2), 'big': big}} for c in 'abcdef'}})
print('written', flush=True)
import time
time.sleep(60)
"""
  process = subprocess.Popen(
      [sys.executable, '-c', script], stdout=subprocess.PIPE, text=True
  )
  try:
    assert process.stdout.readline() == 'written\n'
  finally:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()

  with ClientStateStore(path) as store:
    assert store.committed_round == 1
    assert [_value(store.get(c)) for c in 'abcdef'] == [1] * 6


def test_file_that_is_not_sqlite_is_a_clear_error(path):
  path.write_bytes(b'not a database' * 1000)

  with pytest.raises(ClientStateStoreError, match='states.sqlite'):
    ClientStateStore(path)


def test_database_of_another_program_is_not_changed(path):
  connection = sqlite3.connect(path)
  connection.execute('CREATE TABLE mine (x)')
  connection.commit()
  connection.close()
  before = path.read_bytes()

  with pytest.raises(ClientStateStoreError, match='does not hold'):
    ClientStateStore(path)
  assert path.read_bytes() == before


def test_truncated_database_is_a_clear_error(path):
  with ClientStateStore(path) as store:
    store.put_many(1, {'a': {'x': np.zeros([50_000])}})
    store.commit(1)
  os.truncate(path, path.stat().st_size // 2)

  # Either statement may find the damage.
  with (
      pytest.raises(ClientStateStoreError, match='states.sqlite'),
      ClientStateStore(path) as store,
  ):
    store.get('a')


def test_flipped_bits_are_an_error(path):
  with ClientStateStore(path) as store:
    store.put_many(1, {'a client': {'x': np.full([50_000], 3.0)}})
    store.commit(1)
  data = bytearray(path.read_bytes())
  # In the middle of the numbers.
  position = data.index(np.full(200, 3.0).tobytes())
  data[position] ^= 0x10
  path.write_bytes(data)

  with (
      ClientStateStore(path) as store,
      pytest.raises(ClientStateStoreError, match="'a client'"),
  ):
    store.get('a client')


def test_file_in_use_is_an_error(path, monkeypatch):
  monkeypatch.setattr(client_state_store, '_BUSY_SECONDS', 0.0)
  with (
      ClientStateStore(path),
      pytest.raises(ClientStateStoreError, match='another process'),
  ):
    ClientStateStore(path)


@pytest.mark.parametrize('keep', [0, 3, 8, 20, -1])
def test_cut_bytes_are_not_decoded(keep):
  data = client_state_codec.encode_state({'x': np.arange(5)})

  with pytest.raises(client_state_codec.CorruptStateError):
    client_state_codec.decode_state(data[:keep])
