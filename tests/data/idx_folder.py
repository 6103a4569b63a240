"""Writes IDX files."""

import gzip
import struct

import numpy as np


def random_arrays(y_train, y_test, image_shape):
  """Returns the arrays of a dataset with these labels."""
  rng = np.random.default_rng(0)
  arrays = {}
  for split, labels in (('train', y_train), ('test', y_test)):
    shape = (len(labels), *image_shape)
    arrays[f'x_{split}'] = rng.integers(0, 256, shape, dtype=np.uint8)
    arrays[f'y_{split}'] = np.array(labels, np.uint8)
  return arrays


def content(array):
  return struct.pack(f'>I{array.ndim}I', 0x800 + array.ndim, *array.shape) + (
      array.tobytes()
  )


def file_name(array, test='t10k', separator='-'):
  part = 'train' if array.endswith('train') else test
  what, axes = ('images', 3) if array[0] == 'x' else ('labels', 1)
  return f'{part}-{what}{separator}idx{axes}-ubyte'


def save(arrays, folder, prefix='', *, compressed=False, **form):
  for name, array in arrays.items():
    path = folder / (prefix + file_name(name, **form))
    if compressed:
      with gzip.open(f'{path}.gz', 'wb') as file:
        file.write(content(array))
    else:
      path.write_bytes(content(array))
