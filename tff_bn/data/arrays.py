"""Checks a dataset's arrays, and converts them to the dtypes of a dataset.

A dataset stores samples as uint8 or float32, and labels and groups as int32.
Arrays with the same meaning are converted; all others are errors that name the
array. `check_headers` needs no values, so a reader can refuse a file before it
unpacks it.
"""

from collections.abc import Iterator, Sequence
import math
from typing import Any, NamedTuple, Optional

import numpy as np

# Labels of several columns are an error. Their values decide on the advice, but
# larger arrays are not read for that.
_MAX_ADVISED_VALUES = 2**24

# The values of a chunk; its temporary arrays take a few MB.
_CHUNK_VALUES = 2**20

_MAX_LABEL = np.iinfo(np.int32).max
_WHITE = 255
# bool, signed and unsigned integers, floats.
_NUMBERS = 'biuf'
_IMAGE_NDIM = 4

_ARGMAX = ' For one-hot vectors, this is np.argmax({name}, axis=1).'
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


def check_headers(
    source: str,
    x_train: Header,
    y_train: Header,
    x_test: Header,
    y_test: Header,
    *,
    needs_test: bool = True,
) -> None:
  """Checks everything that dtypes and shapes tell.

  `source` begins the errors. Without `needs_test`, there may be no test data.

  Raises:
    ValueError: If the arrays form no dataset.
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
  for split, x, y in (('train', x_train, y_train), ('test', x_test, y_test)):
    _check_label_header(source, split, y, x.shape[0])


def _check_sample_header(source: str, name: str, x: Header) -> None:
  if x.dtype.kind not in _NUMBERS:
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


def _check_label_header(
    source: str, split: str, y: Header, num_samples: int
) -> None:
  name = f'y_{split}'
  if y.dtype.kind not in _NUMBERS:
    raise ValueError(
        f'{source}: {name} has the dtype {y.dtype}; labels must be integers'
        ' from 0, one for each sample. np.searchsorted(np.unique(y_train),'
        f' {name}) numbers the classes.'
    )
  if len(y.shape) not in (1, 2):
    raise ValueError(_not_one_label(source, name, y.shape))
  if y.shape[0] != num_samples:
    raise ValueError(
        f'{source}: x_{split} has {num_samples} samples but {name} has'
        f' {y.shape[0]} labels; give one label for each sample.'
    )
  num_values = math.prod(y.shape)
  if num_values > max(num_samples, _MAX_ADVISED_VALUES):
    raise ValueError(
        _not_one_label(source, name, y.shape)
        + _ARGMAX.format(name=name)
        + ' Several labels for a sample are not supported.'
    )


def _stored(x: Header) -> type:
  """Returns the dtype in which samples are stored."""
  # Integers are pixels in images, and numbers in vectors and series.
  is_pixels = x.dtype.kind in 'iu' and len(x.shape) == _IMAGE_NDIM
  return np.uint8 if is_pixels or x.dtype == np.uint8 else np.float32


def convert(source: str, given: Arrays, num_classes: int) -> Arrays:
  """Checks the samples and labels of a dataset, and converts them.

  Returns:
    The same arrays; samples as uint8 or float32, labels as int32 of shape
    `[n]`. Arrays of this form are not copied.

  Raises:
    ValueError: If the arrays form no dataset.
  """
  check_headers(source, *map(Header.of, given), needs_test=False)
  y_train, y_test = (
      convert_labels(source, name, labels, num_classes)
      for name, labels in (('y_train', given.y_train), ('y_test', given.y_test))
  )
  samples = {'x_train': given.x_train, 'x_test': given.x_test}
  if _stored(Header.of(given.x_train)) == np.uint8:
    _check_pixels(source, samples)
    stored: list[np.ndarray] = [
        x.astype(np.uint8, copy=False) for x in samples.values()
    ]
  else:
    stored = [_to_float32(source, *item) for item in samples.items()]
  return Arrays(stored[0], y_train, stored[1], y_test)


def _chunks(array: np.ndarray) -> Iterator[slice]:
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


def _to_float32(source: str, name: str, x: np.ndarray) -> np.ndarray:
  """Returns finite values as float32."""
  result = x
  if x.dtype != np.float32:
    result = np.empty(x.shape, np.float32)
  num_wrong, first = 0, 0
  for rows in _chunks(x):
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


def convert_labels(
    source: str, name: str, y: np.ndarray, num_classes: Optional[int] = None
) -> np.ndarray:
  """Checks labels, and returns them as int32 of shape `[n]`.

  Args:
    source: The beginning of errors, which names the dataset.
    name: The name of the array.
    y: Whole numbers of any dtype, of shape `[n]` or `[n, 1]`.
    num_classes: The number of classes. Default: any.

  Raises:
    ValueError: If they are no labels.
  """
  if y.ndim == 2 and y.shape[1] == 1:
    y = y[:, 0]
  if y.ndim != 1:
    raise ValueError(
        _not_one_label(source, name, y.shape) + _advice_of_columns(name, y)
    )
  if not y.size:
    return y.astype(np.int32)
  if y.dtype.kind == 'f':
    wrong = y[~np.isfinite(y) | (y != np.rint(y))]
    if wrong.size:
      raise ValueError(
          f'{source}: {name} has the label {wrong[0]:g}; labels must be whole'
          ' numbers. Numbers to predict (regression) are not supported.'
      )
  low, high = int(y.min()), int(y.max())
  if low < 0:
    raise ValueError(
        f'{source}: {name} has the negative label {low}; labels count from 0.'
    )
  if high > _MAX_LABEL:
    raise ValueError(
        f'{source}: {name} has the label {high}; labels must be less than 2^31.'
    )
  labels: np.ndarray = y.astype(np.int32, copy=False)
  if num_classes is not None:
    unknown = np.unique(labels[labels >= num_classes])
    if unknown.size:
      raise ValueError(
          f'{source}: {name} has labels outside the {num_classes} classes'
          f' 0..{num_classes - 1}: {enumerate_labels(unknown)}.'
      )
  return labels


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


def _not_one_label(source: str, name: str, shape: tuple[int, ...]) -> str:
  return (
      f'{source}: {name} has the shape {shape}; it must be [samples], one label'
      ' for each sample.'
  )


def _advice_of_columns(name: str, y: np.ndarray) -> str:
  """Returns what labels of several columns seem to be, and the remedy."""
  is_binary, is_distribution = True, y.dtype.kind == 'f'
  several: Optional[int] = None
  for rows in _chunks(y):
    part = y[rows]
    binary = ((part == 0) | (part == 1)).all()
    is_binary = is_binary and bool(binary)
    if binary and several is None:
      other = np.flatnonzero(np.count_nonzero(part, axis=1) != 1)
      several = rows.start + int(other[0]) if other.size else None
    is_distribution = (
        is_distribution
        and bool((part >= 0).all())
        and np.allclose(part.sum(axis=1), 1, atol=1e-3)
    )
  if is_binary and several is None:
    return _ARGMAX.format(name=name)
  if is_binary:
    return (
        f' Sample {several} has {np.count_nonzero(y[several])} of'
        f' {y.shape[1]} labels: several labels for a sample (multi-label'
        ' classification) are not supported. Choose one label for each sample,'
        ' or train a model for each class.'
    )
  if is_distribution:
    return (
        ' Probabilities of classes (soft labels) are not supported;'
        f' np.argmax({name}, axis=1) is the most probable class.'
    )
  return ''


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
