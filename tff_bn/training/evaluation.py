"""Evaluates models, and re-estimates and merges their BN statistics."""

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

import keras
import numpy as np
import tensorflow as tf

from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import Role
from tff_bn.layers import batch_moments
from tff_bn.layers import discovery


class Evaluator:
  """Evaluates weights on datasets, in inference mode.

  The Keras model is built and traced once; only weights are exchanged then.
  """

  def __init__(self, model: BatchNormModel):
    """Builds and traces the model.

    Args:
      model: The model, whose loss averages over the batch, as Keras's losses do
        by default.
    """
    self._model = model
    self._keras_model = model.to_keras()
    self._loss = model.loss_fn()
    self._metrics = list(model.metrics_fn())
    self._step = tf.function(
        self._evaluate_batch, input_signature=model.input_spec
    )

  def _evaluate_batch(self, x: Any, y: Any) -> tuple[tf.Tensor, tf.Tensor]:
    predictions = mixed_precision.to_float32(
        self._keras_model(x, training=False)
    )
    for metric in self._metrics:
      metric.update_state(y, predictions)
    return (
        tf.reduce_mean(self._loss(y, predictions)),
        tf.shape(tf.nest.flatten(y)[0])[0],
    )

  @property
  def metric_names(self) -> tuple[str, ...]:
    """The names of the metrics, without `loss` and `num_examples`."""
    return tuple(metric.name for metric in self._metrics)

  def evaluate(
      self, weights: ModelWeights, dataset: tf.data.Dataset
  ) -> collections.OrderedDict[str, Any]:
    """Evaluates weights on a dataset.

    Args:
      weights: The weights.
      dataset: Batches of `(x, y)`.

    Returns:
      `loss`, the mean over the examples (a float); the metrics by name
      (floats); `num_examples` (an int). Without examples the loss and the
      metrics are NaN.
    """
    self._keras_model.set_weights(
        [np.asarray(v) for v in self._model.from_model_weights(weights)]
    )
    for metric in self._metrics:
      metric.reset_state()
    loss_sum, num_examples = 0.0, 0
    for x, y in dataset:
      # The last batch may be smaller, so batches are weighted by their size.
      loss, size = self._step(x, y)
      loss_sum += float(loss) * int(size)
      num_examples += int(size)
    if not num_examples:
      values = [float('nan')] * (1 + len(self._metrics))
    else:
      values = [
          loss_sum / num_examples,
          *(float(metric.result()) for metric in self._metrics),
      ]
    result = collections.OrderedDict(zip(('loss', *self.metric_names), values))
    result['num_examples'] = num_examples
    return result

  def evaluate_clients(
      self,
      weights: Mapping[str, ModelWeights],
      dataset_fn: Callable[[str], tf.data.Dataset],
  ) -> Optional[collections.OrderedDict[str, Any]]:
    """Evaluates each client's weights, and averages over the clients.

    Args:
      weights: The weights that each client uses, by client id.
      dataset_fn: Returns the data on which a client's weights are evaluated.

    Returns:
      As `evaluate`, but the loss and the metrics are means over the clients
      that have data, each of which counts the same, and `num_examples` is the
      sum. `None` if no client has data.
    """
    results = [
        self.evaluate(client_weights, dataset_fn(client_id))
        for client_id, client_weights in weights.items()
    ]
    results = [result for result in results if result['num_examples']]
    if not results:
      return None
    means = collections.OrderedDict(
        (name, float(np.mean([result[name] for result in results])))
        for name in ('loss', *self.metric_names)
    )
    means['num_examples'] = sum(result['num_examples'] for result in results)
    return means


class _Union:
  """The moments of all that was added, in float64."""

  def __init__(self):
    self.moments: Optional[batch_moments.Moments] = None

  def add(self, count: int, mean: np.ndarray, variance: np.ndarray) -> None:
    added = batch_moments.Moments(np.float64(count), mean, variance)
    if self.moments is not None:
      added = batch_moments.merge_moments(self.moments, added)
    self.moments = added

  @property
  def mean(self) -> np.ndarray:
    return np.asarray(self.moments.mean)

  @property
  def variance(self) -> np.ndarray:
    return np.asarray(self.moments.variance)


def reestimate_batch_norm_statistics(
    model: BatchNormModel, weights: ModelWeights, dataset: tf.data.Dataset
) -> ModelWeights:
  """Computes the running statistics of all BN layers anew, from data.

  This gives a model to a client that took no part in training (FedBN, appendix
  G): start from `merge_client_weights` and use the client's own data, of which
  no labels are needed.

  There is one forward pass over the data, in which every BN layer normalizes
  with the statistics of the batch, as in training, and every other layer is in
  inference mode (dropout is off). A layer's running mean and variance become
  the mean and the *biased* variance of its inputs over all batches, pooled with
  the batches' sizes (law of total variance), in float64. Old running statistics
  have no influence. Since the layers before it see one batch at a time, use
  batches as large as in training.

  BN layers with `trainable=False` keep their statistics and use them, as Keras
  does in training.

  Args:
    model: The model.
    weights: Its weights.
    dataset: Batches of `(x, y)`; `y` is not used.

  Returns:
    The weights with new running statistics.

  Raises:
    ValueError: If the dataset is empty.
  """
  keras_model = model.to_keras(weights)
  layers = [
      layer
      for layer in discovery.batch_norm_layers(keras_model)
      if layer.trainable
  ]
  unions = [_Union() for _ in layers]
  for layer, union in zip(layers, unions):
    _record_inputs(layer, union)
  for x, _ in dataset:
    keras_model(x, training=False)
  for layer, union in zip(layers, unions):
    if union.moments is None:
      raise ValueError(
          'Batch normalization statistics can only be computed from data, but'
          ' the dataset is empty.'
      )
    layer.moving_mean.assign(union.mean)
    layer.moving_variance.assign(union.variance)
  return model.from_keras(keras_model)


def _record_inputs(layer: keras.layers.Layer, union: _Union) -> None:
  """Makes a BN layer add its inputs to `union` and use batch statistics."""
  # Overriding `call` of this one object, which nobody else uses, works inside
  # nested models and wrappers, where no functional sub-model could be cut out.
  original_call = layer.call

  def call(
      inputs: tf.Tensor,
      training: Optional[bool] = None,
      mask: Optional[tf.Tensor] = None,
  ) -> tf.Tensor:
    del training  # Unused.
    values = inputs.numpy().astype(np.float64)
    values = np.moveaxis(values, layer.axis, -1)
    if mask is None:
      values = values.reshape([-1, values.shape[-1]])
    else:
      values = values[mask.numpy()]
    union.add(len(values), values.mean(axis=0), values.var(axis=0))
    if mask is None:
      return original_call(inputs, training=True)
    return original_call(inputs, training=True, mask=mask)

  layer.call = call


def merge_client_weights(
    model: BatchNormModel, weights: Iterable[ModelWeights]
) -> ModelWeights:
  """Merges the clients' models into one.

  Shared variables are equal at all clients and stay as they are. Local ones are
  averaged, each client counting the same, but running variances are pooled: by
  the law of total variance, a merged variance is the mean of the clients'
  variances plus the variance of their means. The phases of personal position
  encodings, whose mean says nothing, are those of the untrained model. What is
  no number to average (integers) is the first client's. FedBN (appendix G)
  starts from this model for a client that took no part in training.

  Args:
    model: The model.
    weights: The clients' weights, at least one; only one at a time is needed.

  Returns:
    The merged weights.

  Raises:
    ValueError: If there is no client.
  """
  means = None
  first = None
  for client_weights in weights:
    values = model.from_model_weights(client_weights)
    if means is None:
      first = [np.asarray(value) for value in values]
      means = [_Union() for _ in values]
    for variable_means, value in zip(means, values):
      value = np.asarray(value).astype(np.float64)
      variable_means.add(1, value, np.zeros_like(value))
  if means is None:
    raise ValueError('There is no client whose model could be merged.')

  between = {
      info.batch_norm: variable_means.variance
      for info, variable_means in zip(model.variables, means)
      if info.role is Role.MOVING_MEAN
  }
  merged = []
  initial = model.from_model_weights(model.initial_weights)
  for info, variable_means, value, initial_value in zip(
      model.variables, means, first, initial
  ):
    mean = variable_means.mean
    if info.role is Role.PERSONAL_PHASE:
      merged.append(initial_value)
    elif value.dtype.kind != 'f':
      merged.append(value)
    elif info.role is Role.MOVING_VARIANCE:
      merged.append((mean + between[info.batch_norm]).astype(value.dtype))
    else:
      merged.append(mean.astype(value.dtype))
  return model.to_model_weights(merged)
