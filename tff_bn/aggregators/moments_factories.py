"""Aggregation of moments: naive, pooled, and corrected as in FBN."""

import abc
import collections
from collections.abc import Callable, Sequence
import math
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import attacked_rule
from tff_bn.aggregators import gathering
from tff_bn.aggregators import moments
from tff_bn.aggregators import order_statistics
from tff_bn.aggregators import robust_rule
from tff_bn.aggregators import vector_layout

# In medians of the clients' counts.
_LARGEST_COUNT = 10.0


class MomentsFactory(tff.aggregators.UnweightedAggregationFactory, abc.ABC):
  """Maps the clients' moments to one list of moments.

  With the average Agg over the clients, the mean is `M = Agg(mean_i)` and the
  variance `Agg(variance_i) + factor · Agg((mean_i - M)²)`. The factories differ
  in the factor.

  Agg is the mean weighted by `count`, or a robust rule, which counts clients
  alike and sees means and variances of all layers as one vector. With a rule,
  each count is bounded, too, before counts are added up: by 0, and by 10 times
  the median count.

  Attributes:
    rule: The rule, or `None`.
  """

  def __init__(self, rule: Optional[robust_rule.Rule] = None):
    """Initializes the factory.

    Args:
      rule: What stands in for the weighted mean, such as
        `tff_bn.aggregators.CoordinateMedian()`. Clients with a mean or variance
        that is not finite are then left out and counted. Default: none.

    Raises:
      TypeError: If `rule` is no `tff_bn.aggregators.Rule`.
    """
    if rule is not None and not isinstance(rule, robust_rule.Rule):
      raise TypeError(
          'rule must be a tff_bn.aggregators.Rule, such as'
          ' tff_bn.aggregators.CoordinateMedian(), but is a'
          f' {type(rule).__name__}.'
      )
    self.rule = rule

  @abc.abstractmethod
  def _factor(self, layer: int, count: tf.Tensor) -> Optional[tf.Tensor]:
    """The factor of the spread between the clients.

    Args:
      layer: The position in the list of moments.
      count: The sum of all clients' counts, a scalar.

    Returns:
      A scalar; `None` for 0.
    """

  def _weight(self, count: tf.Tensor) -> tf.Tensor:
    """A client's weight in the mean."""
    return count

  def _variance(
      self, layer: int, count: tf.Tensor, within: tf.Tensor, between: tf.Tensor
  ) -> tf.Tensor:
    factor = self._factor(layer, count)
    return within if factor is None else within + factor * between

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the aggregation process.

    Args:
      value_type: A list of moments.

    Returns:
      A process that maps the clients' moments to one list of the same type,
      where `count` is the sum of the counts. Without any client all entries
      are 0. Moments whose count is 0 or NaN are ignored; a rule takes NaN for a
      client that was dropped.

    Raises:
      TypeError: If `value_type` is not a list of moments.
      ValueError: If the factory does not fit the number of layers.
    """
    moments.check_moments_type(value_type)
    if self.rule is None:
      return self._create_mean(value_type)
    return self._create_robust(value_type)

  def _create_mean(
      self, value_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    def summarize(value):
      return [_summary(m, self._weight) for m in value]

    @tff.tensorflow.computation
    def zero():
      return summarize(
          [
              moments.layer_moments(
                  *(tf.zeros(t.shape, t.dtype) for t in layer)
              )
              for layer in value_type
          ]
      )

    summary_type = zero.type_signature.result

    @tff.tensorflow.computation(summary_type, summary_type)
    def merge_layers(a, b):
      return [_merge(x, y) for x, y in zip(a, b)]

    # Clients send moments, not summaries, which are larger.
    @tff.tensorflow.computation(summary_type, value_type)
    def accumulate(total, value):
      return [_merge(x, y) for x, y in zip(total, summarize(value))]

    @tff.tensorflow.computation(summary_type)
    def report(total):
      return [
          moments.layer_moments(
              m['count'],
              m['mean'],
              self._variance(layer, m['count'], m['within'], m['between']),
          )
          for layer, m in enumerate(total)
      ]

    @tff.federated_computation
    def initialize():
      return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      return tff.templates.MeasuredProcessOutput(
          state,
          tff.federated_aggregate(
              value, zero(), accumulate, merge_layers, report
          ),
          tff.federated_value((), tff.SERVER),
      )

    return tff.templates.AggregationProcess(initialize, next_fn)

  def _create_robust(
      self, value_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    # First all counts, then all means, then all variances.
    layout = vector_layout.VectorLayout(
        type(self).__name__, _transposed(value_type)
    )
    sizes = [math.prod(layer['mean'].shape) for layer in value_type]
    num_layers, num_means = len(sizes), sum(sizes)
    is_mean = np.arange(2 * num_means) < num_means
    attack = None
    rule = self.rule
    if isinstance(rule, attacked_rule.Attacked):
      attack, rule = rule, rule.rule

    @tff.tensorflow.computation
    def initial_state():
      return collections.OrderedDict(
          round_num=tf.zeros([], tf.int32),
          statistics=rule.initial_state(2 * num_means, layout.dtype),
          spread=rule.initial_state(num_means, layout.dtype),
      )

    state_type = initial_state.type_signature.result

    @tff.tensorflow.computation(value_type)
    def to_vector(value):
      value = _transposed(value)
      return (
          layout.to_vector(value),
          tf.reduce_any([robust_rule.takes_part(c) for c in value[0]]),
      )

    vector_type = to_vector.type_signature.result[0]
    gathered_type = gathering.gathered_type(vector_type)

    def attacked(gathered, round_num):
      counts, statistics = tf.split(
          gathered['values'], [num_layers, 2 * num_means], axis=1
      )
      statistics = attack.corrupt(
          statistics, round_num, is_mean, gathered['num_dropped']
      )
      counts = attack.corrupt_counts(counts)
      left = robust_rule.without_abstaining(
          counts,
          tf.concat([counts, statistics], axis=1),
          gathered['num_dropped'],
      )
      left['num_abstained'] += gathered['num_abstained']
      return left

    @tff.tensorflow.computation(gathered_type, state_type)
    def aggregate(gathered, state):
      gathered = collections.OrderedDict(gathered)
      if attack is not None:
        gathered = attacked(gathered, state['round_num'])
      counts = _bounded_sum(gathered['values'][:, :num_layers])
      statistics = gathered['values'][:, num_layers:]
      gathered['values'] = statistics
      result, statistics_state = rule.aggregate_gathered(
          gathered, state['statistics']
      )
      mean, within = tf.split(result, 2)
      deviation = statistics[:, :num_means] - mean
      # Squares of what attackers send have to be finite, as all values are.
      largest = layout.dtype.max**0.5 / 1e3
      deviation = tf.clip_by_value(deviation, -largest, largest)
      gathered['values'] = tf.math.square(deviation)
      between, spread_state = rule.aggregate_gathered(gathered, state['spread'])
      variance = tf.concat(
          [
              self._variance(layer, *parts)
              for layer, parts in enumerate(
                  zip(
                      tf.unstack(counts, num=num_layers),
                      tf.split(within, sizes),
                      tf.split(between, sizes),
                  )
              )
          ],
          axis=0,
      )
      # Attackers can send variances that are less than 0.
      vector = tf.concat([counts, mean, tf.maximum(variance, 0)], axis=0)
      state = collections.OrderedDict(
          round_num=state['round_num'] + 1,
          statistics=statistics_state,
          spread=spread_state,
      )
      layers = [
          moments.layer_moments(*layer)
          for layer in zip(*layout.from_vector(vector), strict=True)
      ]
      return layers, state

    @tff.federated_computation
    def initialize():
      return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      vectors = tff.federated_map(to_vector, value)
      gathered = gathering.gather(vectors[0], vectors[1])
      result = tff.federated_map(aggregate, (gathered, state))
      return tff.templates.MeasuredProcessOutput(
          result[1],
          result[0],
          tff.federated_zip(
              collections.OrderedDict(num_dropped=gathered['num_dropped'])
          ),
      )

    return tff.templates.AggregationProcess(initialize, next_fn)


def _merge(
    a: collections.OrderedDict[str, Any], b: collections.OrderedDict[str, Any]
) -> collections.OrderedDict[str, Any]:
  """Merges weighted summaries of sets: the spread within and between them.

  As `tff_bn.layers.batch_moments.merge_moments`, which adds both spreads up.
  """
  weight = a['weight'] + b['weight']
  share = tf.math.divide_no_nan(b['weight'], weight)
  difference = b['mean'] - a['mean']
  return collections.OrderedDict(
      weight=weight,
      count=a['count'] + b['count'],
      mean=tf.where(
          tf.math.is_finite(difference),
          a['mean'] + share * difference,
          # The difference overflowed, but the mean does not.
          (1 - share) * a['mean'] + share * b['mean'],
      ),
      within=(1 - share) * a['within'] + share * b['within'],
      between=(1 - share) * a['between'] + share * b['between']
      # 0 if one of them has no weight, even if the square overflows.
      + tf.math.multiply_no_nan(
          tf.math.square(difference), share * (1 - share)
      ),
  )


def _bounded_sum(counts: tf.Tensor) -> tf.Tensor:
  """Adds up counts of which some can be falsified.

  Args:
    counts: The clients' counts for each layer, one client in a row: `[n, k]`.

  Returns:
    The sum over the clients, `[k]`, of the counts that are at least 0 and at
    most 10 times the median; larger ones are taken for that.
  """
  num_clients = tf.shape(counts)[0]
  low, high = order_statistics.median_ranks(num_clients)
  ranks = tf.range(num_clients)
  shares = [tf.cast(tf.equal(ranks, r), counts.dtype) / 2 for r in (low, high)]
  # A matrix product has a result without any client, too.
  median = tf.linalg.matvec(
      tf.sort(counts, axis=0), tf.add_n(shares), transpose_a=True
  )
  most = _LARGEST_COUNT * tf.maximum(median, 0)
  return tf.reduce_sum(tf.clip_by_value(counts, 0, most), axis=0)


def _summary(
    layer: moments.Moments, weight: Callable[[tf.Tensor], tf.Tensor]
) -> collections.OrderedDict[str, Any]:
  """The summary of a client's moments; of nothing if its count is 0 or NaN."""
  found = layer['count'] > 0
  layer = moments.layer_moments(
      *(tf.where(found, x, tf.zeros_like(x)) for x in layer.values())
  )
  return collections.OrderedDict(
      weight=weight(layer['count']),
      count=layer['count'],
      mean=layer['mean'],
      within=layer['variance'],
      between=tf.zeros_like(layer['variance']),
  )


def _transposed(value: Any) -> list[list[Any]]:
  """The counts, the means and the variances of moments, or their types."""
  return [
      [layer[name] for layer in value] for name in ('count', 'mean', 'variance')
  ]


class NaiveMomentsFactory(MomentsFactory):
  """Means over clients, of means and variances alike.

  `mean = Σ count_i mean_i / Σ count_i`, and the same for the variance. This is
  what FedAvg does with batch normalization statistics ("BN-Y"). It ignores
  that the clients' means differ, so the variance comes out too small.
  """

  def _factor(self, layer, count):
    return None


class PooledMomentsFactory(MomentsFactory):
  """The moments of the union of the clients' data (law of total variance).

  `mean = Σ count_i mean_i / Σ count_i` and
  `variance = Σ count_i (variance_i + (mean_i - mean)²) / Σ count_i`.
  """

  def _factor(self, layer, count):
    return tf.ones_like(count)


class FbnMomentsFactory(MomentsFactory):
  """FBN's running statistics, corrected for the spread between the clients.

  Guerraoui et al., Overcoming the Challenges of Batch Normalization in
  Federated Learning, arXiv:2405.14670, algorithm 2, lines 9 and 10. Client i
  sends the running mean `r_i = (1-β) R + β m_i` and the running variance
  `s_i = (1-β) S + β N/(N-1) v_i` that it made of the shared ones (R, S) and of
  the mean and the biased variance of its K_i values, with N = Σ K_i. Then

      R' = Agg(r_i)  and  S' = Agg(s_i) + N/((N-1) β) · Agg((r_i - R')²),

  which are those of batch normalization on the union of the values, with the
  unbiased variance, if Agg is the mean.
  """

  def __init__(
      self,
      momentum: Union[float, Sequence[float]],
      rule: Optional[robust_rule.Rule] = None,
      *,
      pooled: bool = True,
      unbiased: bool = True,
  ):
    """Initializes the factory.

    Args:
      momentum: 1 - β, of all layers or of each.
      rule: See `MomentsFactory`.
      pooled: Whether the mean is weighted by `count`, the number of a client's
        values K_i, so that the statistics are exact whatever these are. Else
        clients count alike, as in the paper, where all have the same K. A rule
        counts clients alike in any case.
      unbiased: Whether there are the factors N/(N-1), in what clients send and
        in the correction; else both are without.

    Raises:
      TypeError: See `MomentsFactory`.
      ValueError: If a momentum is not in [0, 1).
    """
    super().__init__(rule)
    for value in np.atleast_1d(momentum):
      if not 0 <= value < 1:
        raise ValueError(
            f'momentum={momentum} must be at least 0 and less than 1.'
        )
    self._momentum = momentum
    self._pooled = pooled
    self._unbiased = unbiased

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """See `MomentsFactory.create`."""
    moments.check_moments_type(value_type)
    if np.ndim(self._momentum) and len(self._momentum) != len(value_type):
      raise ValueError(
          f'momentum has {len(self._momentum)} values, but there are'
          f' {len(value_type)} layers.'
      )
    return super().create(value_type)

  def _factor(self, layer, count):
    momentum = (
        self._momentum[layer] if np.ndim(self._momentum) else self._momentum
    )
    rate = tf.constant(1 - momentum, count.dtype)
    if not self._unbiased:
      return 1 / rate
    return moments.unbiased_factor(count) / rate

  def _weight(self, count):
    return count if self._pooled else tf.cast(count > 0, count.dtype)
