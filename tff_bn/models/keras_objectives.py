"""Losses and metrics of Keras, for labels and logits.

Keras's own take probabilities, or one-hot labels. Here the labels and logits of
a task are converted first. So a metric is what `compile(metrics=[NAME])`
computes for a model that ends in a softmax or sigmoid layer, with one-hot
labels for classes.
"""

from typing import Any

import keras
from keras import ops

from tff_bn.catalog import tasks


def _converted(
    task: str, takes_logits: bool, y: Any, outputs: Any
) -> tuple[Any, Any]:
  """Returns labels of the shape of the outputs, and probabilities or logits."""
  if task in tasks.EXCLUSIVE:
    y = ops.reshape(ops.cast(y, 'int32'), ops.shape(outputs)[:-1])
    y = ops.one_hot(y, outputs.shape[-1], dtype=outputs.dtype)
    return y, outputs if takes_logits else ops.softmax(outputs)
  y = ops.reshape(ops.cast(y, outputs.dtype), ops.shape(outputs))
  if task in tasks.YES_OR_NO and not takes_logits:
    outputs = ops.sigmoid(outputs)
  return y, outputs


class _ConvertedLoss(keras.losses.Loss):
  """A loss of Keras after the conversion of labels and logits."""

  def __init__(self, inner: keras.losses.Loss, task: str, takes_logits: bool):
    super().__init__(name=inner.name)
    self._inner = inner
    self._task = task
    self._takes_logits = takes_logits

  def call(self, y_true, y_pred):
    """Returns the losses of the examples or pixels."""
    return self._inner.call(
        *_converted(self._task, self._takes_logits, y_true, y_pred)
    )


class _ConvertedMetric(keras.metrics.Metric):
  """A metric of Keras after the conversion of labels and logits."""

  def __init__(
      self, inner: keras.metrics.Metric, task: str, takes_logits: bool
  ):
    super().__init__(name=inner.name)
    self._inner = inner
    self._task = task
    self._takes_logits = takes_logits

  def update_state(self, y_true, y_pred, sample_weight=None):
    """Adds a batch of labels and logits."""
    y, outputs = _converted(self._task, self._takes_logits, y_true, y_pred)
    self._inner.update_state(y, outputs, sample_weight=sample_weight)

  def result(self):
    """Returns the inner metric's result."""
    return self._inner.result()


_CONVERTED = {'losses': _ConvertedLoss, 'metrics': _ConvertedMetric}


def build(
    module: str,
    class_name: str,
    task: str,
    takes_logits: bool,
    **arguments: Any,
) -> Any:
  """Returns a loss or a metric of Keras for labels and logits of a task.

  Args:
    module: `'losses'` or `'metrics'`, the module of Keras.
    class_name: The name of a class of this module.
    task: A key of `tff_bn.catalog.tasks.TASKS`.
    takes_logits: Whether it takes logits, not probabilities.
    **arguments: The arguments of the class.
  """
  inner = getattr(getattr(keras, module), class_name)(**arguments)
  return _CONVERTED[module](inner, task, takes_logits)
