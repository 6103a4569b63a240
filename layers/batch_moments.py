"""The moments of a batch: the count, mean and variance of each channel."""

import math
from typing import Any, NamedTuple, Optional

import keras
from keras import ops


class Moments(NamedTuple):
  """The count, mean and variance of the values of one layer.

  The fields are tensors or arrays; in TFF types, they are types.

  Attributes:
    count: The number of values of a channel, or another weight: a scalar.
      Moments with count 0 are ignored.
    mean: The mean of each channel, `[channels]`.
    variance: The biased variance of each channel, `[channels]`.
  """

  count: Any
  mean: Any
  variance: Any


def batch_moments(
    inputs: Any,
    axis: int = -1,
    mask: Optional[Any] = None,
    *,
    differentiable: bool = False,
) -> Moments:
  """Computes the count, mean and biased variance of each channel of a batch.

  The variance is the mean of the squared deviations from the mean, so it stays
  accurate where the mean is much larger than the deviation.

  Args:
    inputs: A tensor of known rank, at least 1.
    axis: The axis of the channels, as in `keras.layers.BatchNormalization`.
    mask: Zeros and ones or bools, true for the values to include. As in Keras,
      an axis of size 1 is appended to the mask and the result is broadcast to
      the inputs: for example, `[batch, time]` for inputs `[batch, time,
      channels]`. Excluded values may be anything, even NaN. Default: all values
      are included.
    differentiable: Whether gradients flow through the mean and the variance.

  Returns:
    Moments in float64 for float64 inputs and in float32 for all others. If the
    mask differs between channels, which requires an `axis` other than the last,
    `count` has the shape `[channels]`. Without any values all moments are 0.

  Raises:
    ValueError: If the rank is unknown, or `axis` does not fit it.
  """
  inputs = ops.convert_to_tensor(inputs)
  is_float64 = keras.backend.standardize_dtype(inputs.dtype) == 'float64'
  dtype = 'float64' if is_float64 else 'float32'
  values = ops.cast(inputs, dtype)
  if not differentiable:
    values = ops.stop_gradient(values)
  rank = _rank(values)
  axis = _positive_axis(axis, rank)
  reduced = [i for i in range(rank) if i != axis]
  if mask is None:
    included = None
    # In a graph, sizes may be unknown.
    shape = ops.shape(values)
    count = ops.convert_to_tensor(math.prod(shape[i] for i in reduced), dtype)
  else:
    included = ops.expand_dims(ops.cast(mask, 'bool'), -1)
    count = _num_included(included, values, axis, reduced, dtype)

  def mean_of(terms):
    if included is not None:
      terms = ops.where(included, terms, ops.zeros_like(terms))
    # TensorFlow's fused batch normalization kernels would be faster, but XLA
    # compiles them to E[x²] − E[x]², which loses precision.
    return ops.divide_no_nan(_sum(terms, reduced), count)

  mean = mean_of(values)
  # The deviations add up to 0, so no gradient flows through this mean.
  variance = mean_of(ops.square(values - ops.stop_gradient(mean)))
  return Moments(
      ops.reshape(count, [-1]) if len(count.shape) else count,
      ops.reshape(mean, [-1]),
      ops.reshape(variance, [-1]),
  )


def merge_moments(a: Moments, b: Moments) -> Moments:
  """Computes the moments of the union of two sets of values.

  This is the law of total variance, in the numerically stable form of Chan et
  al., Updating Formulae and a Pairwise Algorithm for Computing Sample
  Variances, 1979.

  """
  count = a.count + b.count
  share = ops.divide_no_nan(b.count, count)
  difference = b.mean - a.mean
  return Moments(
      count,
      a.mean + share * difference,
      (1 - share) * a.variance
      + share * b.variance
      + share * (1 - share) * ops.square(difference),
  )


def of_all_replicas(moments: Moments) -> Moments:
  """Pools the moments of all replicas of a `tf.distribute` strategy.

  Outside of a strategy and with other backends than TensorFlow, it returns
  `moments` itself. Gradients flow through the pooled moments to all replicas.
  """
  if keras.backend.backend() != 'tensorflow':
    return moments
  import tensorflow as tf  # Keras has imported it.

  replica = tf.distribute.get_replica_context()
  if replica is None or replica.num_replicas_in_sync == 1:
    return moments
  count, total = replica.all_reduce(
      tf.distribute.ReduceOp.SUM, [moments.count, moments.count * moments.mean]
  )
  mean = tf.math.divide_no_nan(total, count)
  deviation = moments.variance + tf.math.square(moments.mean - mean)
  spread = replica.all_reduce(
      tf.distribute.ReduceOp.SUM, moments.count * deviation
  )
  return Moments(count, mean, tf.math.divide_no_nan(spread, count))


def _rank(values: Any) -> int:
  """Returns the rank of a tensor, or 0 if TensorFlow does not know it."""
  try:
    return len(values.shape)
  except ValueError:
    return 0


def _positive_axis(axis: int, rank: int) -> int:
  """Returns the axis counted from the front."""
  if not rank:
    raise ValueError('inputs must have a known rank of at least 1.')
  if not -rank <= axis < rank:
    raise ValueError(
        f'axis={axis} does not fit inputs of rank {rank}; use an axis from'
        f' {-rank} to {rank - 1}.'
    )
  return axis % rank


def _num_included(
    included: Any, values: Any, axis: int, reduced: list[int], dtype: str
) -> Any:
  """Counts the values in the mask: one scalar if all channels share it."""
  shape = list(ops.shape(values))
  rank = _rank(included)
  sizes = [1] * (len(shape) - rank) + list(included.shape) if rank else []
  is_same = bool(sizes) and sizes[axis] == 1
  if is_same:
    shape[axis] = 1
  ones = ops.cast(ops.broadcast_to(included, shape), dtype)
  return ops.sum(ones) if is_same else _sum(ones, reduced)


def _sum(values: Any, axes: list[int]) -> Any:
  # PyTorch would sum over all axes for an empty list.
  return ops.sum(values, axis=axes, keepdims=True) if axes else values
