"""Mean and variance of a batch, as batch normalization needs them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow as tf


class BatchMoments(NamedTuple):
  """What is known of a batch's values: how many, their mean and variance.

  Attributes:
    count: The number of values of a channel.
    mean: The mean of each channel.
    variance: The biased variance of each channel.
  """

  count: tf.Tensor
  mean: tf.Tensor
  variance: tf.Tensor


def batch_moments(
    inputs: Any,
    axis: Union[int, Sequence[int]] = -1,
    mask: Optional[Any] = None,
) -> BatchMoments:
  """Computes the mean and the biased variance of each channel of a batch.

  The variance is the mean of the squared deviations from the mean, so no digits
  cancel where the mean is large against the deviation. No gradient flows
  through the results.

  Args:
    inputs: A tensor of known rank, at least 1.
    axis: The axis, or axes, of the channels, as in
      `tf.keras.layers.BatchNormalization`.
    mask: Where values count: as in Keras, a tensor of zeros and ones or bools
      that is broadcast to the inputs after an axis of size 1 is appended to
      it, such as `[batch, time]` for inputs `[batch, time, channels]`. What it
      excludes may be anything, even NaN. Default: all values count.

  Returns:
    `BatchMoments` in float64 for float64 inputs, in float32 for all others.
    `count` is a scalar. `mean` and `variance` have the shape of Keras's
    `moving_mean`: `[channels]` for one axis; for several axes the rank of the
    inputs, with 1 in place of all other axes. Only if a mask differs between
    channels, which takes an `axis` other than the last, `count` has that shape,
    too. Without any values all of them are 0.

  Raises:
    ValueError: If the rank is unknown, or `axis` does not fit it.
  """
  inputs = tf.convert_to_tensor(inputs)
  dtype = tf.float64 if inputs.dtype == tf.float64 else tf.float32
  values = tf.stop_gradient(tf.cast(inputs, dtype))
  axes = _channel_axes(axis, values.shape.rank)
  reduced = [i for i in range(values.shape.rank) if i not in axes]
  weights = None
  if mask is None:
    size = tf.reduce_prod([1, *(tf.shape(values)[i] for i in reduced)])
    count = tf.cast(size, dtype)
  else:
    weights = tf.expand_dims(tf.cast(mask, dtype), -1)
    count = _sum_of_weights(weights, values, axes, reduced)

  def mean_of(terms):
    if weights is not None:
      terms = tf.math.multiply_no_nan(terms, weights)
    return tf.math.divide_no_nan(_sum(terms, reduced), count)

  def per_channel(result):
    return tf.reshape(result, [-1]) if len(axes) == 1 else result

  mean = mean_of(values)
  variance = mean_of(tf.math.squared_difference(values, mean))
  return BatchMoments(
      per_channel(count) if count.shape.rank else count,
      per_channel(mean),
      per_channel(variance),
  )


def merge_moments(a: BatchMoments, b: BatchMoments) -> BatchMoments:
  """The moments of two batches together: the law of total variance.

  In the form of Chan et al., Updating Formulae and a Pairwise Algorithm for
  Computing Sample Variances, 1979, which does not cancel digits.

  Args:
    a: The count, mean and variance of one batch.
    b: Those of another one, with the same shapes and dtype.

  Returns:
    The moments of all values. Moments with count 0 change nothing.
  """
  a, b = BatchMoments(*a), BatchMoments(*b)
  count = a.count + b.count
  share = tf.math.divide_no_nan(b.count, count)
  difference = b.mean - a.mean
  return BatchMoments(
      count,
      a.mean + share * difference,
      (1 - share) * a.variance
      + share * b.variance
      + share * (1 - share) * tf.math.square(difference),
  )


def _channel_axes(
    axis: Union[int, Sequence[int]], rank: Optional[int]
) -> list[int]:
  """The axes of the channels, counted from the first."""
  if not rank:
    raise ValueError(
        f'inputs must have a known rank of at least 1, but have rank {rank}.'
    )
  axes = [axis] if isinstance(axis, int) else list(axis)
  positions = {i + rank if i < 0 else i for i in axes}
  if len(positions) < len(axes) or not positions <= set(range(rank)):
    raise ValueError(
        f'axis={axis} does not fit inputs of rank {rank}: give different axes'
        f' from {-rank} to {rank - 1}.'
    )
  return sorted(positions)


def _sum_of_weights(
    weights: tf.Tensor,
    values: tf.Tensor,
    axes: Sequence[int],
    reduced: Sequence[int],
) -> tf.Tensor:
  """The number of values that count: a scalar if all channels have the same."""
  shape = tf.unstack(tf.shape(values))
  rank = len(shape)
  if weights.shape.rank is not None:
    sizes = [1] * (rank - weights.shape.rank) + weights.shape.as_list()
    if all(sizes[i] == 1 for i in axes):
      for i in axes:
        shape[i] = 1
      return tf.reduce_sum(tf.broadcast_to(weights, tf.stack(shape)))
  return _sum(tf.broadcast_to(weights, tf.stack(shape)), reduced)


def _sum(values: tf.Tensor, reduced: Sequence[int]) -> tf.Tensor:
  """The sums over some axes, in a shape that goes with that of the values."""
  rank = values.shape.rank
  if rank > 1 and reduced == list(range(rank - 1)):
    # On a CPU faster than `tf.reduce_sum`. The fused kernels of batch
    # normalization were faster still, but XLA compiles them to E[x²] − E[x]²,
    # which cancels, and a matrix product with ones may be rounded on a GPU.
    return tf.raw_ops.BiasAddGrad(out_backprop=values)
  return tf.reduce_sum(values, reduced, keepdims=True)
