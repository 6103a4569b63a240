"""The weighted mean of the clients' values, without intermediate overflow."""

import collections
import functools
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import stateless
from tff_bn.common import checks
from tff_bn.common import numerics

# The weighted mean of a set of clients, and the sum of their weights.
Total = collections.OrderedDict[str, Any]


class WeightedMeanFactory(tff.aggregators.WeightedAggregationFactory):
  """Averages values: `Σ weight_i value_i / Σ weight_i`.

  `tff.aggregators.MeanFactory` sums `weight_i value_i`, which overflows in
  float32 if a client with 1000 examples sends a value of 1e36. This factory
  updates a running mean instead: `(1 - share) mean + share value`, with
  `share = weight / Σ weights so far`. So the result is finite if all values
  are. The weights are summed in float64.

  A client whose weight is not positive and finite is ignored, whatever its
  value. If all clients are ignored, the result is 0.
  """

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the aggregation process.

    Args:
      value_type: The type of a client's value: a structure of float tensors
        with static shapes.
      weight_type: The type of a client's weight, a number.

    Returns:
      A weighted process without a state and without measurements:
      `<()@SERVER, {V}@CLIENTS, {W}@CLIENTS> -> <state=()@SERVER,
      result=V@SERVER, measurements=()@SERVER>`.
    """
    return _process(value_type, weight_type)


@functools.lru_cache(maxsize=64)
def _process(
    value_type: tff.Type, weight_type: tff.Type
) -> tff.templates.AggregationProcess:
  """Creates the process once for all algorithms of a model."""

  @tff.tensorflow.computation
  def zero():
    return of_nobody(value_type)

  total_type = zero.type_signature.result
  mean_type = total_type['mean']

  @tff.tensorflow.computation(total_type, (mean_type, weight_type))
  def accumulate(total, member):
    return add(total, *member)

  @tff.tensorflow.computation(total_type, total_type)
  def merge(a, b):
    return _combine(a, b)

  @tff.tensorflow.computation(total_type)
  def report(total):
    return total['mean']

  def next_fn(state, value, weight):
    return tff.templates.MeasuredProcessOutput(
        state,
        tff.federated_aggregate(
            tff.federated_zip((value, weight)),
            zero(),
            accumulate,
            merge,
            report,
        ),
        tff.federated_value((), tff.SERVER),
    )

  return stateless.build(next_fn, value_type, weight_type)


def check_mean(name: str, model_aggregator: Any) -> None:
  """Raises a `TypeError` if a builder's `model_aggregator` is no mean.

  Args:
    name: The algorithm that needs the mean.
    model_aggregator: The argument; `None` is the mean.
  """
  checks.check_type(
      'model_aggregator',
      model_aggregator,
      (WeightedMeanFactory, tff.aggregators.MeanFactory, type(None)),
      f'be a weighted mean, which {name} needs, such as'
      ' tff_bn.aggregators.WeightedMeanFactory()',
  )


def of_nobody(value_type: tff.Type) -> Total:
  """Returns the total of no clients."""
  return collections.OrderedDict(
      weight=tf.zeros([], tf.float64),
      mean=tff.types.structure_from_tensor_type_tree(
          lambda t: tf.zeros(t.shape, t.dtype), value_type
      ),
  )


def add(total: Total, value: Any, weight: tf.Tensor) -> Total:
  """Adds a client's value to a total, unless its weight is to be ignored."""
  weight = tf.cast(weight, tf.float64)
  counts = tf.logical_and(weight > 0, tf.math.is_finite(weight))
  weight = tf.where(counts, weight, tf.zeros_like(weight))
  return _combine(total, collections.OrderedDict(weight=weight, mean=value))


def _combine(a: Total, b: Total) -> Total:
  """Combines two weighted means."""
  weight = a['weight'] + b['weight']
  share = tf.math.divide_no_nan(b['weight'], weight)
  # A deep model has hundreds of values, nearly always of one dtype.
  shares = {
      dtype: (tf.cast(1 - share, dtype), tf.cast(share, dtype))
      for dtype in dict.fromkeys(m.dtype for m in tf.nest.flatten(a['mean']))
  }

  def moved(means, values):
    return [
        shares[mean.dtype][0] * mean + shares[mean.dtype][1] * value
        for mean, value in zip(means, values, strict=True)
    ]

  def added(means, values):
    # A mean without weight is not needed.
    return numerics.choose(
        a['weight'] > 0, moved, lambda _, values: values, means, values
    )

  mean = numerics.choose(
      b['weight'] > 0, added, lambda means, _: means, a['mean'], b['mean']
  )
  return collections.OrderedDict(weight=weight, mean=mean)
