"""Datasets from NumPy archives with x_train, y_train, x_test and y_test.

The arrays client_train and client_test may give the ids of clients.

The file may be damaged or somebody else's. The headers are checked before an
array is read, so a small file can't unpack to an array of any size.
"""

import collections
import math
import os
import stat
from typing import IO, Any, Optional
import zipfile

import numpy as np

from tff_bn.catalog import datasets
from tff_bn.common import memory
from tff_bn.common import spelling
from tff_bn.data import arrays
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import labels
from tff_bn.data import natural_clients

_CLIENT_TRAIN, _CLIENT_TEST = datasets.CLIENT_ARRAYS
_ENCRYPTED = 0x1
# Reasons quote a damaged file.
_MAX_REASON_LENGTH = 200
# Versions of the format of arrays whose dtype has no fields.
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def load_npz(
    name: str, *, task: Optional[str] = None, is_part: bool = False
) -> dataset_lib.Dataset:
  """Loads a dataset from an .npz file.

  Args:
    name: `npz:PATH`, or a path that ends in `.npz`; `series:PATH` if the
      samples are series.
    task: What a model learns from the labels, a key of
      `tff_bn.catalog.tasks.TASKS`. Default: found from the labels.
    is_part: Whether `y_train` may lack classes, see `create_dataset`.

  Returns:
    The dataset.

  Raises:
    ValueError: If the file or one of the four arrays is missing, or if the
      arrays do not form a dataset.
  """
  source = f'dataset={name}'
  is_series = name.startswith(datasets.SERIES.prefix)
  path = os.path.expanduser(datasets.path(name))
  _check_path(source, path)
  try:
    archive = zipfile.ZipFile(path)
  # A damaged file may raise anything.
  except Exception as error:
    raise ValueError(
        f'{source}: {path!r} is no readable .npz file ({error}).'
    ) from error
  with archive:
    members = _find_members(source, path, archive)
    headers = {
        array: _read_header(source, array, archive, member)
        for array, member in members.items()
    }
    if _CLIENT_TEST in headers and _CLIENT_TRAIN not in headers:
      raise ValueError(
          f'{source}: {path!r} has {_CLIENT_TEST}, but not {_CLIENT_TRAIN}.'
      )
    memory.check_fits(
        f'{source}: the arrays of {path!r}', sum(map(_size, headers.values()))
    )
    for array in ('x_train', 'x_test'):
      headers[array] = _sample_header(source, array, headers[array], is_series)
    labels.check_headers(
        source,
        task or labels.task_of_header(source, headers['y_train']),
        *(headers[array] for array in arrays.Arrays._fields),
    )

    def read(array: str) -> np.ndarray:
      return _read(source, array, archive, members[array])

    # Labels take little time.
    y_train, y_test = read('y_train'), read('y_test')
    task = task or labels.find_task(source, y_train)
    num_classes = labels.count_classes(
        source, task, y_train, y_test, is_part=is_part
    )
    clients = {}
    if _CLIENT_TRAIN in members:
      clients = natural_clients.attributes(
          source,
          read(_CLIENT_TRAIN),
          read(_CLIENT_TEST) if _CLIENT_TEST in members else None,
          (len(y_train), len(y_test)),
      )
    x_train, x_test = read('x_train'), read('x_test')
  return dataset_lib.create_dataset(
      name,
      x_train,
      y_train,
      x_test,
      y_test,
      num_classes,
      task=task,
      is_part=is_part,
      is_series=is_series,
      **clients,
  )


def _check_path(source: str, path: str) -> None:
  """Checks that a path is a file and no single array."""
  try:
    mode = os.stat(path).st_mode
  # The path may contain a null character.
  except (OSError, ValueError) as error:
    raise ValueError(f'{source}: there is no file {path!r}.') from error
  # Reading from a pipe may last forever.
  if not stat.S_ISREG(mode):
    raise ValueError(
        f'{source}: {path!r} is no regular file; it must be an .npz file.'
    )
  try:
    with open(path, 'rb') as file:
      start = file.read(len(np.lib.format.MAGIC_PREFIX))
  except OSError as error:
    raise ValueError(
        f'{source}: {path!r} is no readable .npz file ({error}).'
    ) from error
  if start == np.lib.format.MAGIC_PREFIX:
    raise ValueError(
        f'{source}: {path!r} holds a single array, not an .npz archive with'
        f' {", ".join(arrays.Arrays._fields)}.'
    )


def _find_members(
    source: str, path: str, archive: zipfile.ZipFile
) -> dict[str, zipfile.ZipInfo]:
  """Returns the member of each array."""
  found = collections.defaultdict(list)
  for member in archive.infolist():
    found[member.filename.removesuffix(datasets.NPY_SUFFIX)].append(member)
  needed = arrays.Arrays._fields
  missing = [array for array in needed if array not in found]
  if missing:
    # A foreign file's names may contain anything.
    present = spelling.name_some([repr(array)[1:-1] for array in found])
    raise ValueError(
        f'{source}: {path!r} lacks {", ".join(missing)}; it needs the arrays'
        f' {", ".join(needed)}, but has {present or "none"}.'
    )
  known = [
      array for array in (*needed, *datasets.CLIENT_ARRAYS) if array in found
  ]
  for array in known:
    if len(found[array]) > 1:
      raise ValueError(
          f'{source}: {path!r} has {len(found[array])} arrays {array}; it is'
          ' unclear which one counts. Save the file again.'
      )
    if found[array][0].flag_bits & _ENCRYPTED:
      raise ValueError(
          f'{source}: {array} in {path!r} is encrypted; store it without a'
          ' password.'
      )
  return {array: found[array][0] for array in known}


def _read_header(
    source: str, array: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> arrays.Header:
  """Reads the header of an array and compares it with the archive's."""
  try:
    with archive.open(member) as file:
      header = _parse_header(file)
      length = file.tell()
  except Exception as error:
    raise _unreadable(source, array, error) from error
  if header.dtype.hasobject:
    if array in datasets.CLIENT_ARRAYS:
      raise ValueError(
          f'{source}: {array} holds Python objects; store texts, by'
          ' np.array(ids, str), or whole numbers.'
      )
    raise _unreadable(source, array, 'it holds Python objects')
  expected = length + _size(header)
  if member.file_size != expected:
    raise _unreadable(
        source,
        array,
        f'it has {member.file_size:,} bytes, but its header describes'
        f' {expected:,}',
    )
  return header


def _parse_header(file: IO[bytes]) -> arrays.Header:
  """Reads the header of an array; raises a `ValueError` if there is none."""
  version = np.lib.format.read_magic(file)
  if version not in _READ_HEADER:
    raise ValueError(f'the version {version} of its format is not supported')
  shape, _, dtype = _READ_HEADER[version](file)
  if any(size < 0 for size in shape):
    raise ValueError(f'its shape is {shape}')
  return arrays.Header(dtype, shape)


def _sample_header(
    source: str, array: str, header: arrays.Header, is_series: bool
) -> arrays.Header:
  """Returns the header that samples have in the dataset."""
  has_three_axes = len(header.shape) == 3
  if is_series and not has_three_axes:
    raise ValueError(
        f'{source}: {array} has the shape {header.shape}; series must be'
        f' [samples, steps, features]. Use {datasets.NPZ.prefix} for vectors'
        ' and images.'
    )
  if has_three_axes and not is_series:
    return header._replace(shape=(*header.shape, 1))
  return header


def _size(header: arrays.Header) -> int:
  """Returns the number of bytes of an array."""
  return math.prod(header.shape) * header.dtype.itemsize


def _read(
    source: str, array: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> np.ndarray:
  try:
    with archive.open(member) as file:
      # Unpickling could run code.
      return np.lib.format.read_array(file, allow_pickle=False)
  except Exception as error:
    raise _unreadable(source, array, error) from error


def _unreadable(source: str, array: str, reason: Any) -> ValueError:
  # A damaged header may end up in the reason.
  text = str(reason) or type(reason).__name__
  line = text.splitlines()[0] if text.strip() else type(reason).__name__
  if len(line) > _MAX_REASON_LENGTH:
    line = line[:_MAX_REASON_LENGTH] + ' …'
  return ValueError(
      f'{source}: {array} cannot be read ({line}); store arrays of numbers.'
  )
