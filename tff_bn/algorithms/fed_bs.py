"""FedBS: weights clients by their losses until the losses are similar.

Janati Idrissi, Berrada, Noubir, FedBS: Learning on Non-IID Data in Federated
Learning using Batch Normalization, ICTAI 2021, algorithm 1.
"""

import collections
from collections.abc import Callable
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import loss_weighted
from tff_bn.algorithms import fed_avg
from tff_bn.algorithms import fed_prox
from tff_bn.catalog import algorithms
from tff_bn.catalog import options as options_lib
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.common import checks
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import Process

__all__ = ['FedBs', 'build_fed_bs']

# Relative rounding error of a float64 difference of squares.
_ROUNDING = 1e-14


def build_fed_bs(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    epsilon: float,
    proximal_strength: float = 1e-3,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    model_aggregator: Optional[
        tff.aggregators.WeightedAggregationFactory
    ] = None,
    **options: Any,
) -> Process:
  """Builds FedBS, which weights clients by their losses, then becomes FedProx.

  The weight of client k is W_k = F_k / Σ F_k, where F_k is its training loss,
  the mean over the examples of the round. The server uses these weights for
  everything that it averages, running statistics included (except FBN's, which
  describe all clients' values regardless of weights). A client without a finite
  loss has weight 0.

  FedBS becomes FedProx for good after the first round in which the standard
  deviation of the clients' losses (without Bessel's correction) is less than
  `epsilon`. From the next round on, it uses `client_weighting` and the proximal
  term.

  The metrics have an entry `correction` with `loss_std` and
  `switched_to_fedprox`, which is 1 from the round on that triggers the switch.

  Args:
    model: The model.
    client_optimizer: The optimizer of local training.
    epsilon: ε, greater than 0.
    proximal_strength: μ of FedProx, see `tff_bn.algorithms.FedProx`.
    build_process: The builder that says how batch normalization is treated,
      such as `tff_bn.algorithms.build_fed_bn`. Default: `build_fed_avg`.
    model_aggregator: A weighted factory. Default: the mean.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `drift_correction` must not be given.

  Returns:
    A process of the kind that `build_process` returns.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type, or
      `model_aggregator` takes no weights.
    ValueError: If an option has a value that is not allowed, or `build_process`
      cannot be combined with FedBS.
  """
  checks.check_type(
      'model_aggregator',
      model_aggregator,
      (tff.aggregators.WeightedAggregationFactory, type(None)),
      'take weights, which are losses in FedBS, as'
      ' tff.aggregators.MeanFactory does',
  )
  return averaging.build_corrected(
      build_process,
      model,
      client_optimizer,
      FedBs(epsilon, proximal_strength),
      model_aggregator=loss_weighted.LossWeightedFactory(model_aggregator),
      **options,
  )


@dataclasses.dataclass(frozen=True)
class FedBs(drift_correction.DriftCorrection):
  """Weights clients by their losses, then is FedProx; see `build_fed_bs`.

  Attributes:
    epsilon: ε, greater than 0.
    proximal_strength: μ of FedProx, at least 0.
  """

  epsilon: float
  proximal_strength: float

  def __post_init__(self):
    options_lib.check_fields(self, algorithms.OPTIONS)

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> drift_correction.BoundCorrection:
    """See the base class."""
    del client_optimizer
    return _BoundFedBs(model, weights, self)


class _BoundFedBs(drift_correction.BoundCorrection):
  """FedBS of a model."""

  def __init__(
      self, model: BatchNormModel, weights: SharedWeights, settings: FedBs
  ):
    drift_correction.check_shares(model, weights, 'FedBS')
    self._settings = settings
    self._term = fed_prox.ProximalTerm(
        model, weights, settings.proximal_strength
    )
    # The factor of the proximal term: 0 or 1.
    self._switched = tf.Variable(0.0, trainable=False)
    self.variables = [self._switched, *self._term.variables]

  def initial_server_state(self) -> State:
    """Returns the state before the switch."""
    return collections.OrderedDict(switched=tf.constant(False))

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the factor of the proximal term, and the term's values."""
    return [
        tf.cast(server_state['switched'], self._switched.dtype),
        *self._term.start(before, server_state, client_state),
    ]

  def penalty(self, x: Any) -> tf.Tensor:
    """Returns the proximal term; 0 before the switch."""
    penalty = self._term.penalty(x)
    return tf.cast(self._switched, penalty.dtype) * penalty

  def client_weight(
      self, server_state: State, weight: tf.Tensor, loss: tf.Tensor
  ) -> tf.Tensor:
    """Returns F_k before the switch; 0 for a client without a loss."""
    by_loss = loss_weighted.loss_weight(tf.cast(loss, weight.dtype))
    return tf.where(server_state['switched'], weight, by_loss)

  def sums(self, loss: tf.Tensor) -> State:
    """Returns number, sum and sum of squares of the finite losses."""
    # The variance is a difference of sums and needs float64's precision.
    loss = tf.cast(loss, tf.float64)
    found = tf.math.is_finite(loss)
    loss = tf.where(found, loss, tf.zeros_like(loss))
    return collections.OrderedDict(
        num_losses=tf.cast(found, tf.int32),
        losses=loss,
        squared_losses=tf.math.square(loss),
    )

  def _loss_std(self, total: State) -> tf.Tensor:
    """Computes the standard deviation of the losses; NaN without any."""
    number = tf.cast(total['num_losses'], tf.float64)
    mean = total['losses'] / number
    variance = total['squared_losses'] / number - tf.math.square(mean)
    # Equal losses leave only rounding errors. NaN stays NaN.
    is_rounding = variance < _ROUNDING * tf.math.square(mean)
    return tf.sqrt(tf.where(is_rounding, tf.zeros_like(variance), variance))

  def next_server_state(
      self,
      server_state: State,
      total: State,
      aggregated: State,
      learning_rate: Optional[tf.Tensor],
  ) -> State:
    """Returns whether the next round is one of FedProx."""
    del aggregated, learning_rate
    return collections.OrderedDict(
        switched=tf.logical_or(
            server_state['switched'],
            self._loss_std(total) < self._settings.epsilon,
        )
    )

  def metrics(self, server_state: State, total: State) -> State:
    """Returns whether the next round is one of FedProx, and the losses' std."""
    return collections.OrderedDict(
        switched_to_fedprox=tf.cast(server_state['switched'], tf.int32),
        loss_std=tf.cast(self._loss_std(total), tf.float32),
    )
