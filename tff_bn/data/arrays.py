"""Checks a dataset's samples, and converts them to the dtypes of a dataset.

A dataset stores samples as uint8 or float32, and groups as int32. Arrays with
the same meaning are converted; all others are errors that name the array.
`tff_bn.data.labels` does the same for labels.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# The values of a chunk; its temporary arrays take a few MB.
_CHUNK_VALUES = 2**20

_WHITE = 255
# bool, signed and unsigned integers, floats.
NUMBERS = 'biuf'
_IMAGE_NDIM = 4

_PIXELS = 'uint8 (0 to 255, scaled to [0, 1])'


class Header(NamedTuple):
  """What is known of an array without its values.

  Attributes:
    dtype: Its dtype.
    shape: Its shape.
  """

  dtype: np.dtype
  shape: tuple[int, ...]

  @classmethod
  def of(cls, array: np.ndarray) -> 'Header':
    """Returns the header of an array."""
    return cls(array.dtype, array.shape)


class Arrays(NamedTuple):
  """The samples and labels of a dataset."""

  x_train: np.ndarray
  y_train: np.ndarray
  x_test: np.ndarray
  y_test: np.ndarray


def to_array(source: str, name: str, values: Any) -> np.ndarray:
  """Returns an array of any library, or nested lists, as a NumPy array.

  `source` begins errors and names the dataset; `name` is the array.

  Raises:
    TypeError: If the values are no array.
    ValueError: If lists have different lengths, or values are masked.
  """
  if np.ma.is_masked(values):
    raise ValueError(
        f'{source}: {name} has masked values; fill them or remove their'
        ' samples.'
    )
  try:
    array = np.asarray(values)
  # The class depends on the library of the array.
  except Exception as error:
    raise ValueError(
        f'{source}: {name} is no array of numbers ({error}); all samples must'
        ' have the same shape.'
    ) from error
  if not array.ndim and array.dtype == object:
    raise TypeError(
        f'{source}: {name} must be a NumPy array, but is a'
        f' {type(values).__name__}.'
    )
  return array


def check_sample_headers(
    source: str, x_train: Header, x_test: Header, *, needs_test: bool = True
) -> None:
  """Checks everything that dtypes and shapes of samples tell.

  `source` begins the errors. Without `needs_test`, there may be no test data.

  Raises:
    ValueError: If the arrays are not the samples of a dataset.
  """
  for name, x in (('x_train', x_train), ('x_test', x_test)):
    _check_sample_header(source, name, x)
    if 0 in x.shape and (needs_test or name == 'x_train' or 0 in x.shape[1:]):
      raise ValueError(
          f'{source}: {name} has the shape {x.shape}, so it is empty; it'
          ' needs at least one sample.'
      )
  if x_train.shape[1:] != x_test.shape[1:]:
    raise ValueError(
        f'{source}: the samples of x_train have the shape {x_train.shape[1:]},'
        f' but x_test has {x_test.shape[1:]}; they must be the same.'
    )
  if x_test.shape[0] and _stored(x_train) != _stored(x_test):
    raise ValueError(
        f'{source}: only one of x_train ({x_train.dtype}) and x_test'
        f' ({x_test.dtype}) is stored as uint8, so they would be scaled'
        f' differently; store both as {_PIXELS} or both as floats (used as they'
        ' are).'
    )


def _check_sample_header(source: str, name: str, x: Header) -> None:
  if x.dtype.kind not in NUMBERS:
    raise ValueError(
        f'{source}: {name} has the dtype {x.dtype}; samples must be numbers:'
        f' {_PIXELS}, or floats (used as they are).'
    )
  if len(x.shape) not in (2, 3, _IMAGE_NDIM):
    raise ValueError(
        f'{source}: {name} has the shape {x.shape}; it must be [samples,'
        ' height, width, channels] for images, [samples, features] for vectors,'
        ' or [samples, steps, features] for series.'
    )


def _stored(x: Header) -> type:
  """Returns the dtype in which samples are stored."""
  # Integers are pixels in images, and numbers in vectors and series.
  is_pixels = x.dtype.kind in 'iu' and len(x.shape) == _IMAGE_NDIM
  return np.uint8 if is_pixels or x.dtype == np.uint8 else np.float32


def convert_samples(
    source: str, x_train: np.ndarray, x_test: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Checks the values of samples whose headers were checked.

  Returns:
    The same arrays as uint8 or float32. Arrays of these dtypes are not copied.

  Raises:
    ValueError: If a value can't be used.
  """
  samples = {'x_train': x_train, 'x_test': x_test}
  if _stored(Header.of(x_train)) == np.uint8:
    _check_pixels(source, samples)
    return x_train.astype(np.uint8, copy=False), x_test.astype(
        np.uint8, copy=False
    )
  return to_float32(source, 'x_train', x_train), to_float32(
      source, 'x_test', x_test
  )


def chunks(array: np.ndarray) -> Iterator[slice]:
  """Yields slices of rows that have together at most `_CHUNK_VALUES` values."""
  rows = max(1, _CHUNK_VALUES // max(1, int(np.prod(array.shape[1:]))))
  for start in range(0, len(array), rows):
    yield slice(start, start + rows)


def _check_pixels(source: str, samples: dict[str, np.ndarray]) -> None:
  """Checks that integers can be stored as uint8."""
  highest = 0
  for name, x in samples.items():
    if x.dtype == np.uint8 or not x.size:
      # Its maximum is not needed: uint8 means pixels.
      highest = _WHITE if x.size else highest
      continue
    low, high = int(x.min()), int(x.max())
    if low < 0 or high > _WHITE:
      raise ValueError(
          f'{source}: {name} has the dtype {x.dtype} and values from {low} to'
          f' {high}; integers in images are pixels from 0 to 255. Values that'
          f' are used as they are must be floats: {name}.astype(np.float32).'
      )
    highest = max(highest, high)
  if highest == 1:
    raise ValueError(
        f'{source}: x_train has the dtype {samples["x_train"].dtype} and only'
        ' the values 0 and 1, which are nearly black as pixels from 0 to 255.'
        ' For black and white, use x_train.astype(np.float32).'
    )


def to_float32(source: str, name: str, x: np.ndarray) -> np.ndarray:
  """Returns finite values as float32."""
  result = x
  if x.dtype != np.float32:
    result = np.empty(x.shape, np.float32)
  num_wrong, first = 0, 0
  for rows in chunks(x):
    if result is not x:
      # A float64 may be too large for float32; the check says so.
      with np.errstate(over='ignore'):
        result[rows] = x[rows]
    finite = np.isfinite(result[rows])
    if not finite.all():
      if not num_wrong:
        first = rows.start + int(np.argwhere(~finite)[0][0])
      num_wrong += finite.size - np.count_nonzero(finite)
  if num_wrong:
    raise ValueError(
        f'{source}: {name} has {num_wrong} values that are NaN, infinite or too'
        f' large for float32, the first in sample {first}; all values must be'
        ' finite.'
    )
  return result


def enumerate_labels(labels: np.ndarray, most: int = 10) -> str:
  """Returns the first labels, separated by commas."""
  more = ', …' if len(labels) > most else ''
  return ', '.join(str(label) for label in labels[:most]) + more


def samples_text(shape: tuple[int, ...]) -> str:
  """Returns what samples of a shape are, for an error that asks for others."""
  if len(shape) == 1:
    return f'vectors of {shape[0]} features'
  if len(shape) == 2:
    return f'series of {shape[0]} steps with {shape[1]} features'
  return f'images of {"x".join(map(str, shape))}'


def convert_groups(
    source: str,
    name: str,
    values: Any,
    num_samples: int,
    group_names: Sequence[str],
) -> np.ndarray:
  """Checks the groups of samples, and returns them as int32 of shape `[n]`.

  Each value is the position of the sample's group in `group_names`.

  Raises:
    TypeError: If they are no array.
    ValueError: If there is not one position for each sample.
  """
  array = to_array(source, name, values)
  if array.dtype.kind not in 'iu' or array.shape != (num_samples,):
    raise ValueError(
        f'{source}: {name} has the dtype {array.dtype} and the shape'
        f' {array.shape}; it must be {num_samples} integers, one for each'
        ' sample.'
    )
  if array.size and not 0 <= array.min() <= array.max() < len(group_names):
    raise ValueError(
        f'{source}: {name} has values from {array.min()} to {array.max()}; they'
        f' must be positions in the {len(group_names)} names.'
    )
  return array.astype(np.int32, copy=False)


def present(labels: np.ndarray) -> np.ndarray:
  """Returns the labels that occur, in their order."""
  # Sorting the pixels of all masks at once would take as much memory again.
  found = [np.unique(labels[rows]) for rows in chunks(labels)]
  return np.unique(np.concatenate([labels[:0].reshape(-1), *found]))
