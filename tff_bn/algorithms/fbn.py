"""FBN: normalization with shared, corrected running statistics.

Guerraoui, Pinot, Rizk, Stephan, Taiani, Overcoming the Challenges of Batch
Normalization in Federated Learning, arXiv:2405.14670.
"""

from collections.abc import Sequence
import functools
from typing import Optional

import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import moments_factories
from tff_bn.aggregators import robust_moments
from tff_bn.algorithms import greg
from tff_bn.catalog import algorithms
from tff_bn.clients import backward_statistics
from tff_bn.clients.client_work import Moves
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_training import LocalTrainingWork
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.moments_collector import MomentsCollector
from tff_bn.common import optimizers
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.keras_model.shared_weights import Statistics
from tff_bn.layers.batch_moments import Moments
from tff_bn.processes import averaging
from tff_bn.processes import options as options_lib
from tff_bn.processes import requirements
from tff_bn.processes.options import Options
from tff_bn.processes.options import ProcessConfig
from tff_bn.processes.stateful_process import Process

__all__ = ['build_fbn']


def build_fbn(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    pooled: bool = True,
    backward: str = 'none',
    backward_restart: Optional[float] = None,
    **options: Unpack[Options],
) -> Process:
  """Builds FBN, algorithm 2 of the paper.

  Clients normalize with the shared running statistics (R, S) of the round
  before. No gradient flows through them. Each client computes the mean m_i and
  the variance v_i of its values and sends the running statistics r_i and s_i
  that follow from them. The server adds the spread of the means to the mean of
  the variances:

      r_i = (1-β) R + β m_i,    s_i = (1-β) S + β N/(N-1) v_i,
      R' = mean(r_i),           S' = mean(s_i) + N/((N-1) β) mean((r_i - R')²).

  These are exactly the running statistics of batch normalization on the union
  of the clients' N values, however the data are split, as long as all values
  were computed with the same weights. β is 1 - `momentum` of each layer. With
  several local steps, m_i and v_i describe the values of all steps, and β is
  applied once in a round. All variables are shared, and a round has the same
  exchange as a round of FedAvg. Any batch normalization layer of Keras and
  `tff_bn.layers.FederatedBatchNormalization` can be used.

  With one local step, FBN gives the same result for every split of the data.
  But it is not centralized batch normalization, which also has a gradient
  through the statistics of the batch, see docs/algorithms/fbn.md.

  **Averages in the backward pass.** On N values, batch normalization
  y = γ x̂ + ζ with x̂ = (x - μ) / σ has the backward pass

      dx = γ/σ (dy - dζ/N - x̂ dγ/N),

  and FBN loses the last two terms. With `backward='running'`, the server keeps
  running averages G0 of dζ and G1 of dγ of the mean loss over all clients. They
  start from 0 and have the rate β of the statistics. A client with N_i values
  in its batch uses them as constants:

      dx = γ/√(S+ε) (dy - G0/N_i - x̂ G1/N_i).

  `backward='mean'` uses G0 only. The result still does not depend on how the
  data are split. After one local step of plain SGD without weight decay,
  clipping and constraints of γ and ζ at the clients, dζ and dγ are part of the
  model's update, so a round costs one or two more vectors for each layer, from
  the server to the clients. Otherwise clients send their dζ and dγ, too: means
  over their steps, weighted by the numbers of values. The averages are
  aggregated as the model is, by `model_aggregator`. They use the aggregate
  before `server_clip_norm` shortens it. With several local steps and one class
  for each client, they do not help.

  With both averages, training can diverge. `server_clip_norm` and
  `backward_restart` make it stable. With the latter, the averages of a channel
  restart from 0 after a round in which

      q = (N/(N-1) v + (m - R')²) / (S' + ε)

  was not between 1/`backward_restart` and `backward_restart`. m and v are the
  mean and the biased variance of all clients' N values, and R' and S' the new
  statistics.

  With one local step, use `backward='running'`, `backward_restart=1.5`, and as
  `server_clip_norm` three times the learning rate, with β 0.1. Plain FBN is
  best with β 0.01 (`momentum=0.99`, Keras's default).

  Args:
    model: The model, with batch normalization.
    client_optimizer: The optimizer of local training.
    pooled: Whether a client's statistics are weighted by the number of values
      that they describe. If false, clients are weighted equally, as in the
      paper; then the statistics are exact only if all clients have the same
      number of values.
    backward: The running averages that clients use in the backward pass of
      batch normalization: `'none'` (the paper), `'mean'` or `'running'`, see
      above.
    backward_restart: A number greater than 1, such as 1.5: the averages of a
      channel restart where the statistics do not describe the values, see
      above. Default: they never restart.
    **options: See `tff_bn.algorithms.Options`. `statistics_aggregator` must be
      a `tff_bn.aggregators.Rule`, such as `CoordinateMedian()`; it replaces the
      means in R' and S'. Default: the means.

  Returns:
    A `tff.learning.templates.LearningProcess`; a `StatefulLearningProcess` if
    clients keep a state, for `drift_correction` or for personal position
    encodings.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or the model has
      no trainable batch normalization layer, one of batch renormalization, or
      one of a class with its own computation.
  """
  layers = requirements.trained_batch_norm_layers('FBN', model)
  requirements.check_replaceable(
      'FBN', model, layers, 'it normalizes by the running statistics'
  )
  momentum = [layer.momentum for layer in layers]
  if isinstance(options.get('drift_correction'), greg.GReg):
    raise ValueError(
        "drift_correction=GReg can't be combined with FBN:"
        f' {algorithms.RUNNING_STATISTICS}.'
    )
  rule = robust_moments.statistics_rule('FBN', options)
  options['statistics_aggregator'] = moments_factories.FbnMomentsFactory(
      momentum, rule, pooled=pooled, unbiased=False
  )
  if backward != 'none':
    options['drift_correction'] = _backward_statistics(
        model, client_optimizer, layers, backward, backward_restart, options
    )
  elif backward_restart is not None:
    raise ValueError(
        f'backward_restart={backward_restart} has no effect with'
        " backward='none'."
    )
  return averaging.build_shared(
      model,
      client_optimizer,
      build_work=functools.partial(_FbnWork, momentum=momentum),
      move_statistics=functools.partial(_unbiased, momentum),
      **options,
  )


def _backward_statistics(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    layers: Sequence[keras.layers.Layer],
    backward: str,
    restart: Optional[float],
    options: Options,
) -> backward_statistics.BackwardStatistics:
  """Returns the drift correction that corrects the layers' gradients."""
  algorithms.FBN_BACKWARD.check(backward)
  if restart is not None:
    algorithms.FBN_BACKWARD_RESTART.check(restart)
  other = options.get('drift_correction')
  if other is not None:
    raise ValueError(
        f'backward={backward!r} and {type(other).__name__} both correct the'
        ' gradients of the clients; use one of them.'
    )
  if mixed_precision.computes_in_float16(model.keras_model):
    raise ValueError(
        f'backward={backward!r} is impossible in float16, where gradients are'
        ' scaled; use bfloat16 or float32.'
    )
  options_lib.check_names(Options, options)
  config = ProcessConfig(client_optimizer, **options)
  # Whether the update of γ and ζ is the learning rate times their gradient.
  is_one_gradient = (
      config.local_steps == 1
      and list(optimizers.default_hyperparameters(client_optimizer))
      == [optimizers.LEARNING_RATE]
      and not config.client_weight_decay
      and config.client_gradient_clip_norm is None
  )
  return backward_statistics.BackwardStatistics(
      layers,
      backward,
      sends=not (
          is_one_gradient and backward_statistics.is_in_update(model, layers)
      ),
      restart=restart,
  )


class _FbnWork(LocalTrainingWork):
  """Local training that collects the moments of the layers' inputs."""

  _moves = Moves.ONCE

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
      *,
      momentum: Sequence[float],
  ):
    keras_weights = model.keras_model.weights
    backward = None
    if isinstance(correction, backward_statistics.BoundBackwardStatistics):
      backward = correction
    collector = self._collector = MomentsCollector(
        [keras_weights[mean] for mean, _ in weights.statistics],
        None if backward is None else backward.correct_gradient,
    )

    def batch_norm_call(layer, inputs, mask):
      outputs = collector(layer, inputs, mask)
      if backward is None:
        return outputs
      return backward.collect(layer, inputs, outputs)

    self._momentum = momentum
    super().__init__(
        model,
        config,
        weights,
        correction,
        batch_norm_call=batch_norm_call,
        collecting=self._collector.variables,
    )

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """Computes r_i and s_i without the factor N/(N-1), see `_unbiased`.

    These are lines 5 and 6 of algorithm 2. A dropped client's count is NaN.
    """
    dropped = tf.math.is_nan(weight)
    statistics: list[Moments] = []
    for (mean_position, variance_position), momentum in zip(
        self._weights.statistics, self._momentum, strict=True
    ):
      # Local training has left the running statistics as they were.
      mean, variance = after[mean_position], after[variance_position]
      seen = self._collector.moments(len(statistics), result.collected)
      rate = tf.constant(1 - momentum, mean.dtype)
      found = tf.logical_and(seen.count > 0, tf.logical_not(dropped))
      nan = tf.constant(np.nan, seen.count.dtype)
      moved_mean = mean + rate * (seen.mean - mean)
      moved_variance = variance + rate * (seen.variance - variance)
      statistics.append(
          Moments(
              tf.where(dropped, nan, seen.count),
              tf.where(found, moved_mean, mean),
              tf.where(found, moved_variance, variance),
          )
      )
    return statistics


def _unbiased(
    momentum: Sequence[float],
    layer: int,
    old: Statistics,
    new: Moments,
) -> Statistics:
  """Multiplies the variance v of all clients' values by N/(N-1).

  In the paper the clients do this. They know N because all clients have equally
  many values. Here only the server knows N, with the same result.

  Args:
    momentum: 1 - β of each layer.
    layer: The index of the layer.
    old: R and S, the running statistics before the round.
    new: The aggregated moments, with the variance (1-β) S + β v.

  Returns:
    The new running mean, and the new running variance
    (1-β) S + β N/(N-1) v.
  """
  _, old_variance = old
  kept = tf.constant(momentum[layer], old_variance.dtype) * old_variance
  moved = new.variance - kept
  # 1/(N-1) is N/(N-1) - 1. Clients can send any N, so it is bounded.
  variance = new.variance + moved / tf.maximum(new.count - 1, 1)
  # Attackers can make the aggregated variance negative.
  return new.mean, tf.maximum(variance, 0)
