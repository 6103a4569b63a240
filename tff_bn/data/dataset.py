"""A dataset in memory, and the checks of its arrays."""

from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
from typing import Any, Optional, Self

from absl import logging
import numpy as np

from tff_bn.catalog import datasets
from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.common import checks
from tff_bn.data import arrays
from tff_bn.data import label_forms
from tff_bn.data import labels
from tff_bn.data import table_encoding


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
  """A dataset: arrays in memory.

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
    y_train: The labels of the training samples, of the form that the task
      needs. Classification: classes, whole numbers of any dtype, of shape `[n]`
      or `[n, 1]`, stored as int32 of shape `[n]`. Binary: 0 or 1, in the same
      shapes. Multi-label: 0 or 1 for each label, of shape `[n, labels]`, stored
      as int32. Regression: finite numbers of shape `[n]` or `[n, targets]`,
      stored as float32 of shape `[n, targets]`. Segmentation: the class of each
      pixel, of shape `[n, height, width]` or `[n, height, width, 1]`, stored as
      int32 of shape `[n, height, width]`.
    x_test: Test samples, like `x_train`. There may be none (`x_train[:0]`);
      metrics are then NaN.
    y_test: The labels of the test samples, like `y_train`.
    num_classes: The number of classes. Labels are in `0..num_classes - 1`. It
      is 2 for binary labels, the number of labels of a multi-label task, and
      None for a regression. Default: 1 more than the largest label in
      `y_train`, for classes.
    domain_train: For data of several domains, each training sample's position
      in `domain_names`, int32 of shape `[n]`.
    domain_test: The same for the test samples.
    domain_names: The names of the domains.
    client_train: If the data comes from known clients (natural clients), such
      as writers: the position of each training sample's client in
      `client_names`, int32 of shape `[n]`.
    client_test: The same for the test samples.
    client_names: The ids of the natural clients.
    scaling: How pixels or features are scaled when batches are built; `None`:
      not.
    class_names: The names of the classes in the order of their labels; for a
      multi-label task, the names of the labels. Empty if the classes have
      numbers only.
    divisor: By which number the original values were divided to get the
      samples; `None` if it differs between samples. The division of uint8
      values by 255 does not count, because it comes later.
    image_size: The height and width to which images were resized; `None`: they
      have their own size.
    table: How the columns of a table became the samples; `None` for other
      samples.
    task: What a model learns from the labels, a key of
      `tff_bn.catalog.tasks.TASKS`. Default: found from the dtype and the shape
      of `y_train` by `tff_bn.catalog.tasks.task_of_labels`; but if
      `num_classes` is given, one label for each sample is its class, whatever
      its dtype is.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If an array has another dtype, shape or content, a label is not
      one of the classes, there is not one name for each class, a name occurs
      twice, the task is unknown or does not fit the labels, or the labels could
      be of several tasks, such as one-hot vectors.
  """

  name: str
  x_train: np.ndarray
  y_train: np.ndarray
  x_test: np.ndarray
  y_test: np.ndarray
  num_classes: Optional[int] = None
  domain_train: Optional[np.ndarray] = None
  domain_test: Optional[np.ndarray] = None
  domain_names: tuple[str, ...] = ()
  client_train: Optional[np.ndarray] = None
  client_test: Optional[np.ndarray] = None
  client_names: tuple[str, ...] = ()
  scaling: Optional[Scaling] = None
  class_names: tuple[str, ...] = ()
  divisor: Optional[float] = 1
  image_size: Optional[tuple[int, int]] = None
  table: Optional[table_encoding.TableEncoding] = None
  # After the construction, it is never None.
  task: str = None  # type: ignore[assignment]

  def __post_init__(self) -> None:
    checks.check_type('name', self.name, str, 'be the name of the dataset')
    source = _source(self.name)
    if self.num_classes is not None:
      value_types.POSITIVE_INTEGER.check('num_classes', self.num_classes)
    labels.check_task(self.task)
    given = arrays.Arrays(
        *(
            arrays.to_array(source, name, getattr(self, name))
            for name in arrays.Arrays._fields
        )
    )
    task = self.task or labels.find_task(
        source, given.y_train, self.num_classes
    )
    labels.check_headers(
        source, task, *map(arrays.Header.of, given), needs_test=False
    )
    form = label_forms.FORMS[task]
    y_train, y_test = (
        form.convert(source, name, y, self.num_classes)
        for name, y in (('y_train', given.y_train), ('y_test', given.y_test))
    )
    if self.num_classes is None:
      num_classes = form.count_classes(source, y_train, y_test, is_part=False)
    else:
      form.check_num_classes(source, self.num_classes, y_train)
      num_classes = int(self.num_classes)
    x_train, x_test = arrays.convert_samples(
        source, given.x_train, given.x_test
    )
    converted: dict[str, Any] = dict(
        task=task,
        num_classes=num_classes,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        class_names=check_class_names(
            source, self.class_names, num_classes or 0
        ),
    )
    for group in ('domain', 'client'):
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
  def input_shape(self) -> tuple[int, ...]:
    """The shape of one sample."""
    return self.x_train.shape[1:]

  @property
  def num_outputs(self) -> int:
    """The number of outputs of a model, for each pixel of a segmentation.

    It is the number of classes, 1 for binary labels, the number of labels of a
    multi-label task, or the number of targets of a regression.
    """
    form = label_forms.FORMS[self.task]
    return form.num_outputs(self.num_classes, self.y_train)

  @property
  def has_classes(self) -> bool:
    """Whether each sample has exactly one class."""
    return tasks.has_sample_classes(self.task)

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

  def with_task(self, task: str, *, is_part: bool = False) -> 'Dataset':
    """Returns the dataset with its labels read as the labels of another task.

    The labels decide the number of classes. A regression has no class names.

    Args:
      task: A key of `tff_bn.catalog.tasks.TASKS`.
      is_part: Whether `y_train` may lack classes, see `create_dataset`.

    Raises:
      ValueError: If the task is unknown or does not fit the labels.
    """
    labels.check_task(task)
    if task == self.task:
      return self
    source = _source(self.name)
    headers = [
        arrays.Header.of(getattr(self, name)) for name in arrays.Arrays._fields
    ]
    labels.check_headers(source, task, *headers, needs_test=False)
    return dataclasses.replace(
        self,
        task=task,
        num_classes=labels.count_classes(
            source, task, self.y_train, self.y_test, is_part=is_part
        ),
        class_names=() if task == tasks.REGRESSION else self.class_names,
    )

  def with_training_samples(self, indices: np.ndarray) -> 'Dataset':
    """Returns the dataset with the training samples at these positions."""
    parts = {
        name: getattr(self, name)
        for name in ('x_train', 'y_train', 'domain_train', 'client_train')
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
    if self.table is not None:
      digest.update(f'table {self.table.to_json()}'.encode())
    if self.class_names:
      digest.update(f'classes {list(self.class_names)}'.encode())
    if self.task != tasks.CLASSIFICATION:
      digest.update(f'task {self.task}'.encode())
    return digest.hexdigest()


def create_dataset(
    name: str,
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    num_classes: Optional[int] = None,
    *,
    task: Optional[str] = None,
    is_part: bool = False,
    is_series: bool = False,
    **attributes: Any,
) -> Dataset:
  """Builds the `Dataset` that a file or a generator contains.

  Training and test data are needed.

  Args:
    name: The dataset's name for `load_dataset`, which errors name.
    x_train: Training samples, see `Dataset`.
    y_train: Their labels.
    x_test: Test samples, like `x_train`.
    y_test: Their labels.
    num_classes: The number of classes. Default: 1 more than the largest label
      in `y_train`; see `Dataset` for tasks other than classification.
    task: What a model learns from the labels, see `Dataset`.
    is_part: Whether the training samples may lack classes, because the dataset
      is a domain of another one, or is for a model that is trained already.
    is_series: Whether samples of shape `[n, a, b]` are series `[n, steps,
      features]`. Default: they are images `[n, height, width]`, which get an
      axis of one channel.
    **attributes: Further attributes of `Dataset`, such as those about domains
      and natural clients.

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
  labels.check_task(task)
  task = task or labels.find_task(source, y_train, num_classes)
  labels.check_headers(source, task, *map(arrays.Header.of, given))
  _warn_of_channels_first(source, x_train.shape[1:])
  if num_classes is None:
    num_classes = labels.count_classes(
        source, task, y_train, y_test, is_part=is_part
    )
  elif num_classes < 2 and tasks.has_sample_classes(task) and not is_part:
    raise ValueError(
        f'{source} has a single class; a classifier needs at least two.'
    )
  return Dataset(name, *given, num_classes, task=task, **attributes)


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
