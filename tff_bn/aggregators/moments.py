"""Aggregators of batch normalization statistics: naive, pooled and FBN's.

A client's statistics of one layer are *moments*: the number of values that they
describe (or any other weight), the mean and the variance of each channel. All
factories here map a list of moments, one entry for each layer, to the moments
of all clients together, so that any can stand in for another.
"""

import collections
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.layers import batch_moments

Moments = collections.OrderedDict[str, Any]


def layer_moments(count: Any, mean: Any, variance: Any) -> Moments:
  """Returns the moments of one layer.

  Args:
    count: A scalar: how many values the statistics describe, or the client's
      weight. Moments with count 0 are ignored.
    mean: A vector with the mean of each channel.
    variance: A vector with the (biased) variance of each channel.

  Returns:
    `OrderedDict(count=..., mean=..., variance=...)`.
  """
  return collections.OrderedDict(count=count, mean=mean, variance=variance)


def layer_moments_type(num_channels: int, dtype: Any = np.float32) -> tff.Type:
  """The TFF type of one layer's moments."""
  vector = tff.TensorType(dtype, [num_channels])
  return tff.to_type(layer_moments(tff.TensorType(dtype), vector, vector))


def check_moments_type(value_type: tff.Type) -> None:
  """Raises a `TypeError` if `value_type` is not a list of moments."""
  if not isinstance(value_type, tff.StructType) or not all(
      isinstance(layer, tff.StructType)
      and [name for name, _ in tff.structure.iter_elements(layer)]
      == ['count', 'mean', 'variance']
      for layer in value_type
  ):
    raise TypeError(
        'A moments factory aggregates a list of <count, mean, variance>, one'
        f' for each batch normalization layer, but was given {value_type}.'
    )


def merge(a: Moments, b: Moments) -> Moments:
  """The moments of the union of two disjoint sets: law of total variance.

  Args:
    a: The moments of one layer, tensors or arrays.
    b: The moments of the other set.

  Returns:
    `count = count_a + count_b`, `mean` and `variance` weighted by the counts,
    with the spread of the means added to the variance; `a` where `b` has count
    0, and the reverse.
  """
  return layer_moments(*batch_moments.merge_moments(a.values(), b.values()))


def unbiased_factor(count: tf.Tensor) -> tf.Tensor:
  """The factor N/(N-1) that makes a variance of N values unbiased.

  Args:
    count: N, a float scalar.

  Returns:
    The factor, never more than 2; N for less than two values.
  """
  return count / tf.maximum(count - 1, 1)
