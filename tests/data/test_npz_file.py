"""Datasets from .npz files."""

import io
import os
import socket
import zipfile

from absl import logging
import numpy as np
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.common import memory

RNG = np.random.default_rng(0)
ARRAYS = {
    'x_train': RNG.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8),
    'y_train': np.array([0, 1, 2, 0, 1, 2]),
    'x_test': RNG.integers(0, 256, (2, 4, 5, 3), dtype=np.uint8),
    'y_test': np.array([2, 0]),
}


def assert_loaded(dataset):
  for name, array in ARRAYS.items():
    np.testing.assert_array_equal(getattr(dataset, name), array)
  assert dataset.num_classes == 3


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_path_that_ends_in_npz(tmp_path, save):
  path = tmp_path / 'mine.npz'
  save(path, **ARRAYS)
  assert_loaded(tff_bn_data.load_dataset(str(path)))


def test_npz_prefix(tmp_path):
  path = tmp_path / 'data.bin'
  with path.open('wb') as file:
    np.savez(file, **ARRAYS)
  dataset = tff_bn_data.load_dataset(f'npz:{path}')
  assert_loaded(dataset)
  assert dataset.name == f'npz:{path}'


def test_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  np.savez(tmp_path / 'mine.npz', **ARRAYS)
  assert_loaded(tff_bn_data.load_dataset('~/mine.npz'))


def check_refused(name, message):
  with pytest.raises(ValueError, match=message) as error:
    tff_bn_data.load_dataset(str(name))
  assert str(error.value).startswith(f'dataset={name}')
  assert '\n' not in str(error.value)


def test_no_such_file(tmp_path):
  check_refused(tmp_path / 'none.npz', 'there is no file')


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        *(
            (lambda _, given=given: given, 'is no readable .npz file')
            for given in (b'', b'PK\x03\x04', b'some text')
        ),
        (lambda content: content[:-100], 'is no readable .npz file'),
        (
            lambda content: content[:300]
            + bytes([content[300] ^ 255])
            + content[301:],
            'x_train cannot be read',
        ),
    ],
    ids=['empty', 'signature', 'text', 'truncated', 'damaged'],
)
def test_no_archive(tmp_path, change, message):
  path = tmp_path / 'mine.npz'
  np.savez(path, **ARRAYS)
  path.write_bytes(change(path.read_bytes()))
  check_refused(path, message)


def test_error_quotes_little_of_a_damaged_file(tmp_path):
  path = tmp_path / 'mine.npz'
  np.savez(path, **ARRAYS)
  content = bytearray(path.read_bytes())
  # The length of the name of the first array.
  content[26:28] = b'\xff\x03'
  path.write_bytes(content)
  check_refused(path, 'x_train cannot be read .File name .{160,190} ….; store')


def test_single_array(tmp_path):
  path = tmp_path / 'mine.npz'
  with path.open('wb') as file:
    np.save(file, ARRAYS['x_train'])
  check_refused(path, 'holds a single array')


def test_missing_arrays(tmp_path):
  path = tmp_path / 'mine.npz'
  np.savez(path, x_train=ARRAYS['x_train'], images=ARRAYS['x_test'])
  check_refused(path, 'lacks y_train, x_test, y_test; .*has x_train, images')


def write_members(path, **members):
  """Writes the members of an archive, which are arrays or bytes."""
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, content in {**ARRAYS, **members}.items():
      archive.writestr(f'{name}.npy', as_member(content))


def as_member(content):
  if isinstance(content, bytes):
    return content
  file = io.BytesIO()
  np.save(file, content, allow_pickle=True)
  return file.getvalue()


def header(shape, dtype='|u1'):
  """The header of an array without its values."""
  file = io.BytesIO()
  np.lib.format.write_array_header_1_0(
      file, {'shape': shape, 'fortran_order': False, 'descr': dtype}
  )
  return file.getvalue()


class Unpickled(Exception):
  pass


class Evil:

  def __reduce__(self):
    return Unpickled, ()


@pytest.mark.parametrize(
    ('member', 'message'),
    [
        (b'', 'x_train cannot be read'),
        (b'no array', 'x_train cannot be read .the magic string'),
        (b'\n' * 100, 'x_train cannot be read .the magic string'),
        (as_member(ARRAYS['x_train'])[:20], 'x_train cannot be read'),
        (
            as_member(ARRAYS['x_train'])[:-1],
            'it has 487 bytes, .* describes 488',
        ),
        (as_member(ARRAYS['x_train']) + b'a', 'it has 489 bytes, .* 488'),
        (header((2**40, 8, 8, 3)), 'its header describes 211,106,232,533,120'),
        (
            header((2**70,)),
            'its header describes 1,180,591,620,717,411,303,552',
        ),
        (header((-1, 4, 5, 3)), r'its shape is \(-1, 4, 5, 3\)'),
        (header((), '|O'), 'it holds Python objects'),
        (np.array([Evil()] * 6), 'it holds Python objects'),
        (
            b'\x93NUMPY\x09\x00' + b'a' * 99,
            r'the version \(9, 0\)|invalid version',
        ),
        (
            b'\x93NUMPY\x01\x00\x10\x00(1).__class__   ',
            'x_train cannot be read',
        ),
        (np.array(3), r'x_train has the shape \(\)'),
        (np.zeros((6, 4, 5, 3), 'U3'), 'x_train has the dtype <U3'),
        (np.zeros((6, 4), [('a', 'i4')]), r"x_train has the dtype .*'a'"),
    ],
)
def test_member_that_is_no_array(tmp_path, member, message):
  path = tmp_path / 'mine.npz'
  write_members(path, x_train=member)
  check_refused(path, message)


@pytest.mark.parametrize(
    'change',
    [
        np.asfortranarray,
        lambda array: array.astype(array.dtype.newbyteorder('>')),
        lambda array: array.astype('>i8'),
    ],
)
def test_layouts_of_arrays(tmp_path, change):
  path = tmp_path / 'mine.npz'
  np.savez(path, **{name: change(array) for name, array in ARRAYS.items()})
  assert_loaded(tff_bn_data.load_dataset(str(path)))


def test_names_without_suffix(tmp_path):
  path = tmp_path / 'mine.npz'
  with zipfile.ZipFile(path, 'w') as archive:
    for name, array in ARRAYS.items():
      archive.writestr(name, as_member(array))
  assert_loaded(tff_bn_data.load_dataset(str(path)))


@pytest.mark.parametrize('second', ['x_train.npy', 'x_train'])
@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_duplicate_members(tmp_path, second):
  path = tmp_path / 'mine.npz'
  write_members(path)
  with zipfile.ZipFile(path, 'a') as archive:
    archive.writestr(second, as_member(ARRAYS['x_train']))
  check_refused(path, 'has 2 arrays x_train; it is unclear')


def change_entries(path, offset, change):
  """Changes a byte in both headers of each member of an archive."""
  content = bytearray(path.read_bytes())
  for signature, start in ((b'PK\x03\x04', 0), (b'PK\x01\x02', 2)):
    found = content.find(signature)
    while found >= 0:
      content[found + start + offset] = change
      found = content.find(signature, found + 1)
  path.write_bytes(content)


@pytest.mark.parametrize(
    ('offset', 'value', 'message'),
    [
        (6, 1, 'x_train in .* is encrypted'),
        (8, 9, 'x_train cannot be read .*compression'),
    ],
)
def test_foreign_kinds_of_archives(tmp_path, offset, value, message):
  path = tmp_path / 'mine.npz'
  write_members(path)
  change_entries(path, offset, value)
  check_refused(path, message)


def test_damaged_compressed_member(tmp_path):
  path = tmp_path / 'mine.npz'
  write_members(path, x_train=RNG.random((6, 100)), x_test=RNG.random((2, 100)))
  content = bytearray(path.read_bytes())
  for place in range(500, 2500, 100):
    content[place] ^= 255
  path.write_bytes(content)
  check_refused(path, 'x_train cannot be read')


def test_names_that_are_not_utf8(tmp_path):
  path = tmp_path / 'mine.npz'
  np.savez(path, **ARRAYS)
  other = tmp_path / os.fsdecode(b'\xff.npz')
  path.rename(other)
  with pytest.raises(ValueError, match=r"dataset='.*\\udcff.npz' is not UTF-8"):
    tff_bn_data.load_dataset(str(other))
  # Members: the flag says UTF-8.
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('x_träin.npy', b'')
  path.write_bytes(path.read_bytes().replace('ä'.encode(), b'\xff\xfe'))
  check_refused(path, 'is no readable .npz file')


def test_names_of_members_do_not_break_the_line(tmp_path):
  path = tmp_path / 'mine.npz'
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('a\nb.npy', b'')
  check_refused(path, r'but has a\\nb')


@pytest.mark.parametrize('kind', ['pipe', 'socket', 'folder'])
def test_only_regular_files_are_opened(tmp_path, kind, monkeypatch):
  monkeypatch.chdir(tmp_path)  # The path of a socket is short.
  if kind == 'pipe':
    os.mkfifo('mine.npz')
  elif kind == 'folder':
    os.mkdir('mine.npz')
  else:
    with socket.socket(socket.AF_UNIX) as server:
      server.bind('mine.npz')
  check_refused('mine.npz', 'mine.npz. is no regular file')


def test_link_to_a_file(tmp_path):
  np.savez(tmp_path / 'mine.npz', **ARRAYS)
  (tmp_path / 'link.npz').symlink_to('mine.npz')
  assert_loaded(tff_bn_data.load_dataset(str(tmp_path / 'link.npz')))
  (tmp_path / 'broken.npz').symlink_to('none.npz')
  check_refused(tmp_path / 'broken.npz', 'there is no file')


@pytest.fixture
def reads(monkeypatch):
  """The arrays whose values were read."""
  found = []
  read_array = np.lib.format.read_array

  def spy(file, **options):
    found.append(file.name.removesuffix('.npy'))
    return read_array(file, **options)

  monkeypatch.setattr(np.lib.format, 'read_array', spy)
  return found


@pytest.mark.parametrize(
    ('changes', 'message', 'expected'),
    [
        ({}, None, ['y_train', 'y_test', 'x_train', 'x_test']),
        # What the headers tell.
        ({'x_train': np.zeros((6, 4, 5, 1), 'u1')}, 'must be the same', []),
        ({'x_test': np.zeros((2, 4, 5, 3))}, 'scaled differently', []),
        ({'x_test': np.zeros((2, 4, 5, 3), 'S1')}, 'dtype .S1', []),
        ({'y_test': np.zeros(3, int)}, 'y_test has 3 labels', []),
        ({'y_test': np.eye(4)[:2]}, 'with task=classification', []),
        # What the labels tell.
        (
            {'y_train': np.zeros(6, int), 'y_test': np.zeros(2, int)},
            'label 0 only',
            ['y_train', 'y_test'],
        ),
        (
            {'y_train': np.eye(6), 'y_test': np.eye(6)[:2]},
            'a single 1 in each row',
            ['y_train', 'y_test'],
        ),
    ],
)
def test_values_are_read_last(tmp_path, reads, changes, message, expected):
  path = tmp_path / 'mine.npz'
  write_members(path, **changes)
  if message is None:
    tff_bn_data.load_dataset(str(path))
  else:
    check_refused(path, message)
  assert reads == expected


def test_archive_of_zeros_that_is_larger_than_memory(
    tmp_path, monkeypatch, reads
):
  path = tmp_path / 'mine.npz'
  zeros = np.zeros((2 * 10**4, 100), np.uint8)
  write_members(
      path, x_train=zeros, y_train=np.arange(2 * 10**4) % 3, x_test=zeros[:2]
  )
  assert path.stat().st_size < 10**5
  monkeypatch.setattr(memory, 'total_bytes', lambda: 10**6)
  check_refused(path, 'the arrays of .* take 0 GB of memory, but this machine')
  assert not reads
  monkeypatch.setattr(memory, 'total_bytes', lambda: 10**7)
  assert tff_bn_data.load_dataset(str(path)).x_train.sum() == 0


SERIES = {
    'x_train': RNG.integers(-300, 300, (6, 9, 2), np.int16),
    'x_test': RNG.integers(-300, 300, (2, 9, 2), np.int16),
}


def test_series(tmp_path):
  path = tmp_path / 'mine.npz'
  write_members(path, **SERIES)
  dataset = tff_bn_data.load_dataset(f'series:{path}')
  assert dataset.name == f'series:{path}'
  assert dataset.input_shape == (9, 2)
  for name, array in SERIES.items():
    np.testing.assert_array_equal(getattr(dataset, name), array)
  with pytest.raises(
      ValueError, match='image_size=4x4 is .*series of 9 steps with 2 features'
  ):
    tff_bn_data.load_dataset(f'series:{path}', image_size=(4, 4))


def test_three_axes_are_grey_images_without_series(tmp_path, monkeypatch):
  warnings = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *args: warnings.append(text % args)
  )
  path = tmp_path / 'mine.npz'
  grey = {name: np.abs(array) % 256 for name, array in SERIES.items()}
  write_members(path, **grey)
  dataset = tff_bn_data.load_dataset(str(path))
  assert dataset.input_shape == (9, 2, 1)
  np.testing.assert_array_equal(dataset.x_train[..., 0], grey['x_train'])
  mixed = {**grey, 'x_train': grey['x_train'].astype(np.uint8)}
  write_members(path, **mixed)
  mixed_dataset = tff_bn_data.load_dataset(str(path))
  assert mixed_dataset.fingerprint() == dataset.fingerprint()
  assert warnings.pop() == warnings[0]
  assert warnings == [
      f'dataset={path}: the samples have the shape 9x2, which is read as'
      ' [height, width] of grey images. If they are series [steps, features],'
      ' load them as series:PATH.'
  ]
  write_members(path, **SERIES)
  check_refused(path, 'values from .*pixels from 0 to 255')
  assert warnings[0] == warnings[1]
  square = {name: array[:, :2] for name, array in grey.items()}
  write_members(path, **square)
  assert tff_bn_data.load_dataset(str(path)).input_shape == (2, 2, 1)
  write_members(path, **SERIES)
  tff_bn_data.load_dataset(f'series:{path}')
  assert len(warnings) == 2


def test_series_of_another_shape(tmp_path):
  path = tmp_path / 'mine.npz'
  write_members(path)
  check_refused(
      f'series:{path}', r'must be \[samples, steps, features\].*Use npz:'
  )


def test_files_that_lack_classes(tmp_path):
  """They are fine as domains, and for a model that is trained already."""
  x = np.arange(4, dtype=np.float32)[:, np.newaxis]
  labels = {'a': ([0, 1, 2, 0], [2, 1, 0, 0]), 'b': ([1] * 4, [1, 1, 1, 2])}
  for name, (train, test) in labels.items():
    path = tmp_path / f'{name}.npz'
    np.savez(path, x_train=x, y_train=train, x_test=x, y_test=test)
  alone = f'{tmp_path}/b.npz'
  check_refused(alone, 'y_train has the label 1 only')
  dataset = tff_bn_data.load_dataset(f'domains:{tmp_path}/a.npz,{alone}')
  assert dataset.num_classes == 3
  np.testing.assert_array_equal(dataset.y_train, [0, 1, 2, 0, 1, 1, 1, 1])
  np.testing.assert_array_equal(dataset.y_test, [2, 1, 0, 0, 1, 1, 1, 2])
  dataset = tff_bn_data.load_dataset(alone, class_names=['0', '1', '2'])
  np.testing.assert_array_equal(dataset.y_test, [1, 1, 1, 2])
  dataset = tff_bn_data.load_dataset(alone, class_names=['2', '1'])
  np.testing.assert_array_equal(dataset.y_test, [1, 1, 1, 0])


_CLIENTS = {
    'client_train': np.array(['b', 'b', 'b', 'a/../x', 'a/../x', 'c']),
    'client_test': np.array(['c', 'a/../x']),
}


def _natural(path, **more):
  np.savez(path, **ARRAYS, **more)
  dataset = tff_bn_data.load_dataset(str(path))
  data = tff_bn_data.split_dataset(dataset, 'natural', None, seed=0)
  return {
      name: (
          data.train_indices[name].tolist(),
          data.test_indices[name].tolist(),
      )
      for name in data.client_ids
  }


@pytest.mark.parametrize('dtype', ['U', 'S'])
def test_clients(tmp_path, dtype):
  given = {name: ids.astype(dtype) for name, ids in _CLIENTS.items()}
  assert list(_natural(tmp_path / 'a.npz', **given).items()) == [
      ('a/../x', ([3, 4], [1])),
      ('b', ([0, 1, 2], [])),
      ('c', ([5], [0])),
  ]


def test_numbers_of_clients(tmp_path):
  assert list(
      _natural(
          tmp_path / 'a.npz', client_train=np.uint8([10, 9, 9, 9, 10, 2])
      ).items()
  ) == [('2', ([5], [])), ('9', ([1, 2, 3], [])), ('10', ([0, 4], []))]


def test_a_client_with_test_data_only(tmp_path, monkeypatch):
  messages = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *values: messages.append(text % values)
  )
  ids = dict(_CLIENTS, client_test=np.array(['new', 'c']))
  found = _natural(tmp_path / 'a.npz', **ids)
  assert list(found) == ['a/../x', 'b', 'c']
  assert any('the clients new have test samples only' in m for m in messages)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (
            {'client_train': np.array(['a'] * 5)},
            r'client_train has the shape \(5,\); .* each of the 6 samples',
        ),
        (
            {'client_test': np.array([0.5, 1])},
            'client_test has the dtype float64; ids of clients are texts or',
        ),
        (
            {'client_test': np.array([0, 1])},
            'only one of client_train and client_test has numbers',
        ),
        (
            {'client_test': np.array(['a', ''])},
            'client_test is empty for the sample 1',
        ),
        (
            {'client_test': np.array([b'a', b'\xff'])},
            'client_test is not UTF-8',
        ),
        (
            {'client_train': np.array([None] * 6)},
            r'client_train holds Python objects; .* np.array\(ids, str\)',
        ),
        (
            {'client_test': np.array(['a', 'b\nc'])},
            r"client_test has the client 'b\\nc'; .* line breaks",
        ),
    ],
)
def test_wrong_clients(tmp_path, change, message):
  path = tmp_path / 'a.npz'
  np.savez(path, **ARRAYS, **{**_CLIENTS, **change})
  check_refused(path, message)


def test_clients_of_the_test_data_only(tmp_path):
  path = tmp_path / 'a.npz'
  np.savez(path, **ARRAYS, client_test=_CLIENTS['client_test'])
  check_refused(path, 'has client_test, but not client_train')
