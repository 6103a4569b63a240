"""Labels of each task: how they are checked, stored and counted.

`FORMS` has one entry for each task of `tff_bn.catalog.tasks`. `check_headers`
needs no values, so a reader can refuse a file before it unpacks it.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
import math
from typing import TYPE_CHECKING, Optional

from absl import logging
import numpy as np

from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.data import arrays
from tff_bn.imports import lazy

if TYPE_CHECKING:
  import tensorflow as tf

  from tff_bn.data import dataset as dataset_lib
else:
  # Datasets are loaded and checked without TensorFlow.
  tf = lazy.Module('tensorflow')

_MAX_LABEL = np.iinfo(np.int32).max
# The number of bins in which targets of a regression are counted.
NUM_BINS = 10
_MAX_DIGITS = 17

_ARGMAX = ' For one-hot vectors, this is np.argmax({name}, axis=1).'


class LabelForm(abc.ABC):
  """The form of the labels of a task.

  Attributes:
    needs: What labels must be, for errors.
    dtype: The dtype in which they are stored.
  """

  needs: str
  dtype: type = np.int32

  @abc.abstractmethod
  def fits(
      self, label_shape: tuple[int, ...], input_shape: tuple[int, ...]
  ) -> bool:
    """Whether labels and samples can have these shapes, without the batch."""

  @abc.abstractmethod
  def stored_shape(
      self, input_shape: tuple[int, ...], num_outputs: int
  ) -> tuple[int, ...]:
    """Returns the shape in which the label of one sample is stored."""

  @abc.abstractmethod
  def convert(
      self, source: str, name: str, y: np.ndarray, num_classes: Optional[int]
  ) -> np.ndarray:
    """Returns labels in the stored form.

    Args:
      source: The beginning of errors, which names the dataset.
      name: The name of the array.
      y: Labels whose header was checked.
      num_classes: The number of classes. None: any.

    Raises:
      ValueError: If a value is not a label.
    """

  @abc.abstractmethod
  def count_classes(
      self, source: str, train: np.ndarray, test: np.ndarray, *, is_part: bool
  ) -> Optional[int]:
    """Returns the number of classes; see the function `count_classes`.

    The labels are in the stored form.
    """

  def check_num_classes(
      self, source: str, num_classes: int, train: np.ndarray
  ) -> None:
    """Raises a `ValueError` if stored labels can't have so many classes."""
    del source, num_classes, train  # Labels were checked against any number.

  def num_outputs(self, num_classes: Optional[int], train: np.ndarray) -> int:
    """Returns the number of outputs of a model, for each pixel if any."""
    del train  # Unused.
    assert num_classes is not None
    return num_classes

  @abc.abstractmethod
  def tally(self, y: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Counts stored labels.

    Args:
      y: The labels.
      bins: What `bins` returned for the whole training data.
    """

  def bins(self, num_classes: Optional[int], train: np.ndarray) -> np.ndarray:
    """Returns what is counted: the classes, or the edges of bins."""
    del train  # Unused.
    assert num_classes is not None
    return np.arange(num_classes)


class _Classes(LabelForm):
  """One class for each sample, int32 `[n]`."""

  needs = '[samples] or [samples, 1], one label for each sample'

  def fits(self, label_shape, input_shape):
    """See the base class."""
    del input_shape  # Any.
    return label_shape in ((), (1,))

  def stored_shape(self, input_shape, num_outputs):
    """See the base class."""
    return ()

  def convert(self, source, name, y, num_classes):
    """See the base class."""
    return _to_classes(source, name, _flat(y), num_classes)

  def count_classes(self, source, train, test, *, is_part):
    """See the base class."""
    return _count_classes(source, train, test, is_part=is_part)

  def tally(self, y, bins):
    """See the base class."""
    return np.bincount(y.reshape(-1), minlength=len(bins))


class _Binary(_Classes):
  """0 or 1 for each sample, int32 `[n]`."""

  needs = '[samples] or [samples, 1], 0 or 1 for each sample'

  def convert(self, source, name, y, num_classes):
    """See the base class."""
    return _to_zeros_and_ones(source, name, _flat(y), tasks.BINARY)

  def count_classes(self, source, train, test, *, is_part):
    """See the base class."""
    if not is_part:
      _count_classes(source, train, test, is_part=False)
    return 2

  def check_num_classes(self, source, num_classes, train):
    """See the base class."""
    if num_classes != 2:
      raise ValueError(
          f'{source}: num_classes={num_classes}, but task={tasks.BINARY} has 2'
          ' classes, 0 and 1.'
      )

  def num_outputs(self, num_classes, train):
    """See the base class."""
    return 1


class _Multilabel(LabelForm):
  """0 or 1 for each label of each sample, int32 `[n, labels]`."""

  needs = '[samples, labels], 0 or 1 for each label of each sample'

  def fits(self, label_shape, input_shape):
    """See the base class."""
    del input_shape  # Any.
    return len(label_shape) == 1 and label_shape[0] > 0

  def stored_shape(self, input_shape, num_outputs):
    """See the base class."""
    return (num_outputs,)

  def convert(self, source, name, y, num_classes):
    """See the base class."""
    return _to_zeros_and_ones(source, name, y, tasks.MULTILABEL)

  def count_classes(self, source, train, test, *, is_part):
    """See the base class."""
    shares = train.mean(axis=0)
    constant = np.flatnonzero((shares == 0) | (shares == 1))
    if constant.size and not is_part:
      logging.warning(
          '%s: all samples of y_train have the same value for the labels %s, so'
          ' that a model cannot learn them.',
          source,
          arrays.enumerate_labels(constant),
      )
    return train.shape[1]

  def check_num_classes(self, source, num_classes, train):
    """See the base class."""
    if num_classes != train.shape[1]:
      raise ValueError(
          f'{source}: num_classes={num_classes}, but y_train has the shape'
          f' {train.shape}, which is {train.shape[1]} labels for each sample.'
      )

  def tally(self, y, bins):
    """See the base class."""
    return y.sum(axis=0, dtype=np.int64)


class _Regression(LabelForm):
  """Numbers for each sample, float32 `[n, targets]`."""

  needs = '[samples] or [samples, targets], numbers to predict'
  dtype = np.float32

  def fits(self, label_shape, input_shape):
    """See the base class."""
    del input_shape  # Any.
    return not label_shape or (len(label_shape) == 1 and label_shape[0] > 0)

  def stored_shape(self, input_shape, num_outputs):
    """See the base class."""
    return (num_outputs,)

  def convert(self, source, name, y, num_classes):
    """See the base class."""
    y = y[:, np.newaxis] if y.ndim == 1 else y
    return arrays.to_float32(source, name, y)

  def count_classes(self, source, train, test, *, is_part):
    """See the base class."""
    return None

  def check_num_classes(self, source, num_classes, train):
    """See the base class."""
    raise ValueError(
        f'{source}: num_classes={num_classes}, but task={tasks.REGRESSION} has'
        ' no classes; leave num_classes out.'
    )

  def num_outputs(self, num_classes, train):
    """See the base class."""
    return train.shape[1]

  def tally(self, y, bins):
    """See the base class."""
    return np.histogram(y[:, 0].astype(np.float64), bins)[0]

  def bins(self, num_classes, train):
    """See the base class."""
    return np.histogram_bin_edges(train[:, 0].astype(np.float64), NUM_BINS)


class _Segmentation(LabelForm):
  """One class for each pixel, int32 `[n, height, width]`."""

  needs = (
      '[samples, height, width] or [samples, height, width, 1], one class for'
      ' each pixel of the images'
  )

  def fits(self, label_shape, input_shape):
    """See the base class."""
    is_image = len(input_shape) == 3
    masks = (input_shape[:2], (*input_shape[:2], 1))
    return is_image and tuple(label_shape) in masks

  def stored_shape(self, input_shape, num_outputs):
    """See the base class."""
    return tuple(input_shape[:2])

  def convert(self, source, name, y, num_classes):
    """See the base class."""
    masks = y[..., 0] if y.ndim == 4 else y
    return _to_classes(source, name, masks, num_classes)

  def count_classes(self, source, train, test, *, is_part):
    """See the base class."""
    return _count_classes(source, train, test, is_part=is_part)

  def tally(self, y, bins):
    """See the base class."""
    return np.bincount(y.reshape(-1), minlength=len(bins))


FORMS: dict[str, LabelForm] = {
    tasks.CLASSIFICATION: _Classes(),
    tasks.BINARY: _Binary(),
    tasks.MULTILABEL: _Multilabel(),
    tasks.REGRESSION: _Regression(),
    tasks.SEGMENTATION: _Segmentation(),
}


def label_spec(
    task: str, input_shape: tuple[int, ...], num_outputs: int
) -> tf.TensorSpec:
  """Returns the type of the labels of a batch.

  Args:
    task: A key of `tff_bn.catalog.tasks.TASKS`.
    input_shape: The shape of one sample.
    num_outputs: The number of outputs of a model: labels of a multi-label task,
      targets of a regression. The other tasks' labels do not depend on it.

  Returns:
    int32 `[None]` for classes and binary labels, int32 `[None, num_outputs]`
    for several labels, float32 `[None, num_outputs]` for a regression, and
    int32 `[None, height, width]` for a segmentation.
  """
  form = FORMS[task]
  shape = form.stored_shape(input_shape, num_outputs)
  return tf.TensorSpec((None, *shape), tf.as_dtype(form.dtype))


def check_task(task: Optional[str]) -> None:
  """Raises a `ValueError` if a task is given and unknown."""
  if task is not None:
    value_types.Choice(tasks.TASKS).check('task', task)


def task_of_header(
    source: str, y_train: arrays.Header, num_classes: Optional[int] = None
) -> str:
  """Finds the task from the dtype and the shape of labels.

  Args:
    source: The beginning of errors, which names the dataset.
    y_train: The header of the training labels.
    num_classes: The number of classes, if it was given. Then one label for each
      sample is its class, whatever its dtype is.

  Returns:
    A key of `tff_bn.catalog.tasks.TASKS`.

  Raises:
    ValueError: If no task has such labels.
  """
  _check_numbers(source, 'y_train', y_train)
  shape = y_train.shape[1:]
  if num_classes is not None and FORMS[tasks.CLASSIFICATION].fits(shape, ()):
    return tasks.CLASSIFICATION
  try:
    return tasks.task_of_labels(y_train.dtype.kind, shape)
  except ValueError as error:
    advice = ''
    if y_train.dtype.kind == 'f' and len(shape) > 1:
      advice = (
          ' Masks of a segmentation must be integers, for example'
          ' y_train.astype(np.int32).'
      )
    raise ValueError(f'{source}: the labels y_train {error}{advice}') from error


def find_task(
    source: str, y_train: np.ndarray, num_classes: Optional[int] = None
) -> str:
  """Finds the task from labels, see `task_of_header`.

  Raises:
    ValueError: If no task has such labels, or if several tasks could be meant:
      for one-hot vectors, for probabilities, and for floats that are all 0 or
      1 in several columns.
  """
  task = task_of_header(source, arrays.Header.of(y_train), num_classes)
  if y_train.ndim == 2 and y_train.shape[1] > 1 and len(y_train):
    _check_columns(source, y_train)
  return task


def check_headers(
    source: str,
    task: str,
    x_train: arrays.Header,
    y_train: arrays.Header,
    x_test: arrays.Header,
    y_test: arrays.Header,
    *,
    needs_test: bool = True,
) -> None:
  """Checks everything that dtypes and shapes of a dataset tell.

  `source` begins the errors. Without `needs_test`, there may be no test data.

  Raises:
    ValueError: If the arrays form no dataset of the task.
  """
  arrays.check_sample_headers(source, x_train, x_test, needs_test=needs_test)
  for split, x, y in (('train', x_train, y_train), ('test', x_test, y_test)):
    _check_header(source, f'y_{split}', y, task, x.shape[1:])
    if y.shape[0] != x.shape[0]:
      raise ValueError(
          f'{source}: x_{split} has {x.shape[0]} samples but y_{split} has'
          f' {y.shape[0]} labels; give one label for each sample.'
      )
  widths = [math.prod(y.shape[1:]) for y in (y_train, y_test)]
  if widths[0] != widths[1]:
    raise ValueError(
        f'{source}: y_train has {widths[0]} columns but y_test has {widths[1]};'
        f' with task={task}, both need the same columns.'
    )


def count_classes(
    source: str,
    task: str,
    y_train: np.ndarray,
    y_test: np.ndarray,
    *,
    is_part: bool = False,
) -> Optional[int]:
  """Returns the number of classes of labels; warns of classes without a label.

  Args:
    source: The beginning of errors, which names the dataset.
    task: A key of `tff_bn.catalog.tasks.TASKS`.
    y_train: The training labels, in any form that the task allows.
    y_test: The test labels.
    is_part: Whether the training labels may lack classes. Then there are no
      warnings.

  Returns:
    1 more than the largest label for classes of samples or pixels, 2 for binary
    labels, the number of labels of a multi-label task, and None for a
    regression.

  Raises:
    ValueError: If they are no labels. Unless `is_part` is true, also if there
      are fewer than two classes, or a test sample has a label that no training
      sample has.
  """
  form = FORMS[task]
  train, test = (
      form.convert(source, name, y, None)
      for name, y in (('y_train', y_train), ('y_test', y_test))
  )
  return form.count_classes(source, train, test, is_part=is_part)


def label_counts(
    dataset: dataset_lib.Dataset, parts: Iterable[np.ndarray]
) -> np.ndarray:
  """Counts the labels of the training samples of each part.

  Args:
    dataset: The dataset.
    parts: The positions of each part's samples in the training data.

  Returns:
    Integers of shape `[num_parts, num_columns]`: the samples of each class; for
    a multi-label task, the samples that have each label; for a segmentation,
    the pixels of each class; for a regression, the samples whose first target
    is in each of `NUM_BINS` bins of equal width, which cover the targets of the
    whole training data.
  """
  form = FORMS[dataset.task]
  bins = form.bins(dataset.num_classes, dataset.y_train)
  return np.stack(
      [form.tally(dataset.y_train[indices], bins) for indices in parts]
  )


def column_names(dataset: dataset_lib.Dataset) -> tuple[str, ...]:
  """Returns the names of the columns of `label_counts`.

  They are the names or numbers of the classes, or the ranges of the bins, such
  as '0.5 to 1'.
  """
  bins = FORMS[dataset.task].bins(dataset.num_classes, dataset.y_train)
  if dataset.num_classes is not None:
    return dataset.class_names or tuple(map(str, bins))
  edges: list[str] = []
  # Neighbours need different names.
  for digits in range(3, _MAX_DIGITS + 1):
    edges = [f'{edge:.{digits}g}' for edge in bins]
    if len(set(edges)) == len(edges):
      break
  return tuple(f'{low} to {high}' for low, high in zip(edges, edges[1:]))


def present(labels: np.ndarray) -> np.ndarray:
  """Returns the labels that occur, in their order."""
  # Sorting the pixels of all masks at once would take as much memory again.
  found = [np.unique(labels[rows]) for rows in arrays.chunks(labels)]
  return np.unique(np.concatenate([labels[:0].reshape(-1), *found]))


def _check_numbers(source: str, name: str, y: arrays.Header) -> None:
  """Checks that labels are numbers, one entry for each sample."""
  if y.dtype.kind not in arrays.NUMBERS:
    raise ValueError(
        f'{source}: {name} has the dtype {y.dtype}; labels must be numbers,'
        ' such as integers from 0, one for each sample.'
        f' np.searchsorted(np.unique(y_train), {name}) numbers the classes.'
    )
  if not y.shape:
    raise ValueError(
        f'{source}: {name} has the shape (); it must be [samples], one label'
        ' for each sample.'
    )


def _check_header(
    source: str,
    name: str,
    y: arrays.Header,
    task: str,
    input_shape: tuple[int, ...],
) -> None:
  """Checks that labels have a form of a task."""
  _check_numbers(source, name, y)
  form, shape = FORMS[task], y.shape[1:]
  if form.fits(shape, input_shape):
    return
  advice = ''
  if tasks.has_sample_classes(task) and len(shape) == 1:
    advice = _ARGMAX.format(name=name)
  fitting = [other for other in FORMS if FORMS[other].fits(shape, input_shape)]
  if fitting:
    advice += f' Such labels fit task={" or task=".join(fitting)}.'
  raise ValueError(
      f'{source}: {name} has the dtype {y.dtype} and the shape {y.shape}; with'
      f' task={task} and samples of shape {input_shape}, it must be'
      f' {form.needs}.{advice}'
  )


def _flat(y: np.ndarray) -> np.ndarray:
  """Returns labels `[n]` or `[n, 1]` as `[n]`."""
  return y[:, 0] if y.ndim == 2 else y


def _check_columns(source: str, y: np.ndarray) -> None:
  """Raises a `ValueError` if labels of several columns may be classes."""
  has_zeros_and_ones, is_one_hot = True, True
  is_distribution = y.dtype.kind == 'f'
  for rows in arrays.chunks(y):
    part = y[rows]
    has_zeros_and_ones &= bool(((part == 0) | (part == 1)).all())
    is_one_hot &= bool((np.count_nonzero(part, axis=1) == 1).all())
    is_distribution = (
        is_distribution
        and bool((part >= 0).all())
        and np.allclose(part.sum(axis=1), 1, atol=1e-3)
    )
    if not has_zeros_and_ones and not is_distribution:
      return
  columns = f'{source}: y_train has the dtype {y.dtype} and the shape {y.shape}'
  argmax = 'np.argmax(y_train, axis=1)'
  if has_zeros_and_ones and is_one_hot:
    raise ValueError(
        f'{columns} with a single 1 in each row. If these are one-hot vectors'
        f' of classes, use {argmax}. If they are labels of which a sample may'
        f' have several, choose task={tasks.MULTILABEL}.'
    )
  if has_zeros_and_ones and y.dtype.kind == 'f':
    raise ValueError(
        f'{columns} and only the values 0 and 1. If these are labels, choose'
        f' task={tasks.MULTILABEL}; if they are numbers to predict, choose'
        f' task={tasks.REGRESSION}.'
    )
  if is_distribution:
    raise ValueError(
        f'{columns}, and the numbers of each row are shares with the sum 1. If'
        ' these are probabilities of classes (soft labels), use'
        f' {argmax}, the most probable class. If they are numbers to predict,'
        f' choose task={tasks.REGRESSION}.'
    )


def _check_whole(source: str, name: str, y: np.ndarray) -> None:
  """Checks that labels are whole numbers."""
  if y.dtype.kind != 'f':
    return
  for rows in arrays.chunks(y):
    part = y[rows]
    wrong = part[~np.isfinite(part) | (part != np.rint(part))]
    if wrong.size:
      raise ValueError(
          f'{source}: {name} has the label {wrong[0]:g}; classes must be whole'
          f' numbers. To predict numbers, choose task={tasks.REGRESSION}.'
      )


def _to_classes(
    source: str, name: str, y: np.ndarray, num_classes: Optional[int]
) -> np.ndarray:
  """Checks labels that are classes, and returns them as int32."""
  if not y.size:
    return y.astype(np.int32)
  _check_whole(source, name, y)
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
  if num_classes is not None and high >= num_classes:
    found = present(labels)
    raise ValueError(
        f'{source}: {name} has labels outside the {num_classes} classes'
        f' 0..{num_classes - 1}:'
        f' {arrays.enumerate_labels(found[found >= num_classes])}.'
    )
  return labels


def _to_zeros_and_ones(
    source: str, name: str, y: np.ndarray, task: str
) -> np.ndarray:
  """Checks labels that are 0 or 1, and returns them as int32."""
  for rows in arrays.chunks(y):
    part = y[rows]
    wrong = part[(part != 0) & (part != 1)]
    if wrong.size:
      raise ValueError(
          f'{source}: {name} has the dtype {y.dtype}, the shape {y.shape} and'
          f' the value {wrong[0]:g}; with task={task}, labels must be 0 or 1.'
      )
  return y.astype(np.int32, copy=False)


def _count_classes(
    source: str, train: np.ndarray, test: np.ndarray, *, is_part: bool
) -> int:
  """Returns the number of classes; warns of classes without a label."""
  if is_part:
    return 1 + max(int(y.max()) for y in (train, test) if y.size)
  trained = present(train)
  num_classes = int(trained[-1]) + 1
  if len(trained) < 2:
    raise ValueError(
        f'{source}: y_train has the label {trained[0]} only; a classifier needs'
        ' at least two classes.'
    )
  advice = (
      f'number the classes from 0 to {len(trained) - 1}, for example by'
      ' np.unique(y_train, return_inverse=True)'
  )
  if num_classes > train.size:
    raise ValueError(
        f'{source}: y_train has {len(trained)} different labels from'
        f' {trained[0]} to {trained[-1]}, which makes {num_classes} classes for'
        f' {train.size} samples; {advice}.'
    )
  missing = np.setdiff1d(np.arange(num_classes), trained)
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
  unknown = np.setdiff1d(present(test), trained)
  if unknown.size:
    raise ValueError(
        f'{source}: y_test has labels that do not occur in y_train:'
        f' {arrays.enumerate_labels(unknown)}; remove these samples from the'
        ' test data or add such samples to the training data.'
    )
  return num_classes
