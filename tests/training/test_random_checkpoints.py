"""Random states: they come back to the bit, and damage is found."""

import asyncio
import collections
import os
import pathlib
import re
import shutil
import tempfile

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_strategies
import numpy as np
import pytest

from tff_bn.training import checkpoints
from tff_bn.training import client_state_codec
from tff_bn.training import client_state_store
from tff_bn.training import manifests
from tff_bn.training import metrics_log
from tff_bn.training import run_identity

_ARRAYS = st.sampled_from(list('?bBhHiIqQefdFD')).flatmap(
    lambda code: np_strategies.arrays(
        np.dtype(code),
        np_strategies.array_shapes(min_dims=0, min_side=0, max_side=4),
    )
)
_STATES = st.recursive(
    _ARRAYS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(
            collections.OrderedDict
        ),
    ),
    max_leaves=6,
)


def _assert_same(found, expected):
  """The same structure, and the same bits in each array."""
  if isinstance(expected, dict):
    assert list(found) == list(expected)
    found, expected = list(found.values()), list(expected.values())
  if isinstance(expected, (list, tuple)):
    assert isinstance(found, type(expected))
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
      _assert_same(a, b)
    return
  found = np.asarray(found)
  assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
  assert found.tobytes() == expected.tobytes()


@st.composite
def _damage(draw):
  """A function that cuts a file, or changes some of its bytes."""
  share = draw(st.floats(0, 1, exclude_max=True))
  kind = draw(
      st.sampled_from(['cut', 'bit', 'digit', 'digit', 'bytes', 'removed'])
  )
  bit = 1 << draw(st.integers(0, 7))
  noise = draw(st.binary(min_size=1, max_size=16))

  def change(content):
    position = int(share * len(content))
    if kind == 'cut' or not content:
      return content[:position]
    if kind == 'digit':
      # JSON stays valid.
      return content[:position] + re.sub(
          rb'\d', lambda m: b'%d' % (9 - int(m[0])), content[position:], count=1
      )
    if kind == 'bit':
      end = content[position + 1 :]
      return content[:position] + bytes([content[position] ^ bit]) + end
    return content[:position] + noise + content[position + len(noise) :]

  return kind, change


def _apply(damage, path):
  kind, change = damage
  if kind == 'removed':
    path.unlink()
  else:
    path.write_bytes(change(path.read_bytes()))


def _manager(folder):
  log = metrics_log.MetricsLog(
      folder,
      metric_names=[],
      is_due=lambda round_num: True,
      num_rounds=9,
      costs_fn=lambda *_: {},
  )
  return checkpoints.CheckpointManager(
      folder / 'checkpoints',
      every=1,
      last_round=9,
      identity=run_identity.RunIdentity(
          {}, 'data', {'types': 'types', 'initial': 'initial'}
      ),
      log=log,
  )


@pytest.fixture(scope='module')
def folder():
  """An empty folder, where a test works again and again."""
  with tempfile.TemporaryDirectory() as path:
    yield pathlib.Path(path)


def _begin(folder):
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()


@hypothesis.given(state=_STATES)
def test_checkpoint_comes_back_to_the_bit(folder, state):
  _begin(folder)
  asyncio.run(_manager(folder).save(state, 0))
  found, round_num = asyncio.run(_manager(folder).load_latest(state))
  assert round_num == 0
  _assert_same(found, state)


@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
@hypothesis.given(
    state=_STATES,
    damages=st.lists(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from(['state.npz', 'manifest.json']),
            _damage(),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_damaged_checkpoint_never_gives_another_state(folder, state, damages):
  _begin(folder)
  manager = _manager(folder)
  for round_num in range(4):
    asyncio.run(manager.save([np.int32(round_num), state], round_num))
  for round_num, file, damage in damages:
    path = folder / 'checkpoints' / f'round_{round_num}' / file
    if path.exists():
      _apply(damage, path)
  damaged = {round_num for round_num, _, _ in damages}
  before = _snapshot(folder)
  try:
    found, round_num = asyncio.run(
        _manager(folder).load_latest([np.int32(0), state])
    )
  except ValueError as error:
    message = str(error)
    assert os.fspath(folder) in message
    assert _snapshot(folder) == before
    return
  # Not every byte of a file has a meaning. Otherwise the last intact one is
  # used, but not that of round 0.
  assert round_num >= max({1, 2, 3} - damaged, default=1)
  assert int(found[0]) == round_num
  _assert_same(found[1], state)


_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=5,
)


@hypothesis.given(rows=_JSON, damage=_damage())
def test_damaged_manifest_never_gives_another_content(folder, rows, damage):
  _begin(folder)
  content = dict(format=1, rows=rows)
  manifests.write(folder, content)
  assert manifests.read(folder, 1) == content
  _apply(damage, folder / manifests.FILE_NAME)
  try:
    found = manifests.read(folder, 1)
  except ValueError as error:
    message = str(error)
    assert os.fspath(folder) in message
    return
  assert found == content


def _snapshot(folder):
  return {
      os.fspath(path): path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file()
  }


@hypothesis.given(state=_STATES, owner=st.text(max_size=5))
def test_clients_state_comes_back_to_the_bit(state, owner):
  data = client_state_codec.encode_state(state, owner)
  _assert_same(client_state_codec.decode_state(data, owner), state)


@hypothesis.given(state=_STATES, damage=_damage())
def test_damaged_state_of_a_client_is_found(state, damage):
  data = client_state_codec.encode_state(state, 'ann')
  _, change = damage
  damaged = change(data)
  if damaged == data:
    return
  with pytest.raises(client_state_codec.CorruptStateError):
    client_state_codec.decode_state(damaged, 'ann')


@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
@hypothesis.given(state=_STATES, damage=_damage())
def test_damaged_store_never_gives_another_state(folder, state, damage):
  _begin(folder)
  path = folder / 'states.sqlite'
  with client_state_store.ClientStateStore(path) as store:
    for round_num in (1, 2):
      store.put_many(round_num, {'ann': state, 'bob': [np.int32(round_num)]})
      store.commit(round_num)
    checksum = store.checksum(2)
  if damage[0] == 'removed':
    return
  _apply(damage, path)
  try:
    with client_state_store.ClientStateStore(path) as store:
      # A checkpoint has the checksum of the states that belong to it.
      if store.checksum(2, verify=True) != checksum:
        return
      found = store.get('ann', 2), store.get('bob', 2)
  except (
      client_state_store.ClientStateStoreError,
      client_state_codec.CorruptStateError,
  ):
    return
  _assert_same(found[0], state)
  _assert_same(found[1], [np.array(2, np.int32)])
