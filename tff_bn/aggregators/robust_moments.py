"""Aggregation of moments by a robust rule, for `moments_factories`."""

import collections
from collections.abc import Callable, Mapping
import math
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import attacked_rule
from tff_bn.aggregators import gathering
from tff_bn.aggregators import order_statistics
from tff_bn.aggregators import robust_rule
from tff_bn.aggregators import vector_layout
from tff_bn.common import checks
from tff_bn.layers.batch_moments import Moments

# Counts are clipped at this multiple of their median.
_LARGEST_COUNT = 10.0

# Computes a layer's variance from its position, the count, and the aggregated
# variances within and between the clients.
VarianceFn = Callable[[int, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


def statistics_rule(
    algorithm: str, options: Mapping[str, Any]
) -> Optional[robust_rule.Rule]:
  """Returns `statistics_aggregator`, which must be a rule for some algorithms.

  Raises:
    TypeError: If it is neither a `Rule` nor `None`.
  """
  rule = options.get('statistics_aggregator')
  checks.check_type(
      f'statistics_aggregator of {algorithm}',
      rule,
      (robust_rule.Rule, type(None)),
      'be a tff_bn.aggregators.Rule, such as'
      ' tff_bn.aggregators.CoordinateMedian()',
  )
  return rule


def create(
    name: str,
    rule: robust_rule.Rule,
    value_type: tff.Type,
    variance_fn: VarianceFn,
) -> tff.templates.AggregationProcess:
  """Creates the process of a `moments_factories.MomentsFactory` with a rule.

  `name` is the factory's name, for error messages.
  """
  aggregation = _RobustMoments(name, rule, value_type, variance_fn)

  @tff.tensorflow.computation
  def initial_state():
    return aggregation.initial_state()

  @tff.tensorflow.computation(value_type)
  def to_vector(value):
    return aggregation.to_vector(value)

  @tff.tensorflow.computation(
      gathering.gathered_type(to_vector.type_signature.result[0]),
      initial_state.type_signature.result,
  )
  def aggregate(gathered, state):
    return aggregation.aggregate(gathered, state)

  @tff.federated_computation
  def initialize():
    return tff.federated_eval(initial_state, tff.SERVER)

  @tff.federated_computation(
      initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
  )
  def next_fn(state, value):
    vectors = tff.federated_map(to_vector, value)
    return gathering.aggregate(vectors, aggregate, state)

  return tff.templates.AggregationProcess(initialize, next_fn)


class _RobustMoments:
  """The TensorFlow part of the process.

  A client's vector holds the counts of all layers, then all means, then all
  variances.
  """

  def __init__(
      self,
      name: str,
      rule: robust_rule.Rule,
      value_type: tff.Type,
      variance_fn: VarianceFn,
  ):
    self._layout = vector_layout.VectorLayout(name, _transposed(value_type))
    self._sizes = [math.prod(layer.mean.shape) for layer in value_type]
    self._num_means = sum(self._sizes)
    self._variance_fn = variance_fn
    self._attacked = None
    if isinstance(rule, attacked_rule.Attacked):
      self._attacked, rule = rule, rule.rule
    self._rule = rule

  def initial_state(self) -> collections.OrderedDict[str, Any]:
    dtype = self._layout.dtype
    return collections.OrderedDict(
        round_num=tf.zeros([], tf.int32),
        statistics=self._rule.initial_state(2 * self._num_means, dtype),
        spread=self._rule.initial_state(self._num_means, dtype),
    )

  def to_vector(self, value: list[Moments]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a client's vector, and whether the client takes part."""
    transposed = _transposed(value)
    return self._layout.to_vector(transposed), tf.reduce_any(
        [robust_rule.takes_part(count) for count in transposed[0]]
    )

  def aggregate(
      self,
      gathered: collections.OrderedDict[str, tf.Tensor],
      state: collections.OrderedDict[str, Any],
  ) -> tuple[list[Moments], collections.OrderedDict[str, Any]]:
    """Returns the aggregated moments and the new state."""
    gathered = collections.OrderedDict(gathered)
    if self._attacked is not None:
      gathered = self._attack(self._attacked, gathered, state)
    num_layers = len(self._sizes)
    counts = _bounded_sum(gathered['values'][:, :num_layers])
    statistics = gathered['values'][:, num_layers:]
    gathered['values'] = statistics
    result, statistics_state = self._rule.aggregate_gathered(
        gathered, state['statistics']
    )
    mean, within = tf.split(result, 2)
    deviation = statistics[:, : self._num_means] - mean
    # Attackers can send huge values, but a rule needs finite squares.
    largest = self._layout.dtype.max**0.5 / 1e3
    deviation = tf.clip_by_value(deviation, -largest, largest)
    gathered['values'] = tf.math.square(deviation)
    between, spread_state = self._rule.aggregate_gathered(
        gathered, state['spread']
    )
    variances = [
        self._variance_fn(layer, *parts)
        for layer, parts in enumerate(
            zip(
                tf.unstack(counts, num=num_layers),
                tf.split(within, self._sizes),
                tf.split(between, self._sizes),
            )
        )
    ]
    # Attackers can send negative variances.
    variance = tf.maximum(tf.concat(variances, axis=0), 0)
    vector = tf.concat([counts, mean, variance], axis=0)
    layers = zip(*self._layout.from_vector(vector), strict=True)
    return [Moments(*layer) for layer in layers], collections.OrderedDict(
        round_num=state['round_num'] + 1,
        statistics=statistics_state,
        spread=spread_state,
    )

  def _attack(
      self,
      attacked: attacked_rule.Attacked,
      gathered: collections.OrderedDict[str, tf.Tensor],
      state: collections.OrderedDict[str, Any],
  ) -> collections.OrderedDict[str, tf.Tensor]:
    """Replaces the attackers' counts, means and variances."""
    counts, statistics = tf.split(
        gathered['values'],
        [len(self._sizes), 2 * self._num_means],
        axis=1,
    )
    is_mean = np.arange(2 * self._num_means) < self._num_means
    statistics = attacked.corrupt(
        statistics,
        state['round_num'],
        is_mean,
        gathered['num_dropped'],
        state['statistics'],
    )
    counts = attacked.corrupt_counts(counts)
    left = robust_rule.without_abstaining(
        counts,
        tf.concat([counts, statistics], axis=1),
        gathered['num_dropped'],
    )
    left['num_abstained'] += gathered['num_abstained']
    return left


def _bounded_sum(counts: tf.Tensor) -> tf.Tensor:
  """Adds up the counts of all clients, `[n, k]`, which may be falsified.

  Each count is first clipped to between 0 and 10 times the layer's median.
  """
  num_clients = tf.shape(counts)[0]
  low, high = order_statistics.median_ranks(num_clients)
  ranks = tf.range(num_clients)
  shares = [tf.cast(tf.equal(ranks, r), counts.dtype) / 2 for r in (low, high)]
  # Unlike `tf.gather`, a matrix product also works without any clients.
  median = tf.linalg.matvec(
      tf.sort(counts, axis=0), tf.add_n(shares), transpose_a=True
  )
  most = _LARGEST_COUNT * tf.maximum(median, 0)
  return tf.reduce_sum(tf.clip_by_value(counts, 0, most), axis=0)


def _transposed(value: Any) -> list[list[Any]]:
  """Returns the counts, the means and the variances of moments or types."""
  return [[getattr(layer, name) for layer in value] for name in Moments._fields]
