"""The forms of the labels of each task: how they are converted and stored.

`FORMS` has one entry for each task of `tff_bn.catalog.tasks`.
"""

import abc
from typing import Optional

from absl import logging
import numpy as np

from tff_bn.catalog import tasks
from tff_bn.data import arrays

_MAX_LABEL = np.iinfo(np.int32).max


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
    """Raises a `ValueError` if stored labels can't have `num_classes`."""
    del source, num_classes, train  # Labels were checked against any number.

  def num_outputs(self, num_classes: Optional[int], train: np.ndarray) -> int:
    """Returns the number of outputs of a model, for each pixel if any."""
    del train  # Unused.
    assert num_classes is not None
    return num_classes


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


FORMS: dict[str, LabelForm] = {
    tasks.CLASSIFICATION: _Classes(),
    tasks.BINARY: _Binary(),
    tasks.MULTILABEL: _Multilabel(),
    tasks.REGRESSION: _Regression(),
    tasks.SEGMENTATION: _Segmentation(),
}


def _flat(y: np.ndarray) -> np.ndarray:
  """Returns labels `[n]` or `[n, 1]` as `[n]`."""
  return y[:, 0] if y.ndim == 2 else y


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
    found = arrays.present(labels)
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
  trained = arrays.present(train)
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
  unknown = np.setdiff1d(arrays.present(test), trained)
  if unknown.size:
    raise ValueError(
        f'{source}: y_test has labels that do not occur in y_train:'
        f' {arrays.enumerate_labels(unknown)}; remove these samples from the'
        ' test data or add such samples to the training data. For amounts, use'
        f' task={tasks.REGRESSION}.'
    )
  return num_classes
