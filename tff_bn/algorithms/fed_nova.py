"""FedNova: updates that are normalized by the numbers of local steps.

Wang, Liu, Liang, Joshi, Poor, Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization, NeurIPS 2020.
"""

import collections
from collections.abc import Callable
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import weighted_mean
from tff_bn.algorithms import fed_avg
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.common import optimizers
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import Process

__all__ = ['FedNova', 'build_fed_nova']


def build_fed_nova(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    model_aggregator: Optional[
        tff.aggregators.WeightedAggregationFactory
    ] = None,
    **options: Any,
) -> Process:
  """Builds FedNova, which normalizes updates by the numbers of local steps.

  If all clients make the same number of steps, a round is one of
  `build_process`.

  Args:
    model: The model.
    client_optimizer: The optimizer of local training, SGD with or without
      momentum.
    build_process: The builder that says how batch normalization is treated,
      such as `tff_bn.algorithms.build_fed_bn`. Default: `build_fed_avg`.
    model_aggregator: A weighted mean. Default:
      `tff_bn.aggregators.WeightedMeanFactory()`.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `client_weighting` determines the paper's p_i.
      `drift_correction` must not be given.

  Returns:
    A process of the kind that `build_process` returns.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type, or
      `model_aggregator` is no weighted mean.
    ValueError: If an option has a value that is not allowed, the client
      optimizer is not SGD, or `build_process` cannot be combined with FedNova.
  """
  weighted_mean.check_mean('FedNova', model_aggregator)
  return averaging.build_corrected(
      build_process,
      model,
      client_optimizer,
      FedNova(),
      model_aggregator=model_aggregator,
      **options,
  )


@dataclasses.dataclass(frozen=True)
class FedNova(drift_correction.DriftCorrection):
  """Averages directions and lengths of the clients' updates separately.

  A client whose local training moves x to y sends d = (x - y) / ‖a‖₁ and ‖a‖₁.
  With the client's share p of the weights, the server moves by

      (Σ p ‖a‖₁) (Σ p d)

  which is the gradient of the server optimizer. The paper's a is without the
  learning rate.

  An entry of a is the factor that the gradient of a local step has in x - y,
  and ‖a‖₁ is their sum. For plain SGD it is the sum of the learning rates. For
  SGD with momentum ρ, it is Σ η m over the steps, where m starts from 0 and
  each step sets m ← ρ m + 1. With a constant rate η and τ steps, these are the
  paper's η τ and η [τ - ρ (1 - ρ^τ) / (1 - ρ)] / (1 - ρ). The momentum is the
  one of the client optimizer when the process is built.

  Only shared trainable variables are normalized. The running statistics of
  batch normalization are no sums of steps, so they are averaged as without
  FedNova.
  """

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> drift_correction.BoundCorrection:
    """See the base class."""
    if not optimizers.is_sgd(client_optimizer):
      raise ValueError(
          'FedNova needs the factor of each gradient in the change of the'
          ' model, so client_optimizer must be SGD,'
          ' tff.learning.optimizers.build_sgdm(learning_rate, momentum), but'
          f' is a {type(client_optimizer).__name__}.'
      )
    hparams = optimizers.default_hyperparameters(client_optimizer)
    return _NormalizedUpdates(model, weights, hparams.get('momentum', 0.0))


class _NormalizedUpdates(drift_correction.BoundCorrection):
  """FedNova of a model."""

  # The name of ‖a‖₁ in the updates.
  _part = 'normalizer'

  def __init__(
      self, model: BatchNormModel, weights: SharedWeights, momentum: float
  ):
    drift_correction.check_shares(model, weights, 'FedNova')
    self._weights = weights
    self._momentum = momentum
    dtype = model.keras_model.weights[weights.trainable[0]].dtype
    # The factor m of a gradient in the momentum, and the sum of η m.
    self._factor, self._normalizer = (
        tf.Variable(tf.zeros([], dtype), trainable=False) for _ in range(2)
    )
    self.variables = [self._factor, self._normalizer]
    self.collecting = [self._normalizer]

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns 0 for both sums."""
    del before, server_state, client_state
    return [tf.zeros([], v.dtype) for v in self.variables]

  def correct(
      self, gradients: tuple[tf.Tensor, ...], learning_rate: Optional[Any]
  ) -> tuple[tf.Tensor, ...]:
    """Adds the step to ‖a‖₁; the gradients stay as they are."""
    dtype = self._factor.dtype
    factor = tf.constant(self._momentum, dtype) * self._factor + 1
    self._factor.assign(factor)
    self._normalizer.assign_add(tf.cast(learning_rate, dtype) * factor)
    return gradients

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns no state, and sends d and ‖a‖₁."""
    del started, client_state
    (normalizer,) = collected
    directions = [
        # With learning rate 0, nothing has changed.
        tf.math.divide_no_nan(
            before[p] - after[p], tf.cast(normalizer, before[p].dtype)
        )
        for p in self._weights.trainable
    ]
    return collections.OrderedDict(), collections.OrderedDict(
        [
            ('trainable', self._weights.trainable_part(directions)),
            (self._part, [normalizer]),
        ]
    )

  def server_update(self, server_state: State, aggregated: State) -> State:
    """Returns (Σ p ‖a‖₁) (Σ p d)."""
    del server_state
    (normalizer,) = aggregated[self._part]
    return collections.OrderedDict(
        trainable=tf.nest.map_structure(
            lambda d: tf.cast(normalizer, d.dtype) * d, aggregated['trainable']
        )
    )
