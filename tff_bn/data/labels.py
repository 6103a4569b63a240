"""Checks of labels, and the task that they are for.

`check_headers` needs no values, so a reader can refuse a file before it unpacks
it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Optional

import numpy as np

from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.data import arrays
from tff_bn.data.label_forms import FORMS
from tff_bn.imports import lazy

if TYPE_CHECKING:
  import tensorflow as tf
else:
  # Datasets are loaded and checked without TensorFlow.
  tf = lazy.Module('tensorflow')

_ARGMAX = ' For one-hot vectors, this is np.argmax({name}, axis=1).'


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
