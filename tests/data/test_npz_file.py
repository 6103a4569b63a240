"""Datasets from .npz files."""

import numpy as np
import pytest

from tff_bn import data as tff_bn_data

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
  check_refused('npz:', 'there is no file')


@pytest.mark.parametrize('content', [b'', b'PK\x03\x04', b'some text'])
def test_no_archive(tmp_path, content):
  path = tmp_path / 'mine.npz'
  path.write_bytes(content)
  check_refused(path, 'is no readable .npz file')


def test_truncated_archive(tmp_path):
  path = tmp_path / 'mine.npz'
  np.savez(path, **ARRAYS)
  path.write_bytes(path.read_bytes()[:-100])
  check_refused(path, 'is no readable .npz file')


def test_damaged_array(tmp_path):
  path = tmp_path / 'mine.npz'
  np.savez(path, **ARRAYS)
  content = bytearray(path.read_bytes())
  content[300] ^= 255
  path.write_bytes(content)
  check_refused(path, 'x_train cannot be read')


def test_single_array(tmp_path):
  path = tmp_path / 'mine.npz'
  with path.open('wb') as file:
    np.save(file, ARRAYS['x_train'])
  check_refused(path, 'holds a single array')


def test_missing_arrays(tmp_path):
  path = tmp_path / 'mine.npz'
  np.savez(path, x_train=ARRAYS['x_train'], images=ARRAYS['x_test'])
  check_refused(path, 'lacks y_train, x_test, y_test; .*has x_train, images')


def test_objects_are_never_unpickled(tmp_path):
  path = tmp_path / 'mine.npz'
  np.savez(path, **{**ARRAYS, 'y_test': np.array([2, 'a'], object)})
  check_refused(path, 'y_test cannot be read')


def test_wrong_lengths(tmp_path):
  path = tmp_path / 'mine.npz'
  np.savez(path, **{**ARRAYS, 'y_train': ARRAYS['y_train'][:-1]})
  check_refused(path, 'x_train has 6 samples but y_train has 5 labels')


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
