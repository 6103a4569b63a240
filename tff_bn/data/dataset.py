"""A classification dataset in memory, and the checks of its arrays."""

from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
from typing import Any, Optional

from absl import logging
import numpy as np

from tff_bn.data import scaling as scaling_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """A dataset for classification: arrays in memory.

  Attributes:
    name: The dataset's name for `load_dataset`.
    x_train: Training samples: images `[n, height, width, channels]` or vectors
      `[n, features]`. uint8 values are divided by 255 when batches are built;
      float32 values are used unchanged. After that, `scaling` is applied.
    y_train: The classes of the training samples, int32 of shape `[n]`.
    x_test: Test samples, like `x_train`.
    y_test: The classes of the test samples, like `y_train`.
    num_classes: The number of classes. Labels are in `0..num_classes - 1`.
    domain_train: For data of several domains, each training sample's position
      in `domain_names`, int32 of shape `[n]`.
    domain_test: The same for the test samples.
    domain_names: The names of the domains.
    writer_train: For data of natural clients, each training sample's position
      in `writer_names`, int32 of shape `[n]`.
    writer_test: The same for the test samples.
    writer_names: The names of the natural clients.
    scaling: How pixels or features are scaled when batches are built; `None`:
      not.
    class_names: The names of the classes in the order of their labels. Empty if
      the classes have numbers only.
    divisor: By which number the original values were divided to get the
      samples; `None` if it differs between samples. The division of uint8
      values by 255 does not count, because it comes later.

  Raises:
    TypeError: If a name of a class is no string.
    ValueError: If there is not one name for each class, or a name occurs twice.
  """

  name: str
  x_train: np.ndarray
  y_train: np.ndarray
  x_test: np.ndarray
  y_test: np.ndarray
  num_classes: int
  domain_train: Optional[np.ndarray] = None
  domain_test: Optional[np.ndarray] = None
  domain_names: tuple[str, ...] = ()
  writer_train: Optional[np.ndarray] = None
  writer_test: Optional[np.ndarray] = None
  writer_names: tuple[str, ...] = ()
  scaling: Optional[scaling_lib.Scaling] = None
  class_names: tuple[str, ...] = ()
  divisor: Optional[float] = 1

  def __post_init__(self) -> None:
    names = check_class_names(
        f'dataset={self.name}', self.class_names, self.num_classes
    )
    object.__setattr__(self, 'class_names', names)

  @property
  def input_shape(self) -> tuple[int, ...]:
    """The shape of one sample."""
    return self.x_train.shape[1:]

  @property
  def total_divisor(self) -> Optional[float]:
    """By which number the original values are divided in batches; or `None`."""
    return 255 if self.x_train.dtype == np.uint8 else self.divisor

  def replace_samples(
      self, change: Callable[[np.ndarray], np.ndarray]
  ) -> 'Dataset':
    """Returns the dataset with changed training and test samples.

    Args:
      change: Returns the changed samples, in the same order.
    """
    return dataclasses.replace(
        self, x_train=change(self.x_train), x_test=change(self.x_test)
    )

  def with_training_samples(self, indices: np.ndarray) -> 'Dataset':
    """Returns the dataset with only some of the training samples.

    Args:
      indices: Their positions.
    """
    arrays = {
        name: getattr(self, name)
        for name in ('x_train', 'y_train', 'domain_train', 'writer_train')
    }
    return dataclasses.replace(
        self,
        **{
            name: array[indices]
            for name, array in arrays.items()
            if array is not None
        },
    )

  def fingerprint(self) -> str:
    """Returns a hexadecimal hash of all samples and labels."""
    return self._fingerprint

  @functools.cached_property
  def _fingerprint(self) -> str:
    digest = hashlib.sha256(f'{self.num_classes} classes;'.encode())
    for array in (self.x_train, self.y_train, self.x_test, self.y_test):
      digest.update(f'{array.dtype.str}{array.shape}'.encode())
      digest.update(np.ascontiguousarray(array))
    if self.scaling is not None:
      digest.update(f'scaling {self.scaling.to_json()}'.encode())
    if self.class_names:
      digest.update(f'classes {list(self.class_names)}'.encode())
    return digest.hexdigest()


def create_dataset(
    name: str,
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    num_classes: Optional[int] = None,
    is_part: bool = False,
    **attributes: Any,
) -> Dataset:
  """Builds a `Dataset` from arrays and checks them.

  Args:
    name: The dataset's name for `load_dataset`, which errors name.
    x_train: Training samples: uint8 or floating point, of shape `[n, height,
      width, channels]`, `[n, height, width]` (one channel) or `[n, features]`.
    y_train: Their classes: integers of shape `[n]` or `[n, 1]`.
    x_test: Test samples, like `x_train`.
    y_test: Their classes.
    num_classes: The number of classes. Default: 1 more than the largest label
      in `y_train`.
    is_part: Whether the training samples may lack classes, because the dataset
      is a domain of another one, or is for a model that is trained already.
    **attributes: Further attributes of `Dataset`, such as those about domains
      and writers.

  Returns:
    The dataset.

  Raises:
    ValueError: If an array has another dtype, shape or content, or there are
      fewer than two classes and `is_part` is false.
  """
  source = f'dataset={name}'
  x_train = _check_samples(source, 'x_train', x_train)
  x_test = _check_samples(source, 'x_test', x_test)
  if (x_train.dtype == np.uint8) != (x_test.dtype == np.uint8):
    raise ValueError(
        f'{source}: only one of x_train and x_test is uint8, so they would be'
        ' scaled differently; store both as uint8 (0 to 255, scaled to [0, 1])'
        ' or both as floats (used as they are).'
    )
  if x_train.shape[1:] != x_test.shape[1:]:
    raise ValueError(
        f'{source}: the samples of x_train have the shape {x_train.shape[1:]},'
        f' but x_test has {x_test.shape[1:]}; they must be the same.'
    )
  _warn_of_channels_first(source, x_train.shape[1:])
  y_train = _check_labels(source, 'train', y_train, len(x_train))
  y_test = _check_labels(source, 'test', y_test, len(x_test))
  if num_classes is None and is_part:
    num_classes = 1 + int(max(y_train.max(), y_test.max()))
  elif num_classes is None:
    num_classes = _count_classes(source, y_train)
    unknown = np.setdiff1d(y_test, y_train)
    if unknown.size:
      raise ValueError(
          f'{source}: y_test has labels that do not occur in y_train:'
          f' {_enumerate(unknown)}; remove these samples from the test data or'
          ' add such samples to the training data.'
      )
  elif num_classes < 2 and not is_part:
    raise ValueError(
        f'{source} has a single class; a classifier needs at least two.'
    )
  for array_name, labels in (('y_train', y_train), ('y_test', y_test)):
    unknown = np.unique(labels[labels >= num_classes])
    if unknown.size:
      raise ValueError(
          f'{source}: {array_name} has labels outside the {num_classes} classes'
          f' 0..{num_classes - 1}: {_enumerate(unknown)}.'
      )
  return Dataset(
      name, x_train, y_train, x_test, y_test, num_classes, **attributes
  )


def check_class_names(
    source: str, class_names: Sequence[str], num_classes: int
) -> tuple[str, ...]:
  """Checks that there are no names, or a different one for each class.

  Args:
    source: The beginning of errors.
    class_names: The names.
    num_classes: The number of classes.

  Returns:
    The names.

  Raises:
    TypeError: If they are no list of strings.
    ValueError: If their number is wrong, or a name occurs twice.
  """
  if isinstance(class_names, str):
    raise TypeError(
        f'{source}: class_names must be a list of names, but is the string'
        f' {class_names!r}.'
    )
  for class_name in class_names:
    if not isinstance(class_name, str):
      raise TypeError(
          f'{source}: class_names has {class_name!r}, but must have strings.'
      )
  if len(class_names) not in (0, num_classes):
    raise ValueError(
        f'{source}: class_names has {len(class_names)} names, but there are'
        f' {num_classes} classes; give one name for each class.'
    )
  twice = [name for name, count in Counter(class_names).items() if count > 1]
  if twice:
    raise ValueError(
        f'{source}: class_names has the name {twice[0]!r} twice; give each'
        ' class another name.'
    )
  return tuple(class_names)


def _count_classes(source: str, labels: np.ndarray) -> int:
  """Returns the number of classes; warns of classes without a label."""
  present = np.unique(labels)
  num_classes = int(present[-1]) + 1
  if len(present) < 2:
    raise ValueError(
        f'{source}: y_train has the label {present[0]} only; a classifier needs'
        ' at least two classes.'
    )
  advice = (
      f'number the classes from 0 to {len(present) - 1}, for example by'
      ' np.unique(y_train, return_inverse=True)'
  )
  if num_classes > len(labels):
    raise ValueError(
        f'{source}: y_train has {len(present)} different labels from'
        f' {present[0]} to {present[-1]}, which makes {num_classes} classes for'
        f' {len(labels)} samples; {advice}.'
    )
  missing = np.setdiff1d(np.arange(num_classes), present)
  if missing.size:
    logging.warning(
        '%s: no sample of y_train has one of the labels %s. The model gets an'
        ' output for each of the %d classes 0..%d. If these labels are no'
        ' classes, %s.',
        source,
        _enumerate(missing),
        num_classes,
        num_classes - 1,
        advice,
    )
  return num_classes


def _enumerate(labels: np.ndarray, most: int = 10) -> str:
  """Returns the first labels, separated by commas."""
  more = ', …' if len(labels) > most else ''
  return ', '.join(str(label) for label in labels[:most]) + more


def _check_samples(source: str, array_name: str, x: np.ndarray) -> np.ndarray:
  """Checks `x_train` or `x_test`; returns it as uint8 or float32."""
  if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
    raise ValueError(
        f'{source}: {array_name} has the dtype {x.dtype}; store images as uint8'
        ' (0 to 255, scaled to [0, 1]) or as floats (used as they are).'
    )
  if x.ndim not in (2, 3, 4):
    raise ValueError(
        f'{source}: {array_name} has the shape {x.shape}; it must be [samples,'
        ' height, width, channels], [samples, height, width] or [samples,'
        ' features].'
    )
  if not x.size:
    raise ValueError(
        f'{source}: {array_name} has the shape {x.shape}, so it is empty; both'
        ' training and test data are needed.'
    )
  if x.dtype != np.uint8:
    # A float64 may be too large for float32; the check below says so.
    with np.errstate(over='ignore'):
      x = x.astype(np.float32, copy=False)
    finite = np.isfinite(x)
    if not finite.all():
      raise ValueError(
          f'{source}: {array_name} has {finite.size - np.count_nonzero(finite)}'
          ' values that are NaN, infinite or too large for float32, the first'
          f' in sample {np.argwhere(~finite)[0][0]}; all values must be finite.'
      )
  return x[..., np.newaxis] if x.ndim == 3 else x


def _warn_of_channels_first(source: str, shape: tuple[int, ...]) -> None:
  """Warns of square images that have their channels first."""
  if len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2] > 3:
    logging.warning(
        '%s: the images have the shape %dx%dx%d, which is [height, width,'
        ' channels]. If the channels are first, move them to the end, for'
        ' example by np.moveaxis(x_train, 1, -1).',
        source,
        *shape,
    )


def _check_labels(
    source: str, split: str, y: np.ndarray, num_samples: int
) -> np.ndarray:
  """Checks `y_train` or `y_test`; returns it as int32 of shape `[n]`."""
  array_name = f'y_{split}'
  if not np.issubdtype(y.dtype, np.integer):
    raise ValueError(
        f'{source}: {array_name} has the dtype {y.dtype}; labels must be'
        f' integers, one for each sample, for example {array_name}.astype(int).'
    )
  if y.ndim == 2 and y.shape[1] == 1:
    y = y[:, 0]
  if y.ndim != 1:
    raise ValueError(
        f'{source}: {array_name} has the shape {y.shape}; it must be [samples],'
        ' one label for each sample. For one-hot vectors, this is'
        f' np.argmax({array_name}, axis=1).'
    )
  if len(y) != num_samples:
    raise ValueError(
        f'{source}: x_{split} has {num_samples} samples but {array_name} has'
        f' {len(y)} labels; give one label for each sample.'
    )
  if y.min() < 0:
    raise ValueError(
        f'{source}: {array_name} has the negative label {y.min()}; labels'
        ' count from 0.'
    )
  if y.max() > np.iinfo(np.int32).max:
    raise ValueError(
        f'{source}: {array_name} has the label {y.max()}; labels must be'
        ' less than 2^31.'
    )
  return y.astype(np.int32)
