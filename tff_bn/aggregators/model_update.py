"""Aggregates each part of a client's update with its own aggregator.

An update is an `OrderedDict` of parts, each a structure of tensors:

*   `trainable`: differences of the trainable variables (before minus after).
*   `statistics`: a list of moments, see `tff_bn.aggregators.moments_factories`.
*   `other_state`: differences of all other variables (before minus after).
*   Parts that an algorithm adds, under other names.
"""

import abc
import collections
from typing import Union

import tensorflow as tf
import tensorflow_federated as tff

AggregationFactory = Union[
    tff.aggregators.WeightedAggregationFactory,
    tff.aggregators.UnweightedAggregationFactory,
]


class ParticipatingFactory(
    tff.aggregators.UnweightedAggregationFactory, abc.ABC
):
  """An unweighted factory that has to know which clients take part.

  It is what other modules need to know of a `tff_bn.aggregators.Rule`, so that
  processes without a rule import no rule.
  """

  @abc.abstractmethod
  def create_participating(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """See `tff_bn.aggregators.Rule.create_participating`."""


def _zip(parts: collections.OrderedDict[str, tff.Value]) -> tff.Value:
  # TFF cannot zip an empty structure. An update without shared variables has no
  # parts.
  if not parts:
    return tff.federated_value(parts, tff.SERVER)
  return tff.federated_zip(parts)


def _not_nan(weight: tff.Value) -> tff.Value:
  """Replaces the weight NaN of dropped clients by 0."""

  @tff.tensorflow.computation(weight.type_signature.member)
  def not_nan(value):
    return tf.where(tf.math.is_nan(value), tf.zeros_like(value), value)

  return tff.federated_map(not_nan, weight)


def count_of(weight_type: tff.Type) -> tff.Computation:
  """Returns the computation of a client's terms of the numbers of clients.

  `num_participants` counts positive weights, `num_dropped` the weight NaN.
  """

  @tff.tensorflow.computation(weight_type)
  def count(weight):
    return collections.OrderedDict(
        num_participants=tf.cast(weight > 0, tf.int32),
        num_dropped=tf.cast(tf.math.is_nan(weight), tf.int32),
    )

  return count


class ModelUpdateFactory(tff.aggregators.WeightedAggregationFactory):
  """Composes one aggregator for each part of a client's update."""

  def __init__(
      self,
      model_aggregator: AggregationFactory,
      statistics_aggregator: tff.aggregators.UnweightedAggregationFactory,
  ):
    """Initializes the factory.

    Args:
      model_aggregator: The aggregator of all parts except the statistics. An
        unweighted factory ignores the clients' weights, but a
        `tff_bn.aggregators.Rule` leaves out dropped clients and clients with
        weight 0.
      statistics_aggregator: The aggregator of batch normalization statistics: a
        factory for lists of moments.
    """
    self._model_aggregator = model_aggregator
    self._statistics_aggregator = statistics_aggregator

  def _factory(self, part: str) -> AggregationFactory:
    if part == 'statistics':
      return self._statistics_aggregator
    return self._model_aggregator

  def create(
      self,
      value_type: tff.Type,
      weight_type: tff.Type,
  ) -> tff.templates.AggregationProcess:
    """Creates the aggregation process.

    Args:
      value_type: The type of a client's update.
      weight_type: The type of a client's weight: a float scalar, NaN if the
        client was dropped.

    Returns:
      A weighted process whose state, measurements and result are
      `OrderedDict`s with an entry for each part of the update. The result also
      has `num_participants`, the number of clients with a positive weight, and
      `num_dropped`, the number of clients with weight NaN.
    """
    processes = collections.OrderedDict()
    for part, part_type in tff.structure.iter_elements(value_type):
      factory = self._factory(part)
      if isinstance(factory, ParticipatingFactory):
        processes[part] = factory.create_participating(part_type, weight_type)
      elif isinstance(factory, tff.aggregators.WeightedAggregationFactory):
        processes[part] = factory.create(part_type, weight_type)
      else:
        processes[part] = factory.create(part_type)

    count = count_of(weight_type)

    @tff.federated_computation
    def initialize():
      return _zip(
          collections.OrderedDict(
              (part, process.initialize())
              for part, process in processes.items()
          )
      )

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      outputs = collections.OrderedDict()
      for part, process in processes.items():
        args = []
        if isinstance(self._factory(part), ParticipatingFactory):
          args = [weight]
        elif process.is_weighted:
          args = [_not_nan(weight)]
        outputs[part] = process.next(state[part], value[part], *args)
      state, result, measurements = (
          collections.OrderedDict(
              (part, getattr(output, field)) for part, output in outputs.items()
          )
          for field in ('state', 'result', 'measurements')
      )
      counts = tff.federated_sum(tff.federated_map(count, weight))
      for name in ('num_participants', 'num_dropped'):
        result[name] = counts[name]
      return tff.templates.MeasuredProcessOutput(
          _zip(state), _zip(result), _zip(measurements)
      )

    return tff.templates.AggregationProcess(initialize, next_fn)
