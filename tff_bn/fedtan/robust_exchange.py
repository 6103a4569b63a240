"""A robust rule in place of the sums of an exchange of FedTAN."""

import collections

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import model_update
from tff_bn.aggregators import moments_factories
from tff_bn.fedtan.synchronized_batch_norm import Answer


class RobustExchangeFactory(tff.aggregators.WeightedAggregationFactory):
  """Combines the clients' values of an exchange by a rule.

  *   `Answer.MEAN`: the rule's aggregate of the values of all questions as one
      vector.
  *   `Answer.POOLED_MOMENTS`: see `PooledMomentsFactory` with a rule. With
      `M = Agg(mean_i)`, the variance is `Agg(variance_i) + Agg((mean_i - M)²)`.
      The answer's count is the sum of the clients' counts, each clipped at 10
      times their median.

  All clients that take part have the same weight; others abstain. If the rule
  is a `tff_bn.aggregators.Attacked`, attackers falsify their values of each
  exchange, knowing those of the others.
  """

  def __init__(self, rule: model_update.ParticipatingFactory):
    """Initializes the factory with a `tff_bn.aggregators.Rule`."""
    self._rule = rule

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates a process whose result has the type of a client's values.

    Args:
      value_type: The type of the values, a list for each kind of answer by its
        name, see `tff_bn.fedtan.exchange.message`.
      weight_type: The type of a client's weight: 1 or true if it takes part,
        else 0 or false.
    """

    @tff.tensorflow.computation(weight_type)
    def as_number(weight):
      return tf.cast(weight, tf.int32)

    number_type = as_number.type_signature.result
    processes = collections.OrderedDict()
    for kind, part_type in tff.structure.iter_elements(value_type):
      if kind == Answer.POOLED_MOMENTS.name:
        # Clients that don't take part have counts 0.
        factory = moments_factories.PooledMomentsFactory(self._rule)
        processes[kind] = factory.create(part_type)
      else:
        processes[kind] = self._rule.create_participating(
            part_type, number_type
        )

    @tff.federated_computation
    def initialize():
      return tff.federated_zip(
          collections.OrderedDict(
              (kind, process.initialize())
              for kind, process in processes.items()
          )
      )

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      number = tff.federated_map(as_number, weight)
      outputs = collections.OrderedDict()
      for kind, process in processes.items():
        weights = [] if kind == Answer.POOLED_MOMENTS.name else [number]
        outputs[kind] = process.next(state[kind], value[kind], *weights)
      return tff.templates.MeasuredProcessOutput(
          *(
              tff.federated_zip(
                  collections.OrderedDict(
                      (kind, getattr(output, field))
                      for kind, output in outputs.items()
                  )
              )
              for field in ('state', 'result', 'measurements')
          )
      )

    return tff.templates.AggregationProcess(initialize, next_fn)
