"""Means and variances relative to running statistics that all clients have.

Values that are summed over clients, and bounded or hidden by noise, should be
small and have no unit. With the shared running mean R and variance S of a
channel and d² = S + ε, a mean m becomes (m - R) / d, and a variance v becomes
(v - S) / d². Both are about 0 if the statistics hardly change.
"""

import tensorflow as tf

# As large as Keras's default `epsilon` of batch normalization.
_EPSILON = 1e-3


class RelativeStatistics:
  """Converts the statistics of channels."""

  def __init__(self, mean: tf.Tensor, variance: tf.Tensor):
    """Initializes it with the running means and variances of the channels."""
    self._mean = mean
    self._variance = variance
    self._square = tf.maximum(variance, 0) + _EPSILON
    self._deviation = tf.sqrt(self._square)

  def of_mean(self, mean: tf.Tensor) -> tf.Tensor:
    """Returns (m - R) / d."""
    return (mean - self._mean) / self._deviation

  def of_variance(self, variance: tf.Tensor) -> tf.Tensor:
    """Returns (v - S) / d²."""
    return (variance - self._variance) / self._square

  def to_mean(self, relative: tf.Tensor) -> tf.Tensor:
    """Inverts `of_mean`."""
    return self._mean + self._deviation * relative

  def to_variance(self, relative: tf.Tensor) -> tf.Tensor:
    """Inverts `of_variance`."""
    return self._variance + self._square * relative

  def spread(self, mean: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
    """Returns the variance of means from their mean and mean square.

    Args:
      mean: The mean of relative means.
      square: The mean of their squares.
    """
    # Rounding or noise can make it negative.
    return self._square * tf.maximum(square - tf.math.square(mean), 0)

  def at_least(self, variance: tf.Tensor, share: float) -> tf.Tensor:
    """Returns variances that are at least a share of the running ones."""
    return tf.maximum(variance, share * tf.maximum(self._variance, 0))
