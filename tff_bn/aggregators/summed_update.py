"""Aggregates all that a client sends by one factory of sums.

Secure aggregation and differential privacy know only sums. A message of
`ModelUpdateFactory` becomes a structure of sums, and their means a result:

*   `weight`: w, the client's weight, 0 if it was dropped.
*   `update`: w times each part of the update but the statistics.
*   `statistics`: see `tff_bn.aggregators.moments_sums`.

An exchange within a round, as in FedTAN, is a structure `exchange`.
"""

import abc
import collections
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import model_update
from tff_bn.aggregators import moments_factories
from tff_bn.common import numerics


class RoundSums(tff.aggregators.UnweightedAggregationFactory, abc.ABC):
  """A factory of sums that has to know the other messages of a round.

  Attributes:
    num_clients: If not `None`, each client that takes part has weight 1, means
      are sums divided by this number, and no weights or counts are sent.
    smallest_variance: The smallest new variance of a channel, as a share of its
      running variance.
  """

  num_clients: Optional[int] = None
  smallest_variance: float = 0.0

  @abc.abstractmethod
  def exchange_factories(
      self, num_exchanges: int
  ) -> Sequence[tff.aggregators.UnweightedAggregationFactory]:
    """Returns the factories of the exchanges before the update."""

  @abc.abstractmethod
  def update_factory(
      self, num_exchanges: int
  ) -> tff.aggregators.UnweightedAggregationFactory:
    """Returns the factory of the update, after a number of exchanges."""

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the process of an update without exchanges before it."""
    return self.update_factory(0).create(value_type)


class PlainSums(RoundSums):
  """Uses one factory of sums for each message of a round."""

  def __init__(self, factory: tff.aggregators.UnweightedAggregationFactory):
    """Initializes it with the factory."""
    self._factory = factory

  def exchange_factories(self, num_exchanges):
    """See the base class."""
    return [self._factory] * num_exchanges

  def update_factory(self, num_exchanges):
    """See the base class."""
    return self._factory


def of_round(
    factory: tff.aggregators.UnweightedAggregationFactory,
) -> RoundSums:
  """Returns any factory of sums as one that knows the messages of a round."""
  return factory if isinstance(factory, RoundSums) else PlainSums(factory)


class ExchangeFactory(tff.aggregators.UnweightedAggregationFactory):
  """Sums the values of an exchange, as a structure `exchange`."""

  def __init__(self, factory: tff.aggregators.UnweightedAggregationFactory):
    """Initializes it with the factory of the sums."""
    self._factory = factory

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates a process whose result has the type of a client's values."""
    named = tff.to_type(collections.OrderedDict(exchange=value_type))
    process = self._factory.create(named)

    @tff.tensorflow.computation(value_type)
    def to_named(value):
      return collections.OrderedDict(exchange=value)

    # The type of the sums, but with names for TensorFlow code.
    @tff.tensorflow.computation(named)
    def to_value(named):
      return named['exchange']

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      output = process.next(state, tff.federated_map(to_named, value))
      return tff.templates.MeasuredProcessOutput(
          output.state,
          tff.federated_map(to_value, output.result),
          output.measurements,
      )

    return tff.templates.AggregationProcess(process.initialize, next_fn)


class SummedUpdate:
  """Aggregates the updates of a round.

  Attributes:
    initialize: The computation of the initial state at the server.
    next: The computation of a round. It takes the state, the clients' updates
      and weights, and the shared running statistics, once at the clients and
      once at the server: a list of means and variances for the update's
      statistics. It returns the new state, a result as of `ModelUpdateFactory`,
      and measurements.
  """

  def __init__(
      self,
      sums: RoundSums,
      moments: moments_factories.MomentsFactory,
      update_type: tff.StructType,
      weight_type: tff.Type,
      num_exchanges: int = 0,
  ):
    """Builds the computations.

    Args:
      sums: The factory of sums.
      moments: How the clients' moments are combined, without a rule.
      update_type: See `ModelUpdateFactory.create`.
      weight_type: See `ModelUpdateFactory.create`.
      num_exchanges: The number of exchanges before the update.
    """
    self._num_clients = sums.num_clients
    parts = dict(tff.structure.iter_elements(update_type))
    self._parts = list(parts)
    self._moments = None
    self._references_type = tff.to_type([])
    if 'statistics' in parts:
      statistics_type = moments_factories.to_moments_type(parts['statistics'])
      self._moments = moments.sums(
          statistics_type, sums.num_clients, sums.smallest_variance
      )
      self._references_type = tff.to_type(
          [(layer.mean, layer.variance) for layer in statistics_type]
      )
    self._build(sums, update_type, weight_type, num_exchanges)

  def _build(
      self,
      sums: RoundSums,
      update_type: tff.StructType,
      weight_type: tff.Type,
      num_exchanges: int,
  ) -> None:
    """Builds the computations from the types."""

    @tff.tensorflow.computation(update_type, weight_type, self._references_type)
    def to_sums(update, weight, references):
      return self._to_sums(update, weight, references)

    sums_type = to_sums.type_signature.result
    process = sums.update_factory(num_exchanges).create(sums_type)
    count = model_update.count_of(weight_type)

    # A factory's result has this type, but may lack the names for TensorFlow.
    @tff.tensorflow.computation(
        sums_type, count.type_signature.result, self._references_type
    )
    def to_result(total, counts, references):
      return self._to_result(total, counts, references)

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(update_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
        tff.FederatedType(self._references_type, tff.CLIENTS),
        tff.FederatedType(self._references_type, tff.SERVER),
    )
    def next_fn(state, update, weight, of_clients, references):
      output = process.next(
          state, tff.federated_map(to_sums, (update, weight, of_clients))
      )
      # The true numbers say something about single clients.
      counts = (
          tff.federated_sum(tff.federated_map(count, weight))
          if self._num_clients is None
          else tff.federated_value(self._fixed_counts(), tff.SERVER)
      )
      return tff.templates.MeasuredProcessOutput(
          output.state,
          tff.federated_map(to_result, (output.result, counts, references)),
          output.measurements,
      )

    self.initialize = process.initialize
    self.next = next_fn

  def _to_sums(
      self, update: Any, weight: tf.Tensor, references: Any
  ) -> collections.OrderedDict[str, Any]:
    """Returns what a client sends."""
    takes_part = weight > 0  # False for NaN.
    sums: collections.OrderedDict[str, Any] = collections.OrderedDict()
    if self._num_clients is not None:
      weight = tf.ones_like(weight)
    else:
      sums['weight'] = tf.where(takes_part, weight, tf.zeros_like(weight))
    others = _others(update)
    if others:
      sums['update'] = numerics.where_or_zero(
          takes_part,
          tf.nest.map_structure(lambda v: tf.cast(weight, v.dtype) * v, others),
      )
    if self._moments is not None:
      sums['statistics'] = self._moments.to_sums(
          update['statistics'], references
      )
    return sums

  def _to_result(
      self, total: Any, counts: Any, references: Any
  ) -> collections.OrderedDict[str, Any]:
    """Returns the result from the sums."""
    weight = self._num_clients
    if weight is None:
      # Noise can make it negative.
      weight = tf.maximum(total['weight'], 0)
    result: collections.OrderedDict[str, Any] = collections.OrderedDict()
    for name in self._parts:
      if name == 'statistics':
        assert self._moments is not None
        result[name] = self._moments.from_sums(total[name], references)
      else:
        result[name] = tf.nest.map_structure(
            lambda v: tf.math.divide_no_nan(v, tf.cast(weight, v.dtype)),
            total['update'][name],
        )
    result.update(counts)
    return result

  def _fixed_counts(self) -> collections.OrderedDict[str, np.int32]:
    """Returns the numbers of clients with weight, and of dropped ones."""
    return collections.OrderedDict(
        num_participants=np.int32(self._num_clients),
        num_dropped=np.int32(0),
    )


def _others(update: Any) -> collections.OrderedDict[str, Any]:
  """Returns the parts of an update that are not statistics."""
  return collections.OrderedDict(
      (name, part) for name, part in update.items() if name != 'statistics'
  )
