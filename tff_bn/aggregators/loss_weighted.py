"""The mean of the clients, weighted by their losses.

Janati Idrissi, Berrada, Noubir, FedBS: Learning on Non-IID Data in Federated
Learning using Batch Normalization, ICTAI 2021.
"""

from typing import Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import weighted_mean

# So small that it does not count beside any other loss, but sums of it do.
_SMALLEST_WEIGHT = 1e-20


def loss_weight(loss: tf.Tensor) -> tf.Tensor:
  """A client's weight in proportion to its loss.

  Args:
    loss: A float scalar.

  Returns:
    The loss, but 0 if it is not finite, and next to nothing if it is 0 or less:
    beside clients with a loss, such clients do not count; if all are such, they
    count alike.
  """
  return tf.where(
      tf.math.is_finite(loss),
      tf.maximum(loss, tf.constant(_SMALLEST_WEIGHT, loss.dtype)),
      tf.zeros_like(loss),
  )


class LossWeightedFactory(tff.aggregators.WeightedAggregationFactory):
  """Aggregates with weights W_k = F_k / Σ F_k, of the clients' losses F_k.

  The weights that clients give are their losses, see `loss_weight`.
  """

  def __init__(
      self,
      weighted_factory: Optional[
          tff.aggregators.WeightedAggregationFactory
      ] = None,
  ):
    """Initializes the factory.

    Args:
      weighted_factory: What gets the weights. Default: the mean.

    Raises:
      TypeError: If it takes no weights.
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
