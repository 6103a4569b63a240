"""Datasets in the IDX format of MNIST, Fashion-MNIST, KMNIST and EMNIST.

http://yann.lecun.com/exdb/mnist describes the format: two zero bytes, the
dtype, the number of axes, the length of each axis as a big-endian 32-bit
integer, and the values.
"""

import gzip
import io
import math
import os
import re
import zlib

import numpy as np

from tff_bn.catalog import datasets
from tff_bn.common import memory
from tff_bn.common import spelling
from tff_bn.data import dataset as dataset_lib

_UBYTE = 0x08
_NUM_AXES = {'images': 3, 'labels': 1}
# The beginnings of the files' names, as a regular expression.
_PARTS = {'train': 'train', 'test': '(?:t10k|test)'}


def load_idx(name: str, *, is_part: bool = False) -> dataset_lib.Dataset:
  """Loads a dataset from the four IDX files in a folder.

  Their names are `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and the
  same with `t10k` or `test` in the place of `train`. They may end in `.gz`, and
  begin with a prefix and a hyphen, such as `emnist-digits-`.

  Args:
    name: `idx:FOLDER`, or `idx:FOLDER/PREFIX` if the folder has several
      datasets.
    is_part: Whether `y_train` may lack classes, see `create_dataset`.

  Returns:
    The dataset: grey images, uint8 of shape `[n, height, width, 1]`.

  Raises:
    ValueError: If a file is missing, occurs twice or is damaged, or if the
      arrays do not form a dataset.
  """
  source = f'dataset={name}'
  path = os.path.expanduser(datasets.path(name))
  folder, prefix = path, ''
  if not os.path.isdir(folder):
    folder, prefix = os.path.split(path)
  try:
    present = sorted(os.listdir(folder or os.curdir))
  # The path may contain a null character.
  except (OSError, ValueError) as error:
    raise ValueError(f'{source}: there is no folder {path!r}.') from error
  files = [
      (what, _find(source, folder, present, prefix, split, what))
      for split in _PARTS
      for what in _NUM_AXES
  ]
  x_train, y_train, x_test, y_test = (
      _read(source, file, what) for what, file in files
  )
  return dataset_lib.create_dataset(
      name, x_train, y_train, x_test, y_test, is_part=is_part
  )


def has_files(folder: str) -> bool:
  """Whether a folder has IDX files of training images."""
  return os.path.isdir(folder) and any(
      re.fullmatch(_pattern('train', 'images'), file)
      for file in os.listdir(folder)
  )


def _find(
    source: str,
    folder: str,
    present: list[str],
    prefix: str,
    split: str,
    what: str,
) -> str:
  """Returns the path of one of the four files."""
  found = [
      file
      for file in present
      if file.startswith(prefix) and re.fullmatch(_pattern(split, what), file)
  ]
  if len(found) == 1:
    return os.path.join(folder, found[0])
  example = (
      f'{prefix and prefix + "-"}{split.replace("test", "t10k")}-{what}'
      f'-idx{_NUM_AXES[what]}-ubyte'
  )
  if not found:
    names = spelling.name_some([repr(file)[1:-1] for file in present])
    raise ValueError(
        f'{source}: {folder!r} has no file {example} or {example}.gz; it has'
        f' {names or "no files"}.'
    )
  raise ValueError(
      f'{source}: {folder!r} has several files for {split}-{what}:'
      f' {spelling.name_some(found)}. Name the dataset by the beginning of its'
      f' files, such as {datasets.IDX.prefix}FOLDER/emnist-digits, and keep'
      ' either the compressed files or the others.'
  )


def _pattern(split: str, what: str) -> str:
  """Returns a regular expression of the names of a file."""
  # Copies of the files are named with a dot, too.
  axes = _NUM_AXES[what]
  return f'(.*-)?{_PARTS[split]}-{what}[-.]idx{axes}-ubyte(.gz)?'


def _read(source: str, path: str, what: str) -> np.ndarray:
  """Reads the array of a file."""
  # Reading from a pipe may last forever.
  if not os.path.isfile(path):
    raise ValueError(f'{source}: {path!r} is no regular file.')
  try:
    with gzip.open(path) if path.endswith('.gz') else open(path, 'rb') as file:
      return _parse(f'{source}: {path!r}', file, _NUM_AXES[what])
  # A damaged file ends early, or its checksum is wrong.
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'{source}: {path!r} cannot be read ({error}).') from error


def _parse(place: str, file: io.BufferedIOBase, num_axes: int) -> np.ndarray:
  """Reads the header and the values; a ValueError begins with `place`."""
  if file.read(4) != bytes([0, 0, _UBYTE, num_axes]):
    raise ValueError(
        f'{place} is no IDX file of unsigned bytes with {num_axes} axes.'
    )
  header = file.read(4 * num_axes)
  if len(header) < 4 * num_axes:
    raise ValueError(f'{place} ends in its header.')
  shape = tuple(int(n) for n in np.frombuffer(header, '>u4'))
  num_bytes = math.prod(shape)
  memory.check_fits(f'{place}: the values', num_bytes)
  values = file.read(num_bytes + 1)
  if len(values) != num_bytes:
    more = 'more' if len(values) > num_bytes else f'{len(values):,}'
    raise ValueError(
        f'{place} has {more} values, but its header describes {num_bytes:,}.'
    )
  return np.frombuffer(values, np.uint8).reshape(shape)
