"""FedBS: clients count by their losses, until these are alike.

Janati Idrissi, Berrada, Noubir, FedBS: Learning on Non-IID Data in Federated
Learning using Batch Normalization, ICTAI 2021, algorithm 1.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import loss_weighted
from tff_bn.algorithms import fed_avg
from tff_bn.algorithms import fed_prox
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import Process

__all__ = ['FedBs', 'build_fed_bs']

# Of a difference of squares in float64, relative to them.
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
    **options: Unpack[Options],
) -> Process:
  """Builds FedBS.

  In a round, client k counts in proportion to its training loss F_k, the mean
  over the examples of the round: W_k = F_k / Σ F_k. That holds for all that is
  averaged, running statistics too (but FBN's statistics are those of all
  clients' values, whatever their weights). Clients without a finite loss do not
  count. When the standard deviation of the losses, over the clients of the
  round and without Bessel's correction, is less than `epsilon`, FedBS becomes
  FedProx from the next round on, for good: weights by `client_weighting`, and
  the proximal term.

  The metrics have an entry `correction` with `loss_std` and
  `switched_to_fedprox`: 1 from the round on after which it is FedProx.

  Args:
    model: The model.
    client_optimizer: The client optimizer.
    epsilon: ε, greater than 0.
    proximal_strength: μ of FedProx, see `tff_bn.algorithms.FedProx`.
    build_process: What is done with batch normalization: another builder of
      this package, such as `tff_bn.algorithms.build_fed_bn`. Default:
      `build_fed_avg`.
    model_aggregator: A weighted factory. Default: the mean.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`.

  Returns:
    A process of the kind that `build_process` returns.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type;
      `model_aggregator` must take weights.
    ValueError: If an option has a value that is not allowed, or `build_process`
      can't be combined with FedBS.
  """
  if not isinstance(
      model_aggregator,
      (tff.aggregators.WeightedAggregationFactory, type(None)),
  ):
    raise TypeError(
        'model_aggregator must take weights, which are losses in FedBS, as'
        ' tff.aggregators.MeanFactory does, but is a'
        f' {type(model_aggregator).__name__}.'
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
  """Weights by losses, then FedProx; see `build_fed_bs`.

  Attributes:
    epsilon: ε, greater than 0.
    proximal_strength: μ of FedProx, at least 0.
  """

  epsilon: float
  proximal_strength: float

  def __post_init__(self):
    if not 0 < self.epsilon < float('inf'):
      raise ValueError(
          f'epsilon={self.epsilon} must be a number greater than 0.'
      )
    fed_prox.check_proximal_strength(self.proximal_strength)

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
    """FedBS starts with weights by losses."""
    return collections.OrderedDict(switched=tf.constant(False))

  def start(
      self,
      before: Sequence[tf.Tensor],
      server_state: Mapping[str, Any],
      client_state: Mapping[str, Any],
  ) -> Sequence[tf.Tensor]:
    """Whether there is a proximal term, and its variables."""
    return [
        tf.cast(server_state['switched'], self._switched.dtype),
        *self._term.start(before, server_state, client_state),
    ]

  def penalty(self, x: Any) -> tf.Tensor:
    """The proximal term, once it is FedProx."""
    penalty = self._term.penalty(x)
    return tf.cast(self._switched, penalty.dtype) * penalty

  def client_weight(
      self, server_state: Mapping[str, Any], weight: tf.Tensor, loss: tf.Tensor
  ) -> tf.Tensor:
    """F_k; 0 without a loss, so that the client takes no part."""
    by_loss = loss_weighted.loss_weight(tf.cast(loss, weight.dtype))
    return tf.where(server_state['switched'], weight, by_loss)

  def sums(self, loss: tf.Tensor) -> State:
    """Number, sum and sum of squares of the finite losses."""
    # With fewer bits, the difference of the sums would have none left.
    loss = tf.cast(loss, tf.float64)
    found = tf.math.is_finite(loss)
    loss = tf.where(found, loss, tf.zeros_like(loss))
    return collections.OrderedDict(
        num_losses=tf.cast(found, tf.int32),
        losses=loss,
        squared_losses=tf.math.square(loss),
    )

  def _loss_std(self, total: Mapping[str, Any]) -> tf.Tensor:
    """The standard deviation; NaN without any loss."""
    number = tf.cast(total['num_losses'], tf.float64)
    mean = total['losses'] / number
    variance = total['squared_losses'] / number - tf.math.square(mean)
    # What is left of equal losses is rounding. NaN stays.
    is_rounding = variance < _ROUNDING * tf.math.square(mean)
    return tf.sqrt(tf.where(is_rounding, tf.zeros_like(variance), variance))

  def next_server_state(
      self,
      server_state: Mapping[str, Any],
      total: Mapping[str, Any],
      aggregated: Mapping[str, Any],
  ) -> State:
    """Whether it is FedProx from now on."""
    del aggregated
    return collections.OrderedDict(
        switched=tf.logical_or(
            server_state['switched'],
            self._loss_std(total) < self._settings.epsilon,
        )
    )

  def metrics(
      self, server_state: Mapping[str, Any], total: Mapping[str, Any]
  ) -> State:
    """Whether it is FedProx from now on, and the losses' spread."""
    return collections.OrderedDict(
        switched_to_fedprox=tf.cast(server_state['switched'], tf.int32),
        loss_std=tf.cast(self._loss_std(total), tf.float32),
    )
