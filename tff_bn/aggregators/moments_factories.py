"""Aggregation of moments: naive, pooled, and corrected as in FBN."""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import model_update
from tff_bn.aggregators import moments_summary
from tff_bn.aggregators import moments_sums
from tff_bn.aggregators import stateless
from tff_bn.catalog import value_types
from tff_bn.layers.batch_moments import Moments

if TYPE_CHECKING:
  from tff_bn.aggregators import robust_rule

layer_moments = Moments


def layer_moments_type(num_channels: int, dtype: Any = np.float32) -> tff.Type:
  """Returns the TFF type of one layer's `Moments`."""
  vector = tff.TensorType(dtype, [num_channels])
  return tff.to_type(Moments(tff.TensorType(dtype), vector, vector))


def to_moments_type(value_type: tff.Type) -> tff.Type:
  """Returns the type of a list of moments with `Moments` as containers.

  Raises:
    TypeError: If `value_type` is not a list of moments.
  """
  if not isinstance(value_type, tff.StructType) or not all(
      isinstance(layer, tff.StructType)
      and [name for name, _ in tff.structure.iter_elements(layer)]
      == list(Moments._fields)
      for layer in value_type
  ):
    raise TypeError(
        'A moments factory aggregates a list of <count, mean, variance>, one'
        f' for each batch normalization layer, but was given {value_type}.'
    )
  return tff.to_type([Moments(*layer) for layer in value_type])


class MomentsMean:
  """The TensorFlow part of a `MomentsFactory` without a rule.

  A total is what is known of a set of clients.
  """

  def __init__(
      self,
      value_type: tff.StructType,
      weight: Callable[[tf.Tensor], tf.Tensor],
      variance: Callable[[int, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor],
  ):
    """Initializes it.

    Args:
      value_type: The type of a client's moments, see `to_moments_type`.
      weight: Maps a client's count to its weight.
      variance: Computes a layer's variance from its position, the count, and
        the variances within and between the clients.
    """
    self._joined = moments_summary.joined_by_dtype(value_type)
    self._weight = weight
    self._variance = variance

  def of_nobody(self) -> list[moments_summary.Summary]:
    """Returns the total of no clients."""
    return [layers.of_nobody() for layers in self._joined]

  def add(
      self, total: list[moments_summary.Summary], value: list[Moments]
  ) -> list[moments_summary.Summary]:
    """Adds a client's moments to a total."""
    return [
        layers.merge(x, layers.of_client(value, self._weight))
        for layers, x in zip(self._joined, total)
    ]

  def merge(
      self,
      a: list[moments_summary.Summary],
      b: list[moments_summary.Summary],
  ) -> list[moments_summary.Summary]:
    """Merges the totals of disjoint sets of clients."""
    return [layers.merge(x, y) for layers, x, y in zip(self._joined, a, b)]

  def report(self, total: list[moments_summary.Summary]) -> list[Moments]:
    """Returns the moments of all clients in a total."""
    summaries = {}
    for layers, summary in zip(self._joined, total):
      summaries.update(layers.by_layer(summary))
    return [
        Moments(
            s.count,
            s.mean,
            self._variance(place, s.count, s.within, s.between),
        )
        for place, s in sorted(summaries.items())
    ]


class MomentsFactory(tff.aggregators.UnweightedAggregationFactory, abc.ABC):
  """Maps the clients' moments to one list of moments.

  With the average Agg over the clients, the mean is `M = Agg(mean_i)` and the
  variance `Agg(variance_i) + factor · Agg((mean_i - M)²)`. The factories differ
  in the factor.

  By default, Agg is the mean weighted by `count`. It can be a robust rule,
  which aggregates the means and variances of all layers as one vector and gives
  all clients the same weight. With a rule, each count is also clipped to
  [0, 10 · median count] before the counts are added up.

  Attributes:
    rule: The rule, or `None`.
  """

  def __init__(self, rule: Optional['robust_rule.Rule'] = None):
    """Initializes the factory.

    Args:
      rule: The rule that replaces the weighted mean, such as
        `tff_bn.aggregators.CoordinateMedian()`. It leaves out clients with a
        mean or variance that is not finite, and counts them in the
        measurements. Default: the weighted mean.

    Raises:
      TypeError: If `rule` is no `tff_bn.aggregators.Rule`.
    """
    if rule is not None and not isinstance(
        rule, model_update.ParticipatingFactory
    ):
      raise TypeError(
          'rule must be a tff_bn.aggregators.Rule, such as'
          ' tff_bn.aggregators.CoordinateMedian(), but is a'
          f' {type(rule).__name__}.'
      )
    self.rule = rule

  @abc.abstractmethod
  def _factor(self, layer: int, count: tf.Tensor) -> Optional[tf.Tensor]:
    """Returns the factor of the spread between the clients; `None` for 0.

    `layer` is the position in the list of moments, `count` the sum of all
    clients' counts.
    """

  # Whether `_factor` can be another one than `None`, and whether `_weight` is
  # the count.
  _has_spread = True
  _weighs_by_count = True

  def _weight(self, count: tf.Tensor) -> tf.Tensor:
    """Returns a client's weight in the mean."""
    return count

  def sums(
      self,
      value_type: tff.Type,
      num_clients: Optional[int] = None,
      smallest_variance: float = 0.0,
  ) -> moments_sums.MomentsSums:
    """Returns the same aggregation as sums over the clients.

    Args:
      value_type: A list of moments.
      num_clients: See `MomentsSums`.
      smallest_variance: See `MomentsSums`.

    Raises:
      ValueError: If the factory has a rule, which needs the clients' values.
    """
    if self.rule is not None:
      raise ValueError(
          f'{type(self).__name__} has the rule {type(self.rule).__name__},'
          ' which needs the values of all clients, but gets only their sums.'
      )
    return moments_sums.MomentsSums(
        to_moments_type(value_type),
        None if self._weighs_by_count else self._weight,
        self._variance if self._has_spread else None,
        num_clients,
        smallest_variance,
    )

  def _variance(
      self, layer: int, count: tf.Tensor, within: tf.Tensor, between: tf.Tensor
  ) -> tf.Tensor:
    factor = self._factor(layer, count)
    return within if factor is None else within + factor * between

  def mean(self, value_type: tff.StructType) -> 'MomentsMean':
    """Returns the computation of the weighted mean, see `to_moments_type`."""
    return MomentsMean(value_type, self._weight, self._variance)

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the aggregation process.

    Args:
      value_type: A list of moments.

    Returns:
      A process that maps the clients' moments to one list of `Moments`, where
      `count` is the sum of the counts. Without any client all entries are 0.
      Moments with count 0 or NaN are ignored; a rule counts a client with count
      NaN as dropped.

    Raises:
      TypeError: If `value_type` is not a list of moments.
      ValueError: If the factory does not fit the number of layers.
    """
    value_type = to_moments_type(value_type)
    if self.rule is None:
      return self._create_mean(value_type)
    # Processes without a rule need none of the rules' modules.
    from tff_bn.aggregators import robust_moments

    return robust_moments.create(
        type(self).__name__, self.rule, value_type, self._variance
    )

  def _create_mean(
      self, value_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    mean = self.mean(value_type)

    @tff.tensorflow.computation
    def zero():
      return mean.of_nobody()

    summary_type = zero.type_signature.result

    @tff.tensorflow.computation(summary_type, summary_type)
    def merge(a, b):
      return mean.merge(a, b)

    # Clients send moments, not summaries, which are larger.
    @tff.tensorflow.computation(summary_type, value_type)
    def accumulate(total, value):
      return mean.add(total, value)

    @tff.tensorflow.computation(summary_type)
    def report(total):
      return mean.report(total)

    def next_fn(state, value):
      return tff.templates.MeasuredProcessOutput(
          state,
          tff.federated_aggregate(value, zero(), accumulate, merge, report),
          tff.federated_value((), tff.SERVER),
      )

    return stateless.build(next_fn, value_type)


class NaiveMomentsFactory(MomentsFactory):
  """Averages means and variances over the clients.

  `mean = Σ count_i mean_i / Σ count_i`, and the same for the variance. This is
  what FedAvg does with batch normalization statistics ("BN-Y"). It ignores
  that the clients' means differ, so it underestimates the variance.
  """

  _has_spread = False

  def _factor(self, layer, count):
    return None


class PooledMomentsFactory(MomentsFactory):
  """Computes the moments of the clients' pooled data: law of total variance.

  `mean = Σ count_i mean_i / Σ count_i` and
  `variance = Σ count_i (variance_i + (mean_i - mean)²) / Σ count_i`.
  """

  def _factor(self, layer, count):
    return tf.ones_like(count)


class FbnMomentsFactory(MomentsFactory):
  """Corrects FBN's running statistics for the spread between the clients.

  Guerraoui et al., Overcoming the Challenges of Batch Normalization in
  Federated Learning, arXiv:2405.14670, algorithm 2, lines 9 and 10. Client i
  sends the running mean `r_i = (1-β) R + β m_i` and the running variance
  `s_i = (1-β) S + β N/(N-1) v_i`, computed from the shared statistics (R, S)
  and from the mean m_i and the biased variance v_i of its K_i values, with
  N = Σ K_i. Then

      R' = Agg(r_i)  and  S' = Agg(s_i) + N/((N-1) β) · Agg((r_i - R')²).

  If Agg is the mean, these are the statistics of batch normalization on the
  pooled values, with the unbiased variance.
  """

  def __init__(
      self,
      momentum: Union[float, Sequence[float]],
      rule: Optional['robust_rule.Rule'] = None,
      *,
      pooled: bool = True,
      unbiased: bool = True,
  ):
    """Initializes the factory.

    Args:
      momentum: 1 - β, of all layers or of each.
      rule: See `MomentsFactory`.
      pooled: Whether to weight the mean by `count`, the number K_i of a
        client's values, which keeps the statistics exact if the K_i differ. If
        False, all clients have the same weight, as in the paper, where all K_i
        are equal. Rules always give all clients the same weight.
      unbiased: Whether the clients' variances and the correction contain the
        factor N/(N-1).

    Raises:
      TypeError: If a momentum is no number; see `MomentsFactory`, too.
      ValueError: If a momentum is not in [0, 1).
    """
    super().__init__(rule)
    self._momentums = np.atleast_1d(momentum).tolist()
    for value in self._momentums:
      value_types.MOMENTUM.check('momentum', value, self)
    self._is_shared = not np.ndim(momentum)
    self._weighs_by_count = pooled
    self._unbiased = unbiased

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """See `MomentsFactory.create`."""
    value_type = to_moments_type(value_type)
    num_given, num_layers = len(self._momentums), len(value_type)
    if not self._is_shared and num_given != num_layers:
      raise ValueError(
          f'momentum has {num_given} values, but there are {num_layers} layers.'
      )
    return super().create(value_type)

  def _factor(self, layer, count):
    momentum = self._momentums[0 if self._is_shared else layer]
    rate = tf.constant(1 - momentum, count.dtype)
    if not self._unbiased:
      return 1 / rate
    # N/(N-1), but N for less than two values.
    return count / tf.maximum(count - 1, 1) / rate

  def _weight(self, count):
    return count if self._weighs_by_count else tf.cast(count > 0, count.dtype)
