"""Counts of labels, for tables and charts of the clients' data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from tff_bn.catalog import tasks

if TYPE_CHECKING:
  from tff_bn.data import dataset as dataset_lib

# The number of bins in which targets of a regression are counted.
_NUM_BINS = 10
_MAX_DIGITS = 17


def count(
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
    is in each of 10 bins of equal width, which cover the targets of the
    whole training data.
  """
  bins = _bins(dataset)
  return np.stack(
      [_tally(dataset.task, dataset.y_train[part], bins) for part in parts]
  )


def column_names(dataset: dataset_lib.Dataset) -> tuple[str, ...]:
  """Returns the names of the columns of `count`.

  They are the names or numbers of the classes, or the ranges of the bins, such
  as '0.5 to 1'.
  """
  bins = _bins(dataset)
  if dataset.num_classes is not None:
    return dataset.class_names or tuple(map(str, bins))
  edges: list[str] = []
  # Neighbours need different names.
  for digits in range(3, _MAX_DIGITS + 1):
    edges = [f'{edge:.{digits}g}' for edge in bins]
    if len(set(edges)) == len(edges):
      break
  return tuple(f'{low} to {high}' for low, high in zip(edges, edges[1:]))


def _bins(dataset: dataset_lib.Dataset) -> np.ndarray:
  """Returns what is counted: the classes, or the edges of bins."""
  if dataset.num_classes is not None:
    return np.arange(dataset.num_classes)
  return np.histogram_bin_edges(
      dataset.y_train[:, 0].astype(np.float64), _NUM_BINS
  )


def _tally(task: str, y: np.ndarray, bins: np.ndarray) -> np.ndarray:
  """Counts stored labels, given the `_bins` of the whole training data."""
  match task:
    case tasks.MULTILABEL:
      return y.sum(axis=0, dtype=np.int64)
    case tasks.REGRESSION:
      return np.histogram(y[:, 0].astype(np.float64), bins)[0]
    case _:
      return np.bincount(y.reshape(-1), minlength=len(bins))
