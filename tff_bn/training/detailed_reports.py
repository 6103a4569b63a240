"""Metrics of each class, label or target, given labels and a model's outputs.

The functions know nothing of files, models and clients. The numbers of several
batches are the numbers of all their examples, not means over the batches.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, Optional

import numpy as np
from numpy import typing as npt

from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data.label_forms import FORMS

# As in Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
CALIBRATION_BINS = 15
_SOURCE = 'detailed_report'


@dataclasses.dataclass(frozen=True, eq=False)
class DetailedReport:
  """Metrics of each class, label or target.

  Attributes:
    task: The task, a key of `tff_bn.catalog.tasks.TASKS`.
    num_examples: The number of examples.
    class_names: The names of the classes, labels or targets.
    metrics: The metrics by name, with a number for each class, label or target.
      NaN: it is undefined.
    confusion: Classification, binary and segmentation: the number of examples,
      or pixels, of each true class (rows) and predicted class (columns).
    unpredicted: Where there is `confusion`: the number of examples, or pixels,
      of each class without a predicted class, because an output is NaN.
    calibration_error: Classification, binary and multi-label: see
      `calibration_error`. NaN: it is undefined.
  """

  task: str
  num_examples: int
  class_names: tuple[str, ...]
  metrics: Mapping[str, np.ndarray]
  confusion: Optional[np.ndarray] = None
  unpredicted: Optional[np.ndarray] = None
  calibration_error: Optional[float] = None


def detailed_report(
    task: str,
    labels: npt.ArrayLike,
    outputs: npt.ArrayLike,
    class_names: Sequence[str] = (),
) -> DetailedReport:
  """Computes the metrics of each class, label or target.

  A number is NaN if it is undefined: a precision without predictions of the
  class, a recall without examples of it, an F1 score or Dice with neither, an
  AUC without positive or without negative examples, and an R² of fewer than two
  examples or of equal targets. So is an AUC, a calibration error, or a number
  of a target that needs an output that is not finite. An example with an output
  NaN has no predicted class and counts as missed: it lowers the recall.

  The metrics of each task are:

  *   Classification and binary: `num_examples` of the class, `precision`,
      `recall`, `f1`, and `auc`, of this class against the others.
  *   Multi-label: the same of the label, and `true_positives`,
      `false_positives`, `false_negatives`, `true_negatives`.
  *   Segmentation: `num_pixels` of the class, `dice`, `precision`, `recall`.
  *   Regression: `num_examples`, `mae`, `rmse`, `r2`.

  Args:
    task: A key of `tff_bn.catalog.tasks.TASKS`.
    labels: Labels in a form that the task allows.
    outputs: The model's outputs for them, logits except for a regression:
      `[n, classes]`, `[n, labels]`, `[n, targets]`, `[n, height, width,
      classes]`, and `[n, 1]` or `[n]` for binary labels or a single target.
    class_names: The names of the classes, labels or targets. Default: the
      numbers of the classes or labels, see `target_names` for targets.

  Returns:
    The report.

  Raises:
    TypeError: If a name is no string.
    ValueError: If the arguments do not fit each other.
  """
  value_types.Choice(tasks.TASKS).check('task', task)
  y, z = _checked(task, np.asarray(labels), np.asarray(outputs))
  num_classes = 2 if task == tasks.BINARY else z.shape[-1]
  names = dataset_lib.check_class_names(_SOURCE, class_names, num_classes)
  return report_of_batches(
      task, [(y, z)], names or default_names(task, num_classes)
  )


def report_of_batches(
    task: str,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    class_names: Sequence[str],
) -> DetailedReport:
  """Computes `detailed_report` from batches of labels and outputs.

  Of a segmentation, only one batch is in memory at a time.

  Args:
    task: A key of `tff_bn.catalog.tasks.TASKS`.
    batches: Labels as datasets store them, see `tff_bn.data.labels`, and
      outputs as in `detailed_report`. There may be none.
    class_names: The names of the classes, labels or targets.
  """
  names = tuple(class_names)
  if task == tasks.SEGMENTATION:
    return _of_pixels(batches, names)
  num_outputs = 1 if task == tasks.BINARY else len(names)
  # Without batches, arrays of the right shape.
  shape = () if tasks.has_sample_classes(task) else (num_outputs,)
  all_labels = [np.zeros((0, *shape), FORMS[task].dtype)]
  all_outputs = [np.zeros((0, num_outputs))]
  for labels, outputs in batches:
    all_labels.append(np.asarray(labels))
    all_outputs.append(np.asarray(outputs))
  y, z = np.concatenate(all_labels), np.concatenate(all_outputs)
  match task:
    case tasks.REGRESSION:
      return _of_targets(y.astype(np.float64), z, names)
    case tasks.MULTILABEL:
      return _of_labels(y > 0, z, names)
    case tasks.BINARY:
      return _of_binary(y, z[:, 0], names)
    case _:
      return _of_classes(y, z, names)


def default_names(task: str, number: int) -> tuple[str, ...]:
  """Returns names for a number of classes, labels or targets without names.

  Classes and labels have numbers from 0. A single target is `target`, several
  are `target_1`, `target_2`, ….
  """
  if task != tasks.REGRESSION:
    return classes.numbers(number)
  if number == 1:
    return ('target',)
  return tuple(f'target_{n + 1}' for n in range(number))


def _checked(
    task: str, labels: np.ndarray, outputs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns labels as datasets store them, and outputs with their last axis."""
  if outputs.ndim == 1 and task in (tasks.BINARY, tasks.REGRESSION):
    outputs = outputs[:, np.newaxis]
  num_axes = 4 if task == tasks.SEGMENTATION else 2
  smallest, largest = 1, None
  if task in tasks.EXCLUSIVE:
    smallest = 2
  elif task == tasks.BINARY:
    largest = 1
  form = FORMS[task]
  fit = (
      outputs.dtype.kind == 'f'
      and outputs.ndim == num_axes
      and smallest <= outputs.shape[-1] <= (largest or outputs.shape[-1])
      and labels.ndim > 0
      and len(labels) == len(outputs)
      and form.fits(labels.shape[1:], outputs.shape[1:])
  )
  y = labels
  if fit:
    num_classes = outputs.shape[-1] if task in tasks.EXCLUSIVE else None
    y = form.convert(_SOURCE, 'labels', labels, num_classes)
    expected = form.stored_shape(outputs.shape[1:], outputs.shape[-1])
    fit = y.shape[1:] == expected
  if not fit:
    raise ValueError(
        f'{_SOURCE}: labels of shape {labels.shape} and outputs of shape'
        f' {outputs.shape} and dtype {outputs.dtype} do not fit'
        f' task={task}: {tasks.TASKS[task].description}.'
    )
  return y, outputs


def _of_classes(
    y: np.ndarray, logits: np.ndarray, names: tuple[str, ...]
) -> DetailedReport:
  """Reports a classification, given a logit for each class."""
  # Imported late: it takes long.
  from scipy import special

  with np.errstate(invalid='ignore'):  # The shares of infinite logits are NaN.
    shares = special.softmax(logits.astype(np.float64), axis=-1)
  return _of_predictions(
      tasks.CLASSIFICATION,
      y,
      _predicted(logits),
      names,
      scores=shares,
      confidences=shares.max(axis=-1),
  )


def _of_binary(
    y: np.ndarray, logits: np.ndarray, names: tuple[str, ...]
) -> DetailedReport:
  """Reports binary labels, given the logit of 1."""
  from scipy import special

  logits = logits.astype(np.float64)
  predicted = np.where(np.isnan(logits), 2, logits > 0)
  return _of_predictions(
      tasks.BINARY,
      y,
      predicted,
      names,
      # Sigmoids would be equal for large logits.
      scores=np.stack([-logits, logits], axis=-1),
      confidences=special.expit(np.abs(logits)),
  )


def _of_predictions(
    task: str,
    y: np.ndarray,
    predicted: np.ndarray,
    names: tuple[str, ...],
    scores: np.ndarray,
    confidences: np.ndarray,
) -> DetailedReport:
  """Reports classes, given scores and the confidences in the predictions."""
  counts = _count(y, predicted, len(names))
  confusion = counts[:, :-1]
  metrics = dict(
      num_examples=counts.sum(axis=1),
      **_scores(np.diag(confusion), confusion.sum(axis=0), counts.sum(axis=1)),
      auc=_aucs(y[:, np.newaxis] == np.arange(len(names)), scores),
  )
  return DetailedReport(
      task,
      len(y),
      names,
      metrics,
      confusion,
      counts[:, -1],
      calibration_error(predicted == y, confidences),
  )


def _of_labels(
    is_yes: np.ndarray, logits: np.ndarray, names: tuple[str, ...]
) -> DetailedReport:
  """Reports a multi-label task, given a logit for each label."""
  from scipy import special

  logits = logits.astype(np.float64)
  # Both are false if the logit is NaN.
  says_yes, says_no = logits > 0, logits <= 0
  true_positives = (is_yes & says_yes).sum(axis=0)
  actual = is_yes.sum(axis=0)
  metrics = dict(
      num_examples=actual,
      **_scores(true_positives, says_yes.sum(axis=0), actual),
      auc=_aucs(is_yes, logits),
      true_positives=true_positives,
      false_positives=(~is_yes & says_yes).sum(axis=0),
      false_negatives=actual - true_positives,
      true_negatives=(~is_yes & says_no).sum(axis=0),
  )
  error = calibration_error(
      (says_yes == is_yes).ravel(), special.expit(np.abs(logits)).ravel()
  )
  return DetailedReport(
      tasks.MULTILABEL, len(is_yes), names, metrics, calibration_error=error
  )


def _of_pixels(
    batches: Iterable[tuple[np.ndarray, np.ndarray]], names: tuple[str, ...]
) -> DetailedReport:
  """Reports a segmentation from the sum of the batches' confusions."""
  num_classes, num_examples = len(names), 0
  counts: np.ndarray = np.zeros((num_classes, num_classes + 1), np.int64)
  for y, logits in batches:
    num_examples += len(y)
    counts += _count(
        np.ravel(y), np.ravel(_predicted(np.asarray(logits))), num_classes
    )
  confusion, actual = counts[:, :-1], counts.sum(axis=1)
  scores = _scores(np.diag(confusion), confusion.sum(axis=0), actual)
  metrics = dict(
      num_pixels=actual,
      dice=scores['f1'],
      precision=scores['precision'],
      recall=scores['recall'],
  )
  return DetailedReport(
      tasks.SEGMENTATION,
      num_examples,
      names,
      metrics,
      confusion,
      counts[:, -1],
  )


def _of_targets(
    y: np.ndarray, outputs: np.ndarray, names: tuple[str, ...]
) -> DetailedReport:
  """Reports a regression."""
  from sklearn import metrics as sklearn_metrics

  outputs = outputs.astype(np.float64)
  found = {name: np.full(len(names), np.nan) for name in ('mae', 'rmse', 'r2')}
  known = np.isfinite(outputs).all(axis=0)
  if len(y) and known.any():
    pair: Any = y[:, known], outputs[:, known]
    found['mae'][known] = sklearn_metrics.mean_absolute_error(
        *pair, multioutput='raw_values'
    )
    found['rmse'][known] = np.sqrt(
        sklearn_metrics.mean_squared_error(*pair, multioutput='raw_values')
    )
    if len(y) > 1:
      # It is not finite if all targets are equal.
      with np.errstate(divide='ignore', invalid='ignore'):
        r2 = sklearn_metrics.r2_score(
            *pair, multioutput='raw_values', force_finite=False
        )
      found['r2'][known] = np.where(np.isfinite(r2), r2, np.nan)
  number = np.full(len(names), len(y))
  return DetailedReport(
      tasks.REGRESSION, len(y), names, dict(num_examples=number, **found)
  )


def _predicted(logits: np.ndarray) -> np.ndarray:
  """Returns the classes with the largest logits; with NaN, their number."""
  return np.where(
      np.isnan(logits).any(axis=-1), logits.shape[-1], logits.argmax(axis=-1)
  )


# scikit-learn's functions for confusions, for these scores, for the AUC and for
# calibration curves take 45 ms for ten classes, however few examples there are.
# There may be 100,000 clients, so the functions below compute the same numbers
# directly.
def _count(
    y: np.ndarray, predicted: np.ndarray, num_classes: int
) -> np.ndarray:
  """Counts the pairs of a true and a predicted class.

  The last of the `num_classes + 1` columns are those without a prediction.
  """
  shape = num_classes, num_classes + 1
  pairs = y.astype(np.int64) * shape[1] + predicted
  return np.bincount(pairs, minlength=shape[0] * shape[1]).reshape(shape)


def _scores(
    common: np.ndarray, predicted: np.ndarray, actual: np.ndarray
) -> dict[str, np.ndarray]:
  """Returns precision, recall and F1 score of each class.

  Args:
    common: The number of examples of the class that are predicted as such.
    predicted: The number of examples that are predicted as such.
    actual: The number of examples of the class.
  """
  with np.errstate(invalid='ignore'):  # 0 / 0 is NaN.
    return dict(
        precision=common / predicted,
        recall=common / actual,
        f1=2 * common / (predicted + actual),
    )


def _aucs(is_positive: np.ndarray, scores: np.ndarray) -> np.ndarray:
  """Returns the area under the ROC curve for each column.

  It is the share of pairs of a positive and a negative example in which the
  positive one has the larger score; equal scores count half.
  """
  found = np.full(scores.shape[1], np.nan)
  num_positive = is_positive.sum(axis=0)
  num_negative = len(scores) - num_positive
  for column in np.flatnonzero(num_positive * num_negative):
    values = scores[:, column]
    if np.isnan(values).any():
      continue
    positive = values[is_positive[:, column]]
    negative = np.sort(values[~is_positive[:, column]])
    smaller = np.searchsorted(negative, positive, 'left')
    not_larger = np.searchsorted(negative, positive, 'right')
    pairs = (smaller.sum() + not_larger.sum()) / 2
    found[column] = pairs / (len(positive) * len(negative))
  return found


def calibration_error(is_right: np.ndarray, confidences: np.ndarray) -> float:
  """Returns the expected calibration error of predictions.

  The confidence of a prediction is the probability that the model gives to the
  class that it predicts: the largest softmax output, or the larger one of p and
  1 - p for a yes or no with the probability p (a multi-label task has such a
  prediction for each label of each example). The interval from 0 to 1 is
  divided into `CALIBRATION_BINS` bins of equal width, as in scikit-learn's
  `calibration_curve(strategy='uniform')`: a confidence on an edge is in the
  lower bin. The error is the mean over the predictions of

      | share of right predictions in the bin - mean confidence in the bin |.

  Args:
    is_right: Whether each prediction is right, `[n]`.
    confidences: The confidence of each prediction, `[n]`.

  Returns:
    The error, from 0 to 1. NaN without predictions, or if a confidence is NaN.
  """
  if not len(confidences) or np.isnan(confidences).any():
    return float('nan')
  edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
  bins = np.searchsorted(edges[1:-1], confidences)
  sizes = np.bincount(bins)
  bins = (np.cumsum(sizes > 0) - 1)[bins]  # Without the empty ones.
  sizes = sizes[sizes > 0]
  shares = np.bincount(bins, weights=is_right) / sizes
  means = np.bincount(bins, weights=confidences) / sizes
  return float(np.average(np.abs(shares - means), weights=sizes))
