"""Losses and metrics by name, for a task.

`tff_bn.catalog.tasks` says which there are.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, Optional

import keras
import numpy as np
from numpy import typing as npt

from tff_bn.catalog import tasks
from tff_bn.common import user_functions


def loss_fn(
    task: str, loss: Optional[str] = None
) -> Callable[[], keras.losses.Loss]:
  """Returns a function that builds the loss, for a `BatchNormModel`.

  Args:
    task: A key of `tff_bn.catalog.tasks.TASKS`.
    loss: A name of `tff_bn.catalog.tasks.LOSSES`, or `package.module:NAME` of a
      function without arguments. Default: the loss of the task.

  Raises:
    ValueError: If the loss is for other tasks, or a user's function returns no
      Keras loss.
  """
  tasks.check(task, loss)
  build = tasks.loss_of(task, loss).load()
  _check_type('loss', loss, lambda: build(task), keras.losses.Loss)
  return lambda: build(task)


def metrics_fn(
    task: str, num_outputs: int, metrics: Optional[Sequence[str]] = None
) -> Callable[[], list[keras.metrics.Metric]]:
  """Returns a function that builds the metrics, for a `BatchNormModel`.

  Args:
    task: A key of `tff_bn.catalog.tasks.TASKS`.
    num_outputs: The number of outputs: classes, labels or targets; 1 for a
      binary task.
    metrics: Names of `tff_bn.catalog.tasks.METRICS`, or `package.module:NAME`
      of functions without arguments. Default: the metrics of the task.

  Raises:
    ValueError: If a metric is for other tasks or more outputs, or a user's
      function returns no Keras metric.
  """
  tasks.check(task, metrics=metrics, num_outputs=num_outputs)
  builders = []
  for metric in tasks.metrics_of(task, metrics):
    build = metric.load()
    _check_type(
        'metrics',
        metric.name,
        functools.partial(build, task, num_outputs),
        keras.metrics.Metric,
    )
    builders.append(build)
  return lambda: [build(task, num_outputs) for build in builders]


def _check_type(
    option: str, name: Optional[str], build: Callable[[], Any], expected: type
) -> None:
  """Raises a `ValueError` unless a user's function builds such an object."""
  if name is None or ':' not in name:
    return
  built = user_functions.call(f'{option}={name}', build)
  if not isinstance(built, expected):
    raise ValueError(
        f'{option}={name} must return a Keras {expected.__name__.lower()}, but'
        f' returns a {type(built).__name__}.'
    )


def balanced_weights(counts: npt.ArrayLike) -> Mapping[int, float]:
  """Returns weights with which all classes that occur count alike.

  The weight of a class is n / (k * c), given n labels, k classes that occur and
  c labels of this class, as scikit-learn's `compute_class_weight` computes it.
  A class that does not occur has the weight 1.

  Args:
    counts: The number of labels of each class, see
      `tff_bn.data.FederatedData.class_counts`.
  """
  counts = np.asarray(counts)
  num_present = np.count_nonzero(counts)
  return {
      label: float(counts.sum() / (num_present * count)) if count else 1.0
      for label, count in enumerate(counts.tolist())
  }
