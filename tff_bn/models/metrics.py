"""The metrics of `tff_bn.catalog.tasks.METRICS`, from logits.

Each function gets the task, a key of `tff_bn.catalog.tasks.TASKS`, and the
number of outputs, and returns a new `keras.metrics.Metric`. All variables are
sums over the examples, so a metric of all clients is computed from the sums of
the clients' variables: it is the metric of the union of their data. A metric
that is undefined, such as the AUC without positive examples, is NaN.
"""

from collections.abc import Callable
from typing import Any, Optional

import keras
from keras import ops

from tff_bn.catalog import tasks

_NUM_BUCKETS = 1000
_Score = Callable[[Any, Any, Any], tuple[Any, Any]]


def _weights_like(y: Any, sample_weight: Optional[Any]) -> Any:
  """Returns a weight for each label, given one for each example or label."""
  ones = ops.ones(ops.shape(y), 'float32')
  if sample_weight is None:
    return ones
  weight = ops.cast(sample_weight, 'float32')
  missing = len(y.shape) - len(weight.shape)
  return ones * ops.reshape(weight, (*ops.shape(weight), *[1] * missing))


def _as_outputs(y: Any, outputs: Any) -> Any:
  """Returns labels with the shape of the outputs: `[n]` becomes `[n, 1]`."""
  return ops.reshape(y, ops.shape(outputs))


def _mean_of_defined(numerators: Any, denominators: Any) -> Any:
  """Returns the mean of quotients whose denominator is not 0, or NaN."""
  is_defined = denominators > 0
  ones = ops.ones_like(denominators)
  quotients = numerators / ops.where(is_defined, denominators, ones)
  is_defined = ops.cast(is_defined, quotients.dtype)
  return ops.sum(is_defined * quotients) / ops.sum(is_defined)


class RightAnswers(keras.metrics.MeanMetricWrapper):
  """The share of outputs that are right: a logit above 0 means yes.

  For labels 0 or 1, `[n, labels]` or `[n]`, and logits `[n, labels]`.
  """

  def __init__(self, name: str = 'accuracy'):
    """Initializes the metric."""
    super().__init__(_right_answers, name=name)


def _right_answers(y: Any, logits: Any) -> Any:
  """Returns the share of right outputs of each example."""
  is_right = ops.equal(_as_outputs(y, logits) > 0, logits > 0)
  return ops.mean(ops.cast(is_right, 'float32'), axis=-1)


class ClassScore(keras.metrics.Metric):
  """The mean of a score over the classes that occur.

  The score of a class is a quotient of three numbers of examples, or pixels:
  of those that are of this class and predicted as such, of those predicted as
  such, and of those that are of this class. A class whose denominator is 0 does
  not count. Without any class the result is NaN.
  """

  def __init__(
      self,
      score: _Score,
      num_classes: int,
      *,
      is_exclusive: bool = True,
      first_class: int = 0,
      name: str = 'score',
  ):
    """Initializes the metric.

    Args:
      score: Returns the numerator and the denominator, given these numbers as
        vectors: `dice_score`, `iou_score`, `precision_score` or `recall_score`.
      num_classes: The number of classes, or labels.
      is_exclusive: Whether labels are integers `[...]`, and the class with the
        largest of the logits `[..., classes]` is predicted. Otherwise labels
        are 0 or 1, and a logit above 0 predicts 1.
      first_class: Classes with smaller numbers, such as a background, do not
        count.
      name: The name of the metric.
    """
    super().__init__(name=name)
    self._score = score
    self._num_classes = num_classes
    self._is_exclusive = is_exclusive
    self._first_class = first_class
    self._common, self._predicted, self._actual = (
        self.add_variable((num_classes,), 'zeros', dtype='float32', name=part)
        for part in ('common', 'predicted', 'actual')
    )

  def update_state(self, y_true, y_pred, sample_weight=None):
    """Adds a batch of labels and logits."""
    if self._is_exclusive:
      actual = ops.cast(y_true, 'int32')
      predicted = ops.cast(ops.argmax(y_pred, axis=-1), 'int32')
      actual = ops.reshape(actual, ops.shape(predicted))
      weight = _weights_like(actual, sample_weight)
      is_right = ops.cast(ops.equal(actual, predicted), 'float32')
      parts = [
          self._count(classes, amounts)
          for classes, amounts in (
              (actual, weight * is_right),
              (predicted, weight),
              (actual, weight),
          )
      ]
    else:
      actual, predicted = (
          ops.cast(values > 0, 'float32')
          for values in (_as_outputs(y_true, y_pred), y_pred)
      )
      weight = _weights_like(actual, sample_weight)
      parts = [
          ops.sum(weight * part, axis=0)
          for part in (actual * predicted, predicted, actual)
      ]
    for variable, part in zip(self.variables, parts, strict=True):
      variable.assign_add(part)

  def _count(self, classes: Any, amounts: Any) -> Any:
    """Returns the sum of the amounts of each class."""
    return ops.segment_sum(
        ops.reshape(amounts, (-1,)),
        ops.reshape(classes, (-1,)),
        self._num_classes,
    )

  def result(self):
    """Returns the mean of the scores."""
    score = self._score(self._common, self._predicted, self._actual)
    return _mean_of_defined(*(part[self._first_class :] for part in score))


def dice_score(common: Any, predicted: Any, actual: Any) -> tuple[Any, Any]:
  """Dice, or F1: 2 |A ∩ B| / (|A| + |B|)."""
  return 2 * common, predicted + actual


def iou_score(common: Any, predicted: Any, actual: Any) -> tuple[Any, Any]:
  """Intersection over union: |A ∩ B| / |A ∪ B|."""
  return ops.copy(common), predicted + actual - common


def precision_score(
    common: Any, predicted: Any, actual: Any
) -> tuple[Any, Any]:
  """Precision: |A ∩ B| / |A|, where A is predicted."""
  del actual
  return ops.copy(common), ops.copy(predicted)


def recall_score(common: Any, predicted: Any, actual: Any) -> tuple[Any, Any]:
  """Recall: |A ∩ B| / |B|, where A is predicted."""
  del predicted
  return ops.copy(common), ops.copy(actual)


class AreaUnderCurve(keras.metrics.Metric):
  """The area under the ROC curve of each output, and their mean.

  The AUC is the share of pairs of a positive and a negative example in which
  the positive one has the larger logit; a pair of equal logits counts half. The
  metric counts the examples in buckets: logits that differ by less than 0.4 %
  of `(1 + |logit|)^2` can be in the same bucket, and count as equal. An output
  without positive or without negative examples does not count. Without any
  output the result is NaN.

  For labels 0 or 1, `[n, labels]` or `[n]`, and logits `[n, labels]`.
  """

  def __init__(self, num_labels: int, name: str = 'auc'):
    """Initializes the metric for this number of outputs."""
    super().__init__(name=name)
    self._num_labels = num_labels
    self._positives, self._negatives = (
        self.add_variable(
            (_NUM_BUCKETS, num_labels), 'zeros', dtype='float32', name=name
        )
        for name in ('positives', 'negatives')
    )

  def update_state(self, y_true, y_pred, sample_weight=None):
    """Adds a batch of labels and logits."""
    # The AUC depends on the order of the logits only.
    position = (1 + y_pred / (1 + ops.abs(y_pred))) / 2
    bucket = ops.cast(position * _NUM_BUCKETS, 'int32')
    bucket = ops.clip(bucket, 0, _NUM_BUCKETS - 1)
    bucket = bucket * self._num_labels + ops.arange(self._num_labels)
    y = ops.cast(_as_outputs(y_true, y_pred) > 0, 'float32')
    weight = _weights_like(y, sample_weight)
    for variable, amounts in (
        (self._positives, weight * y),
        (self._negatives, weight * (1 - y)),
    ):
      counts = ops.segment_sum(
          ops.reshape(amounts, (-1,)),
          ops.reshape(bucket, (-1,)),
          _NUM_BUCKETS * self._num_labels,
      )
      variable.assign_add(ops.reshape(counts, variable.shape))

  def result(self):
    """Returns the mean of the areas."""
    positives, negatives = (
        ops.cast(part, 'float64') for part in (self._positives, self._negatives)
    )
    below = ops.cumsum(negatives, axis=0) - negatives / 2
    pairs = ops.sum(positives, axis=0) * ops.sum(negatives, axis=0)
    return _mean_of_defined(ops.sum(positives * below, axis=0), pairs)


class R2(keras.metrics.Metric):
  """The coefficient of determination of each target, and their mean.

  It is 1 - the sum of the squared errors / the sum of the squared differences
  of the targets from their mean. The sums are float64: the second one is a
  difference of large sums. A target that is constant does not count. Without
  any other target the result is NaN.

  For targets and outputs `[n, targets]`.
  """

  def __init__(self, num_targets: int, name: str = 'r2'):
    """Initializes the metric for this number of targets."""
    super().__init__(name=name)
    self._sum, self._squares, self._errors, self._count = (
        self.add_variable(shape, 'zeros', dtype='float64', name=part)
        for part, shape in (
            ('sum', (num_targets,)),
            ('squares', (num_targets,)),
            ('errors', (num_targets,)),
            ('count', ()),
        )
    )

  def update_state(self, y_true, y_pred, sample_weight=None):
    """Adds a batch of targets and outputs."""
    y = ops.cast(_as_outputs(y_true, y_pred), 'float64')
    error = y - ops.cast(y_pred, 'float64')
    weight = ops.cast(_weights_like(y, sample_weight), 'float64')
    for variable, values in (
        (self._sum, y),
        (self._squares, ops.square(y)),
        (self._errors, ops.square(error)),
    ):
      variable.assign_add(ops.sum(weight * values, axis=0))
    self._count.assign_add(ops.sum(weight[:, 0]))

  def result(self):
    """Returns the mean of the coefficients."""
    spread = self._squares - ops.square(self._sum) / self._count
    # What is left of equal numbers after rounding.
    is_constant = spread <= 1e-12 * self._squares
    spread = ops.where(is_constant, ops.zeros_like(spread), spread)
    return _mean_of_defined(spread - self._errors, spread)


def accuracy(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the share of right answers."""
  del num_outputs
  if task in tasks.EXCLUSIVE:
    return keras.metrics.SparseCategoricalAccuracy(name='accuracy')
  return RightAnswers()


def top_5_accuracy(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the share of samples whose class is among the 5 most likely."""
  del task, num_outputs
  return keras.metrics.SparseTopKCategoricalAccuracy(5, name='top_5_accuracy')


def auc(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the mean area under the ROC curve."""
  del task
  return AreaUnderCurve(num_outputs)


def _of_classes(
    score: _Score, name: str, task: str, num_outputs: int, **more: Any
) -> keras.metrics.Metric:
  is_exclusive = task in tasks.EXCLUSIVE
  return ClassScore(
      score, num_outputs, is_exclusive=is_exclusive, name=name, **more
  )


def f1(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the mean F1 score."""
  return _of_classes(dice_score, 'f1', task, num_outputs)


def precision(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the mean precision."""
  return _of_classes(precision_score, 'precision', task, num_outputs)


def recall(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the mean recall."""
  return _of_classes(recall_score, 'recall', task, num_outputs)


def dice(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the mean Dice coefficient of the classes other than 0."""
  return _of_classes(dice_score, 'dice', task, num_outputs, first_class=1)


def mean_iou(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the mean intersection over union of the classes."""
  return _of_classes(iou_score, 'mean_iou', task, num_outputs)


def mae(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the mean absolute error."""
  del task, num_outputs
  return keras.metrics.MeanAbsoluteError(name='mae')


def rmse(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the root of the mean squared error."""
  del task, num_outputs
  return keras.metrics.RootMeanSquaredError(name='rmse')


def r2(task: str, num_outputs: int) -> keras.metrics.Metric:
  """Returns the mean coefficient of determination."""
  del task
  return R2(num_outputs)
