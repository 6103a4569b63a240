"""Batch normalization with given statistics, fused or in single operations."""

from typing import NamedTuple, Optional, Protocol

import keras
import tensorflow as tf

from tff_bn.keras_model import fused_batch_norm
from tff_bn.layers.batch_moments import Moments


class Statistics(NamedTuple):
  """Statistics of all clients' values.

  Attributes:
    mean: The mean of each channel.
    variance: The biased variance of each channel.
    count: How many values of a channel there are.
    value_weight: The weight of one value of this client in them.
    deficit: By how much the weights of all values fall short of 1; `None` if
      they don't.
  """

  mean: tf.Tensor
  variance: tf.Tensor
  count: tf.Tensor
  value_weight: tf.Tensor
  deficit: Optional[tf.Tensor] = None


class Kernels(Protocol):
  """How a layer's input is normalized.

  Attributes:
    inputs: The input, in the dtype of the computation.
    count: The number of values of a channel, a scalar in the statistics' dtype.
    epsilon: What is added to the variance.
  """

  inputs: tf.Tensor
  count: tf.Tensor
  epsilon: float

  def moments(self) -> Moments:
    """Returns the count, the mean and the biased variance of the input."""

  def as_keras(self, statistics: Statistics) -> Statistics:
    """Returns the statistics as Keras computes them of the same values."""

  def normalize(
      self, gamma: tf.Tensor, beta: tf.Tensor, statistics: Statistics
  ) -> tf.Tensor:
    """Returns γ·x̂ + β."""

  def gradients(
      self, cotangent: tf.Tensor, gamma: tf.Tensor, statistics: Statistics
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns γ·r·dy, dγ and dζ."""

  def affine(
      self, scale: tf.Tensor, shift: tf.Tensor, statistics: Statistics
  ) -> tf.Tensor:
    """Returns scale·x̂ + shift, and 0 where a mask excludes a value."""


def kernels_for(
    layer: keras.layers.Layer,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> Kernels:
  """Chooses the kernels of a layer's call.

  Args:
    layer: The layer.
    inputs: Its input.
    mask: Which values count; `None`: all.

  Returns:
    Fused kernels where TensorFlow has them.
  """
  if fused_batch_norm.applies(layer, inputs, mask):
    return _FusedKernels(layer, inputs)
  return _PlainKernels(layer, inputs, mask)


class _FusedKernels:
  """TensorFlow's fused operations, for images with the channels last."""

  def __init__(self, layer: keras.layers.Layer, inputs: tf.Tensor):
    self.inputs = inputs
    self.epsilon = layer.epsilon
    self.count = tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), tf.float32)

  def moments(self):
    return fused_batch_norm.moments(self.inputs)

  def as_keras(self, statistics):
    return statistics

  def normalize(self, gamma, beta, statistics):
    return fused_batch_norm.normalize_by(
        self.inputs,
        gamma,
        beta,
        statistics.mean,
        statistics.variance,
        self.epsilon,
    )

  def gradients(self, cotangent, gamma, statistics):
    result = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=cotangent,
        x=self.inputs,
        scale=gamma,
        reserve_space_1=statistics.mean,
        reserve_space_2=statistics.variance,
        reserve_space_3=tf.zeros([0]),
        epsilon=self.epsilon,
        is_training=False,
    )
    return result.x_backprop, result.scale_backprop, result.offset_backprop

  def affine(self, scale, shift, statistics):
    return self.normalize(scale, shift, statistics)


class _PlainKernels:
  """Ordinary operations, for inputs of any rank, axes, dtype and mask."""

  def __init__(
      self,
      layer: keras.layers.Layer,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ):
    self._dtype = tf.as_dtype(layer.variable_dtype)
    self._shape = layer.moving_mean.shape
    # In 16 bits the squares would overflow; Keras computes in float32, too.
    self.inputs = tf.cast(inputs, self._dtype)
    self.epsilon = layer.epsilon
    rank = inputs.shape.rank
    axis = layer.axis % rank
    self._reduced = [i for i in range(rank) if i != axis]
    # The shape in which a value for each channel goes with the input.
    self._broadcast = [1] * rank
    self._broadcast[axis] = inputs.shape[axis]
    size = tf.cast(tf.size(inputs), self._dtype)
    self._mask = None
    if mask is not None:
      self._mask = tf.broadcast_to(
          tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(inputs)
      )
      size = tf.reduce_sum(tf.cast(self._mask, self._dtype))
    self.count = size / self._shape.num_elements()

  def _spread(self, value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(value, self._broadcast)

  def _sum(self, values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.reduce_sum(values, self._reduced), self._shape)

  def _masked(self, values: tf.Tensor) -> tf.Tensor:
    if self._mask is None:
      return values
    return tf.where(self._mask, values, tf.zeros_like(values))

  def moments(self):
    mean = tf.math.divide_no_nan(
        self._sum(self._masked(self.inputs)), self.count
    )
    squares = tf.math.square(self.inputs - self._spread(mean))
    variance = tf.math.divide_no_nan(
        self._sum(self._masked(squares)), self.count
    )
    return Moments(self.count, mean, variance)

  def as_keras(self, statistics):
    if self._mask is None:
      return statistics
    # So that it never divides by 0, it divides by slightly more.
    divisor = statistics.count + keras.config.epsilon()
    share = statistics.count / divisor
    mean = statistics.mean * share
    difference = tf.math.square(statistics.mean - mean)
    return Statistics(
        mean,
        (statistics.variance + difference) * share,
        statistics.count,
        statistics.value_weight * share,
        1 - share,
    )

  def normalize(self, gamma, beta, statistics):
    r = tf.math.rsqrt(statistics.variance + self.epsilon)
    return (self.inputs - self._spread(statistics.mean)) * self._spread(
        gamma * r
    ) + self._spread(beta)

  def gradients(self, cotangent, gamma, statistics):
    r = tf.math.rsqrt(statistics.variance + self.epsilon)
    normalized = (self.inputs - self._spread(statistics.mean)) * self._spread(r)
    return (
        cotangent * self._spread(gamma * r),
        self._sum(cotangent * normalized),
        self._sum(cotangent),
    )

  def affine(self, scale, shift, statistics):
    return self._masked(self.normalize(scale, shift, statistics))
