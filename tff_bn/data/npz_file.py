"""Datasets from NumPy archives with x_train, y_train, x_test and y_test."""

import os
import zipfile

import numpy as np

from tff_bn.data import dataset as dataset_lib
from tff_bn.data import names

_ARRAYS = ('x_train', 'y_train', 'x_test', 'y_test')


def load_npz(name: str, *, is_part: bool = False) -> dataset_lib.Dataset:
  """Loads a dataset from an .npz file.

  Args:
    name: `npz:PATH`, or a path that ends in `.npz`.
    is_part: Whether `y_train` may lack classes, see `create_dataset`.

  Returns:
    The dataset.

  Raises:
    ValueError: If the file or one of its four arrays is missing, or if the
      arrays do not form a dataset.
  """
  source = f'dataset={name}'
  path = os.path.expanduser(name.removeprefix(names.NPZ_PREFIX))
  if not os.path.isfile(path):
    raise ValueError(f'{source}: there is no file {path!r}.')
  try:
    # Unpickling could run code.
    archive = np.load(path, allow_pickle=False)
  except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(
        f'{source}: {path!r} is no readable .npz file ({error}).'
    ) from error
  if not isinstance(archive, np.lib.npyio.NpzFile):
    raise ValueError(
        f'{source}: {path!r} holds a single array, not an .npz archive with'
        f' {", ".join(_ARRAYS)}.'
    )
  with archive:
    missing = [array for array in _ARRAYS if array not in archive]
    if missing:
      raise ValueError(
          f'{source}: {path!r} lacks {", ".join(missing)}; it needs the arrays'
          f' {", ".join(_ARRAYS)}, but has {", ".join(archive) or "none"}.'
      )
    x_train, y_train, x_test, y_test = (
        _read(source, archive, array) for array in _ARRAYS
    )
  return dataset_lib.create_dataset(
      name, x_train, y_train, x_test, y_test, is_part=is_part
  )


def _read(source: str, archive: np.lib.npyio.NpzFile, array: str) -> np.ndarray:
  try:
    return archive[array]
  # A damaged member, or one with Python objects.
  except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(
        f'{source}: {array} cannot be read ({error}); store arrays of numbers.'
    ) from error
