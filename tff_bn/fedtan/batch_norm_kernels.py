"""Batch normalization by given statistics, with fused or plain operations."""

import abc
from typing import NamedTuple, Optional

import keras
import tensorflow as tf

from tff_bn.keras_model import fused_batch_norm
from tff_bn.layers.batch_moments import BatchMoments


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


class Kernels(abc.ABC):
  """The computations of one call of a layer.

  Attributes:
    inputs: The input, in the dtype of the computation.
    count: The number of values in a channel, a scalar in the statistics' dtype.
    epsilon: The constant added to the variance.
  """

  inputs: tf.Tensor
  count: tf.Tensor
  epsilon: float

  @abc.abstractmethod
  def moments(self) -> BatchMoments:
    """Computes the moments of the input."""

  def as_keras(self, statistics: Statistics) -> Statistics:
    """Changes exact statistics as Keras does to avoid a division by 0."""
    return statistics

  @abc.abstractmethod
  def normalize(
      self, gamma: tf.Tensor, beta: tf.Tensor, statistics: Statistics
  ) -> tf.Tensor:
    """Computes γ·x̂ + β."""

  @abc.abstractmethod
  def gradients(
      self, cotangent: tf.Tensor, gamma: tf.Tensor, statistics: Statistics
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes γ·r·dy, dγ and dζ."""

  def affine(
      self, scale: tf.Tensor, shift: tf.Tensor, statistics: Statistics
  ) -> tf.Tensor:
    """Computes scale·x̂ + shift, and 0 for values that a mask excludes."""
    return self.normalize(scale, shift, statistics)


def kernels_for(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> Kernels:
  """Returns the computations of a layer's call, fused if possible.

  Args:
    layer: The layer.
    inputs: Its input.
    mask: A mask of the values to include; `None` includes all.
  """
  if fused_batch_norm.applies(layer, inputs, mask):
    return _FusedKernels(layer, inputs)
  return _PlainKernels(layer, inputs, mask)


class _FusedKernels(Kernels):
  """TensorFlow's fused operations, for images with the channels last."""

  def __init__(self, layer: keras.layers.BatchNormalization, inputs: tf.Tensor):
    self.inputs = inputs
    self.epsilon = layer.epsilon
    self.count = fused_batch_norm.num_values(inputs)

  def moments(self) -> BatchMoments:
    return fused_batch_norm.moments(self.inputs)

  def normalize(
      self, gamma: tf.Tensor, beta: tf.Tensor, statistics: Statistics
  ) -> tf.Tensor:
    return fused_batch_norm.normalize_by(
        self.inputs,
        gamma,
        beta,
        statistics.mean,
        statistics.variance,
        self.epsilon,
    )

  def gradients(
      self, cotangent: tf.Tensor, gamma: tf.Tensor, statistics: Statistics
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    return fused_batch_norm.normalize_by_gradients(
        cotangent,
        self.inputs,
        gamma,
        statistics.mean,
        statistics.variance,
        self.epsilon,
    )


class _PlainKernels(Kernels):
  """Plain operations, for inputs of any rank, axis, dtype and mask."""

  def __init__(
      self,
      layer: keras.layers.BatchNormalization,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ):
    self._dtype = tf.as_dtype(layer.variable_dtype)
    self._shape = layer.moving_mean.shape
    # As in Keras, float32 for inputs of 16 bits, whose squares would overflow.
    self.inputs = tf.cast(inputs, self._dtype)
    self.epsilon = layer.epsilon
    rank = inputs.shape.rank
    axis = layer.axis % rank
    self._reduced = [i for i in range(rank) if i != axis]
    # The shape that broadcasts a value of each channel to the input.
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

  def moments(self) -> BatchMoments:
    mean = tf.math.divide_no_nan(
        self._sum(self._masked(self.inputs)), self.count
    )
    squares = tf.math.square(self.inputs - self._spread(mean))
    variance = tf.math.divide_no_nan(
        self._sum(self._masked(squares)), self.count
    )
    return BatchMoments(self.count, mean, variance)

  def as_keras(self, statistics: Statistics) -> Statistics:
    if self._mask is None:
      return statistics
    # With a mask, Keras divides by slightly more than the number of values.
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
    r = tf.math.rsqrt(statistics.variance + self.epsilon)
    return (self.inputs - self._spread(statistics.mean)) * self._spread(
        gamma * r
    ) + self._spread(beta)

  def gradients(
      self, cotangent: tf.Tensor, gamma: tf.Tensor, statistics: Statistics
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
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
    return self._masked(self.normalize(scale, shift, statistics))
