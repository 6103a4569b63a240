"""The mean of the clients' values, weighted by the clients' losses.

Janati Idrissi, Berrada, Noubir, FedBS: Learning on Non-IID Data in Federated
Learning using Batch Normalization, ICTAI 2021.
"""

from typing import Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import weighted_mean

# Negligible beside any other loss, but not 0.
_SMALLEST_WEIGHT = 1e-20


def loss_weight(loss: tf.Tensor) -> tf.Tensor:
  """Returns a client's weight, proportional to its loss.

  Args:
    loss: A float scalar.

  Returns:
    The loss; 0 if it is not finite; 1e-20 if it is 0 or less. So clients
    without a loss are negligible, but if no client has one, all have the same
    weight.
  """
  return tf.where(
      tf.math.is_finite(loss),
      tf.maximum(loss, tf.constant(_SMALLEST_WEIGHT, loss.dtype)),
      tf.zeros_like(loss),
  )


class LossWeightedFactory(tff.aggregators.WeightedAggregationFactory):
  """Aggregates with the weights W_k = F_k / Σ F_k of the clients' losses F_k.

  The process takes the losses as weights; see `loss_weight`.
  """

  def __init__(
      self,
      weighted_factory: Optional[
          tff.aggregators.WeightedAggregationFactory
      ] = None,
  ):
    """Initializes the factory.

    Args:
      weighted_factory: The factory that aggregates with these weights. Default:
        `WeightedMeanFactory()`.

    Raises:
      TypeError: If `weighted_factory` takes no weights.
    """
    if weighted_factory is None:
      weighted_factory = weighted_mean.WeightedMeanFactory()
    if not isinstance(
        weighted_factory, tff.aggregators.WeightedAggregationFactory
    ):
      raise TypeError(
          'weighted_factory must take weights, here losses, as'
          ' tff.aggregators.MeanFactory does, but is a'
          f' {type(weighted_factory).__name__}.'
      )
    self._weighted_factory = weighted_factory

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the aggregation process.

    Args:
      value_type: The type of a client's value.
      weight_type: The type of a client's loss, a float scalar.

    Returns:
      A weighted process, with the state and the measurements of the inner one.
    """
    process = self._weighted_factory.create(value_type, weight_type)

    @tff.tensorflow.computation(weight_type)
    def to_weight(loss):
      return loss_weight(loss)

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, loss):
      return process.next(state, value, tff.federated_map(to_weight, loss))

    return tff.templates.AggregationProcess(process.initialize, next_fn)
