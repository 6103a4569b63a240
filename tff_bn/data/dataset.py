"""A classification dataset in memory, and the checks of its arrays."""

from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
from typing import Any, Optional, Self

from absl import logging
import numpy as np

from tff_bn.catalog import datasets
from tff_bn.catalog import value_types
from tff_bn.common import checks
from tff_bn.data import arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
  """Standardizes each channel: (x - mean) / deviation.

  Vectors have features in the place of channels.

  Attributes:
    mean: The mean of each channel, float32 of shape `[channels]`.
    deviation: The standard deviation, in the same form.
  """

  mean: np.ndarray
  deviation: np.ndarray

  def to_json(self) -> dict[str, list[float]]:
    """Returns the exact numbers, for a file."""
    return {
        'mean': self.mean.astype(float).tolist(),
        'deviation': self.deviation.astype(float).tolist(),
    }

  @classmethod
  def from_json(cls, numbers: dict[str, Any]) -> Self:
    """Reads what `to_json` returned."""
    return cls(
        np.array(numbers['mean'], np.float32),
        np.array(numbers['deviation'], np.float32),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """A dataset for classification: arrays in memory.

  The constructor checks all values once and stores each array with one dtype.
  It takes arrays of other libraries and lists, too.

  Attributes:
    name: The dataset's name for `load_dataset`, which errors name.
    x_train: Training samples, finite numbers: images `[n, height, width,
      channels]`, vectors `[n, features]` or series `[n, steps, features]`.
      Stored as uint8 or float32. uint8 values are divided by 255 when batches
      are built; float32 values are used unchanged. After that, `scaling` is
      applied. Other integers are pixels from 0 to 255 in images, which become
      uint8, and numbers in vectors and series, which become float32. Other
      floats and bools become float32.
    y_train: The classes of the training samples: whole numbers of any dtype, of
      shape `[n]` or `[n, 1]`. Stored as int32 of shape `[n]`.
    x_test: Test samples, like `x_train`. There may be none (`x_train[:0]`);
      metrics are then NaN.
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
    TypeError: If an argument has the wrong type.
    ValueError: If an array has another dtype, shape or content, a label is not
      one of the classes, there is not one name for each class, or a name occurs
      twice.
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
  scaling: Optional[Scaling] = None
  class_names: tuple[str, ...] = ()
  divisor: Optional[float] = 1

  def __post_init__(self) -> None:
    checks.check_type('name', self.name, str, 'be the name of the dataset')
    source = _source(self.name)
    value_types.POSITIVE_INTEGER.check('num_classes', self.num_classes)
    given = arrays.Arrays(
        *(
            arrays.to_array(source, name, getattr(self, name))
            for name in arrays.Arrays._fields
        )
    )
    converted: dict[str, Any] = arrays.convert(
        source, given, self.num_classes
    )._asdict()
    converted['num_classes'] = int(self.num_classes)
    converted['class_names'] = check_class_names(
        source, self.class_names, converted['num_classes']
    )
    for group in ('domain', 'writer'):
      group_names = tuple(getattr(self, f'{group}_names'))
      converted[f'{group}_names'] = group_names
      for split in ('train', 'test'):
        name = f'{group}_{split}'
        if getattr(self, name) is not None:
          converted[name] = arrays.convert_groups(
              source,
              name,
              getattr(self, name),
              len(converted[f'y_{split}']),
              group_names,
          )
    for name, value in converted.items():
      object.__setattr__(self, name, value)

  def unchecked(self, **values: Any) -> 'Dataset':
    """Returns the dataset with other values, unchecked and in stored form."""
    changed = object.__new__(type(self))
    for field in dataclasses.fields(self):
      value = values.get(field.name, getattr(self, field.name))
      object.__setattr__(changed, field.name, value)
    return changed

  @property
  def task(self) -> str:
    """The task of the labels."""
    return 'classification'

  @property
  def num_outputs(self) -> int:
    """The number of outputs of a model."""
    return self.num_classes

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
    """Returns the dataset with changed training and test samples."""
    return dataclasses.replace(
        self, x_train=change(self.x_train), x_test=change(self.x_test)
    )

  def with_training_samples(self, indices: np.ndarray) -> 'Dataset':
    """Returns the dataset with the training samples at these positions."""
    parts = {
        name: getattr(self, name)
        for name in ('x_train', 'y_train', 'domain_train', 'writer_train')
    }
    return self.unchecked(
        **{
            name: array[indices]
            for name, array in parts.items()
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
    *,
    is_part: bool = False,
    is_series: bool = False,
    **attributes: Any,
) -> Dataset:
  """Builds the `Dataset` that a file or a generator contains.

  Training and test data are needed.

  Args:
    name: The dataset's name for `load_dataset`, which errors name.
    x_train: Training samples, see `Dataset`.
    y_train: Their classes.
    x_test: Test samples, like `x_train`.
    y_test: Their classes.
    num_classes: The number of classes. Default: 1 more than the largest label
      in `y_train`.
    is_part: Whether the training samples may lack classes, because the dataset
      is a domain of another one, or is for a model that is trained already.
    is_series: Whether samples of shape `[n, a, b]` are series `[n, steps,
      features]`. Default: they are images `[n, height, width]`, which get an
      axis of one channel.
    **attributes: Further attributes of `Dataset`, such as those about domains
      and writers.

  Returns:
    The dataset.

  Raises:
    ValueError: See `Dataset`. Unless `is_part` is true, also if there are fewer
      than two classes, or `num_classes` is not given and test samples have
      other labels.
  """
  source = _source(name)
  if not is_series:
    _warn_of_series(source, x_train.shape[1:])
    x_train, x_test = _with_channel(x_train), _with_channel(x_test)
  given = arrays.Arrays(x_train, y_train, x_test, y_test)
  arrays.check_headers(source, *map(arrays.Header.of, given))
  _warn_of_channels_first(source, x_train.shape[1:])
  if num_classes is None:
    num_classes = count_classes(source, y_train, y_test, is_part=is_part)
  elif num_classes < 2 and not is_part:
    raise ValueError(
        f'{source} has a single class; a classifier needs at least two.'
    )
  return Dataset(name, *given, num_classes, **attributes)


def _with_channel(x: np.ndarray) -> np.ndarray:
  """Returns samples; images `[n, height, width]` get a channel."""
  return x[..., np.newaxis] if x.ndim == 3 else x


def _warn_of_series(source: str, shape: tuple[int, ...]) -> None:
  """Warns of images without channels that may be series."""
  if len(shape) == 2 and shape[0] != shape[1]:
    logging.warning(
        '%s: the samples have the shape %dx%d, which is read as [height, width]'
        ' of grey images. If they are series [steps, features], load them as'
        ' %sPATH.',
        source,
        *shape,
        datasets.SERIES.prefix,
    )


def _source(name: str) -> str:
  """Returns the beginning of errors about a dataset."""
  return f'dataset={name}'


def count_classes(
    source: str,
    y_train: np.ndarray,
    y_test: np.ndarray,
    *,
    is_part: bool = False,
) -> int:
  """Returns the number of classes of labels; warns of classes without a label.

  `source` begins the errors. With `is_part`, see `create_dataset`, there are no
  warnings.

  Raises:
    ValueError: If they are no labels. Unless `is_part` is true, also if there
      are fewer than two classes, or a test sample has a label that no training
      sample has.
  """
  train, test = (
      arrays.convert_labels(source, name, labels)
      for name, labels in (('y_train', y_train), ('y_test', y_test))
  )
  if is_part:
    return 1 + int(max(train.max(), test.max()))
  num_classes = _count_classes(source, train)
  unknown = np.setdiff1d(test, train)
  if unknown.size:
    raise ValueError(
        f'{source}: y_test has labels that do not occur in y_train:'
        f' {arrays.enumerate_labels(unknown)}; remove these samples from the'
        ' test data or add such samples to the training data.'
    )
  return num_classes


def check_class_names(
    source: str, class_names: Sequence[str], num_classes: int
) -> tuple[str, ...]:
  """Checks that there are no names, or a different one for each class.

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
        arrays.enumerate_labels(missing),
        num_classes,
        num_classes - 1,
        advice,
    )
  return num_classes


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
