"""Datasets from IDX files."""

import struct

import idx_folder
import numpy as np
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.common import memory

_ARRAYS = idx_folder.random_arrays([0, 2, 1, 2, 0], [1, 2], (4, 3))


def _check(name):
  dataset = tff_bn_data.load_dataset(name)
  for array in ('y_train', 'y_test'):
    np.testing.assert_array_equal(getattr(dataset, array), _ARRAYS[array])
  for array in ('x_train', 'x_test'):
    found = getattr(dataset, array)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, _ARRAYS[array][..., np.newaxis])
  assert (dataset.name, dataset.num_classes) == (name, 3)


@pytest.mark.parametrize('compressed', [False, True])
def test_names_of_mnist(tmp_path, compressed):
  idx_folder.save(_ARRAYS, tmp_path, compressed=compressed)
  _check(f'idx:{tmp_path}')


def test_names_with_a_dot(tmp_path):
  idx_folder.save(_ARRAYS, tmp_path, separator='.')
  _check(f'idx:{tmp_path}')


def test_several_datasets_in_a_folder(tmp_path):
  for part in ('digits', 'letters'):
    idx_folder.save(
        _ARRAYS, tmp_path, f'emnist-{part}-', compressed=True, test='test'
    )
  _check(f'idx:{tmp_path}/emnist-digits')
  with pytest.raises(
      ValueError,
      match='several files for train-images: .*idx:FOLDER/emnist-digits',
  ):
    tff_bn_data.load_dataset(f'idx:{tmp_path}')


def _refused(name, message):
  with pytest.raises(ValueError, match=message) as error:
    tff_bn_data.load_dataset(name)
  assert str(error.value).startswith(f'dataset={name}')


def test_no_folder(tmp_path):
  _refused(f'idx:{tmp_path}/a/b', 'there is no folder')


def test_a_missing_file(tmp_path):
  idx_folder.save(_ARRAYS, tmp_path)
  (tmp_path / idx_folder.file_name('y_test')).unlink()
  _refused(
      f'idx:{tmp_path}',
      'has no file t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz; it has'
      ' t10k-images-idx3-ubyte, train-images',
  )


def test_a_missing_dataset(tmp_path):
  idx_folder.save(_ARRAYS, tmp_path, 'emnist-digits-')
  _refused(
      f'idx:{tmp_path}/emnist-letters',
      'has no file emnist-letters-train-images-idx3-ubyte or',
  )


def test_an_empty_folder(tmp_path):
  _refused(f'idx:{tmp_path}', 'train-images.*; it has no files')


def test_a_folder_in_place_of_a_file(tmp_path):
  idx_folder.save(_ARRAYS, tmp_path)
  path = tmp_path / idx_folder.file_name('x_train')
  path.unlink()
  path.mkdir()
  _refused(f'idx:{tmp_path}', f"'{path}' is no regular file")


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'', 'is no IDX file of unsigned bytes with 3 axes'),
        (idx_folder.content(_ARRAYS['y_train']), 'is no IDX file'),
        (idx_folder.content(_ARRAYS['x_train'])[:9], 'ends in its header'),
        (
            idx_folder.content(_ARRAYS['x_train'])[:-1],
            'has 59 values, but .* 60',
        ),
        (
            idx_folder.content(_ARRAYS['x_train']) + b'1',
            'has more values, but .* 60',
        ),
        (
            struct.pack('>4I', 0x803, *3 * [2**32 - 1]),
            'the values take .* GB of memory',
        ),
    ],
)
def test_damaged_file(tmp_path, content, message):
  idx_folder.save(_ARRAYS, tmp_path)
  (tmp_path / idx_folder.file_name('x_train')).write_bytes(content)
  _refused(f'idx:{tmp_path}', message)


def test_damaged_compressed_file(tmp_path):
  idx_folder.save(_ARRAYS, tmp_path, compressed=True)
  path = tmp_path / f'{idx_folder.file_name("x_test")}.gz'
  path.write_bytes(path.read_bytes()[:-9])
  _refused(f'idx:{tmp_path}', 'cannot be read')
  path.write_bytes(b'no gzip')
  _refused(f'idx:{tmp_path}', 'cannot be read')


def test_more_labels_than_images(tmp_path):
  idx_folder.save(_ARRAYS, tmp_path)
  (tmp_path / idx_folder.file_name('y_train')).write_bytes(
      idx_folder.content(np.zeros(6, np.uint8))
  )
  _refused(f'idx:{tmp_path}', 'y_train')


def test_memory_is_checked_before_reading(tmp_path, monkeypatch):
  idx_folder.save(_ARRAYS, tmp_path)
  monkeypatch.setattr(memory, 'total_bytes', lambda: 59)
  _refused(f'idx:{tmp_path}', 'the values take')
