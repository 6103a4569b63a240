"""Aggregators of batch normalization statistics: naive and pooled.

A client's statistics of one layer are *moments*: the number of values that they
describe (or any other weight), the mean and the variance of each channel. All
factories here map a list of moments, one entry for each layer, to the moments
of all clients together, so that either can stand in for the other.
"""

import abc
import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

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

  In the form of Chan et al. 1979, which unlike sums of squares does not cancel
  digits where a mean is large against the deviation.

  Args:
    a: The moments of one layer, tensors or arrays.
    b: The moments of the other set.

  Returns:
    `count = count_a + count_b`, `mean` and `variance` weighted by the counts,
    with the spread of the means added to the variance; `a` where `b` has count
    0, and the reverse.
  """
  count = a['count'] + b['count']
  share = tf.math.divide_no_nan(b['count'], count)
  difference = b['mean'] - a['mean']
  return layer_moments(
      count,
      a['mean'] + share * difference,
      (1 - share) * a['variance']
      + share * b['variance']
      + share * (1 - share) * tf.math.square(difference),
  )


class _MomentsFactory(tff.aggregators.UnweightedAggregationFactory):
  """Maps the clients' moments to one list of moments; keeps no state."""

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the aggregation process.

    Args:
      value_type: A list of moments.

    Returns:
      A process that maps the clients' moments to one list of the same type,
      where `count` is the sum of the counts. With count 0 all entries are 0.

    Raises:
      TypeError: If `value_type` is not a list of moments.
    """
    check_moments_type(value_type)
    aggregate = self._build_aggregation(value_type)

    @tff.federated_computation
    def initialize():
      return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      return tff.templates.MeasuredProcessOutput(
          state, aggregate(value), tff.federated_value((), tff.SERVER)
      )

    return tff.templates.AggregationProcess(initialize, next_fn)

  @abc.abstractmethod
  def _build_aggregation(
      self, value_type: tff.Type
  ) -> Callable[[tff.Value], tff.Value]:
    """Returns a function from moments at CLIENTS to moments at SERVER."""


class NaiveMomentsFactory(_MomentsFactory):
  """Means over clients, of means and variances alike.

  `mean = Σ count_i mean_i / Σ count_i`, and the same for the variance. This is
  what FedAvg does with batch normalization statistics ("BN-Y"). It ignores
  that the clients' means differ, so the variance comes out too small.
  """

  def _build_aggregation(self, value_type):
    @tff.tensorflow.computation(value_type)
    def weight(value):
      return [
          layer_moments(
              m['count'], m['count'] * m['mean'], m['count'] * m['variance']
          )
          for m in value
      ]

    @tff.tensorflow.computation(weight.type_signature.result)
    def divide(total):
      return [
          layer_moments(
              m['count'],
              tf.math.divide_no_nan(m['mean'], m['count']),
              tf.math.divide_no_nan(m['variance'], m['count']),
          )
          for m in total
      ]

    return lambda value: tff.federated_map(
        divide, tff.federated_sum(tff.federated_map(weight, value))
    )


class PooledMomentsFactory(_MomentsFactory):
  """The moments of the union of the clients' data (law of total variance).

  `mean = Σ count_i mean_i / Σ count_i` and
  `variance = Σ count_i (variance_i + (mean_i - mean)²) / Σ count_i`.
  """

  def _build_aggregation(self, value_type):
    @tff.tensorflow.computation
    def zero():
      return [
          layer_moments(*(tf.zeros(t.shape, t.dtype) for t in layer))
          for layer in value_type
      ]

    @tff.tensorflow.computation(value_type, value_type)
    def merge_layers(a, b):
      return [merge(x, y) for x, y in zip(a, b)]

    @tff.tensorflow.computation(value_type)
    def report(total):
      return total

    return lambda value: tff.federated_aggregate(
        value, zero(), merge_layers, merge_layers, report
    )
