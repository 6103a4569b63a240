"""Mean and variance of a batch, as batch normalization needs them."""

import math
from typing import Any, NamedTuple, Optional

import keras
from keras import ops


class BatchMoments(NamedTuple):
  """The number of values in a batch, their mean and their variance.

  Attributes:
    count: The number of values of a channel.
    mean: The mean of each channel.
    variance: The biased variance of each channel.
  """

  count: Any
  mean: Any
  variance: Any


def batch_moments(
    inputs: Any, axis: int = -1, mask: Optional[Any] = None
) -> BatchMoments:
  """Computes the mean and the biased variance of each channel of a batch.

  The variance is the mean of the squared deviations from the mean, so no digits
  cancel where the mean is large against the deviation. No gradient flows
  through the results.

  Args:
    inputs: A tensor of known rank, at least 1.
    axis: The axis of the channels, as in `keras.layers.BatchNormalization`.
    mask: Which values count: a tensor of zeros and ones or bools. As in Keras,
      it is broadcast to the inputs after an axis of size 1 is appended to it.
      An example is `[batch, time]` for inputs `[batch, time, channels]`.
      Excluded values may be anything, even NaN. Default: all values count.

  Returns:
    `BatchMoments` of tensors, in float64 for float64 inputs and in float32 for
    all others. `mean` and `variance` have the shape `[channels]`, `count` is a
    scalar. Only if a mask differs between channels, which takes an `axis` other
    than the last, `count` has the shape `[channels]`, too. Without any values
    all of them are 0.

  Raises:
    ValueError: If the rank is unknown, or `axis` does not fit it.
  """
  inputs = ops.convert_to_tensor(inputs)
  dtype = _dtype_of_moments(inputs)
  values = ops.stop_gradient(ops.cast(inputs, dtype))
  rank = _rank(values)
  axis = _positive_axis(axis, rank)
  reduced = [i for i in range(rank) if i != axis]
  if mask is None:
    included = None
    count = _size(values, reduced, dtype)
  else:
    included = ops.expand_dims(ops.cast(mask, 'bool'), -1)
    count = _num_included(included, values, axis, reduced, dtype)

  def mean_of(terms):
    if included is not None:
      terms = ops.where(included, terms, ops.zeros_like(terms))
    # TensorFlow's fused kernels of batch normalization would be faster, but XLA
    # compiles them to E[x²] − E[x]², which cancels digits.
    return ops.divide_no_nan(_sum(terms, reduced), count)

  mean = mean_of(values)
  variance = mean_of(ops.square(values - mean))
  return BatchMoments(
      ops.reshape(count, [-1]) if len(count.shape) else count,
      ops.reshape(mean, [-1]),
      ops.reshape(variance, [-1]),
  )


def merge_moments(a: BatchMoments, b: BatchMoments) -> BatchMoments:
  """Computes the moments of two batches together: the law of total variance.

  The formula is the one of Chan et al., Updating Formulae and a Pairwise
  Algorithm for Computing Sample Variances, 1979. It does not cancel digits.

  Args:
    a: The count, mean and variance of one batch.
    b: The moments of another batch, with the same shapes and dtype.

  Returns:
    The moments of all values. Moments with count 0 change nothing.
  """
  a, b = BatchMoments(*a), BatchMoments(*b)
  count = a.count + b.count
  share = ops.divide_no_nan(b.count, count)
  difference = b.mean - a.mean
  return BatchMoments(
      count,
      a.mean + share * difference,
      (1 - share) * a.variance
      + share * b.variance
      + share * (1 - share) * ops.square(difference),
  )


def _dtype_of_moments(inputs: Any) -> str:
  is_float64 = keras.backend.standardize_dtype(inputs.dtype) == 'float64'
  return 'float64' if is_float64 else 'float32'


def _rank(values: Any) -> int:
  """The rank of a tensor, 0 if TensorFlow does not know it."""
  try:
    return len(values.shape)
  except ValueError:
    return 0


def _positive_axis(axis: int, rank: int) -> int:
  """The axis, counted from the first."""
  if not rank:
    raise ValueError('inputs must have a known rank of at least 1.')
  if not -rank <= axis < rank:
    raise ValueError(
        f'axis={axis} does not fit inputs of rank {rank}; use an axis from'
        f' {-rank} to {rank - 1}.'
    )
  return axis % rank


def _size(values: Any, axes: list[int], dtype: str) -> Any:
  """The product of the sizes of some axes, which may be unknown in a graph."""
  shape = ops.shape(values)
  return ops.convert_to_tensor(math.prod(shape[i] for i in axes), dtype)


def _num_included(
    included: Any, values: Any, axis: int, reduced: list[int], dtype: str
) -> Any:
  """The number of values that count: a scalar if all channels have the same."""
  shape = list(ops.shape(values))
  rank = _rank(included)
  sizes = [1] * (len(shape) - rank) + list(included.shape) if rank else []
  is_same = bool(sizes) and sizes[axis] == 1
  if is_same:
    shape[axis] = 1
  ones = ops.cast(ops.broadcast_to(included, shape), dtype)
  return ops.sum(ones) if is_same else _sum(ones, reduced)


def _sum(values: Any, axes: list[int]) -> Any:
  # PyTorch takes an empty list for all axes.
  return ops.sum(values, axis=axes, keepdims=True) if axes else values
