"""Batch normalization by given statistics, with fused or plain operations."""

from typing import NamedTuple, Optional

import keras
import tensorflow as tf

from tff_bn.keras_model import fused_batch_norm
from tff_bn.layers.batch_moments import Moments


class Statistics(NamedTuple):
  """Statistics of all clients' values.

  Attributes:
    mean: The mean of each channel.
    variance: The biased variance of each channel.
    count: The number of values in each channel.
    value_weight: The weight of one value of this client in the statistics.
    deficit: One minus the sum of the weights of all values; `None` if it is 0.
  """

  mean: tf.Tensor
  variance: tf.Tensor
  count: tf.Tensor
  value_weight: tf.Tensor
  deficit: Optional[tf.Tensor] = None


class Kernels:
  """The computations of one call of a layer.

  They use TensorFlow's fused operations for images with the channels last, and
  plain operations for other ranks, axes and dtypes, and with a mask.

  Attributes:
    inputs: The input, in the dtype of the computation.
    count: The number of values in a channel, a scalar in the statistics' dtype.
    epsilon: The constant added to the variance.
  """

  def __init__(
      self,
      layer: keras.layers.BatchNormalization,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ):
    """Prepares the computations for an input and a mask of its values."""
    self.epsilon = layer.epsilon
    self._mask = None
    self._is_fused = fused_batch_norm.applies(layer, inputs, mask)
    if self._is_fused:
      self.inputs = inputs
      self.count = fused_batch_norm.num_values(inputs)
      return
    dtype = tf.as_dtype(layer.variable_dtype)
    # As in Keras, float32 for inputs of 16 bits, whose squares would overflow.
    self.inputs = tf.cast(inputs, dtype)
    self._shape = layer.moving_mean.shape
    rank = inputs.shape.rank
    axis = layer.axis % rank
    self._reduced = [i for i in range(rank) if i != axis]
    # The shape that broadcasts a value of each channel to the input.
    self._broadcast = [1] * rank
    self._broadcast[axis] = inputs.shape[axis]
    size = tf.cast(tf.size(inputs), dtype)
    if mask is not None:
      self._mask = tf.broadcast_to(
          tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(inputs)
      )
      size = tf.reduce_sum(tf.cast(self._mask, dtype))
    self.count = size / self._shape.num_elements()

  def _spread(self, value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(value, self._broadcast)

  def _sum(self, values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.reduce_sum(values, self._reduced), self._shape)

  def _masked(self, values: tf.Tensor) -> tf.Tensor:
    if self._mask is None:
      return values
    return tf.where(self._mask, values, tf.zeros_like(values))

  def moments(self) -> Moments:
    """Computes the moments of the input."""
    if self._is_fused:
      return fused_batch_norm.moments(self.inputs)
    mean = tf.math.divide_no_nan(
        self._sum(self._masked(self.inputs)), self.count
    )
    squares = tf.math.square(self.inputs - self._spread(mean))
    variance = tf.math.divide_no_nan(
        self._sum(self._masked(squares)), self.count
    )
    return Moments(self.count, mean, variance)

  def as_keras(self, statistics: Statistics) -> Statistics:
    """Changes exact statistics as Keras does for an input with a mask."""
    if self._mask is None:
      return statistics
    # Keras divides by slightly more than the number of values, never by 0.
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

  def normalize(
      self, gamma: tf.Tensor, beta: tf.Tensor, statistics: Statistics
  ) -> tf.Tensor:
    """Computes γ·x̂ + β."""
    if self._is_fused:
      return fused_batch_norm.normalize_by(
          self.inputs,
          gamma,
          beta,
          statistics.mean,
          statistics.variance,
          self.epsilon,
      )
    r = tf.math.rsqrt(statistics.variance + self.epsilon)
    return (self.inputs - self._spread(statistics.mean)) * self._spread(
        gamma * r
    ) + self._spread(beta)

  def gradients(
      self, cotangent: tf.Tensor, gamma: tf.Tensor, statistics: Statistics
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes γ·r·dy, dγ and dζ."""
    if self._is_fused:
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
    r = tf.math.rsqrt(statistics.variance + self.epsilon)
    normalized = (self.inputs - self._spread(statistics.mean)) * self._spread(r)
    return (
        cotangent * self._spread(gamma * r),
        self._sum(cotangent * normalized),
        self._sum(cotangent),
    )

  def affine(
      self, scale: tf.Tensor, shift: tf.Tensor, statistics: Statistics
  ) -> tf.Tensor:
    """Computes scale·x̂ + shift, and 0 for values that a mask excludes."""
    return self._masked(self.normalize(scale, shift, statistics))
