"""FBN: normalizing with shared running statistics that are corrected.

Guerraoui, Pinot, Rizk, Stephan, Taiani, Overcoming the Challenges of Batch
Normalization in Federated Learning, arXiv:2405.14670.
"""

from collections.abc import Sequence
import functools
from typing import Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import moments_factories
from tff_bn.aggregators import robust_rule
from tff_bn.clients import client_work
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.moments_collector import MomentsCollector
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers.batch_moments import Moments
from tff_bn.processes import averaging
from tff_bn.processes import requirements
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import Process


def build_fbn(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    statistics_aggregator: Optional[robust_rule.Rule] = None,
    pooled: bool = True,
    **options: Unpack[Options],
) -> Process:
  """Builds FBN: algorithm 2 of the paper.

  Clients normalize with the shared running statistics (R, S) of the round
  before, as constants: no gradient flows through them. Each client sends what
  it would make of them with the mean m_i and the variance v_i of its values,
  and the server corrects the mean of the variances by the spread of the means:

      r_i = (1-β) R + β m_i,    s_i = (1-β) S + β N/(N-1) v_i,
      R' = mean(r_i),           S' = mean(s_i) + N/((N-1) β) mean((r_i - R')²).

  These are the running statistics of batch normalization on the union of the
  N values, whatever the clients' data: exactly, for values that were computed
  with the same weights. β is 1 - `momentum` of each layer. With several local
  steps m_i and v_i are those of all values of these steps, and β is applied
  once in a round. All variables are shared; a round is one exchange, of what
  FedAvg exchanges. Any batch normalization layer of Keras will do, and so does
  `tff_bn.layers.FederatedBatchNormalization`.

  **FBN is not centralized batch normalization.** With one local step it gives
  the same for all splits of the data, but centralized training also has a
  gradient through the statistics of the batch, which takes the mean of the
  gradient off. Without it, steps move the means of a layer's inputs, and the
  next statistics undo it. On scikit-learn's digits (batches of 320, learning
  rate 0.1, 500 steps, means of 2 or 3 seeds; test accuracy in %) that is all of
  the gap; small_cnn ends in a mean over the image, which needs the means that
  are lost, and suffers most:

  | statistics, and the gradient through them | small_cnn | 3 conv., flatten |
  | --- | --- | --- |
  | batch; full gradient (centralized)        | 98.7 | 98.9 |
  | batch; none through the variance          | 96.7 | 98.5 |
  | batch; none through the mean              | 64.4 | 85.0 |
  | batch; none at all                        | 69.5 | 84.7 |
  | FBN: running, β 0.1; none                 | 78.0 | 97.2 |
  | FBN, β 0.03                               | 84.3 | 95.4 |
  | FBN, β 0.01                               | 93.6 | 97.2 |
  | FBN, β 0.003                              | 94.8 | 97.3 |
  | FBN, β 0.001                              | 95.4 | 97.2 |
  | FBN, β 0.1, statistics start from data    | 76.5 | 96.9 |
  | FBN, β 0.01, statistics start from data   | 94.5 | 97.9 |
  | FBN, β 0.001, statistics start from data  | 98.1 | 98.3 |

  A smaller learning rate does not help (small_cnn, β 0.1: 59.4 with 0.03), nor
  do more steps with β 0.1 (87.2 after 2000). The paper reports no gap with β
  0.1, for a network with batch normalization after ReLU, dense layers at its
  end, and SGD whose momentum of 0.99 averages gradients. This is what it takes:
  the second network with normalization after ReLU reaches 98.1 with that
  momentum (centralized 98.9), but diverges without; it has 97.8 without
  momentum and with β 0.01. With that momentum and β 0.1, normalization before
  ReLU gives 90.3 (99.2), small_cnn 78.1 (98.9). `fbn_cnn`, the paper's own
  network, reaches 98.8 on ten clients of one class each.

  So:

  *   Set `momentum` of the layers to 0.99 (Keras's default) or more, which
      makes the statistics slow against the weights.
  *   The slower they are, the more the start from 0 and 1 costs: with β 0.001
      small_cnn has 68 % after 200 steps, but 97.1 % if it starts with the
      statistics of some data, see
      `tff_bn.training.evaluation.reestimate_batch_norm_statistics` and
      `process.set_model_weights`.
  *   With β 0.1, use the paper's optimizer: a server optimizer
      `build_sgdm(0.01, 0.99)`, or `tff_bn.algorithms.build_dsgd`.
  *   Prefer models whose output does not depend on means over the image alone.

  Args:
    model: The model.
    client_optimizer: The client optimizer.
    statistics_aggregator: The rule that stands in for the means of the running
      statistics inside of the correction, such as
      `tff_bn.aggregators.CoordinateMedian()`. Default: none.
    pooled: Whether clients' statistics count by the number of values that they
      are made of. Else they count alike, as in the paper, where all have the
      same number; then they are exact only if that is so.
    **options: `server_optimizer`, `local_steps`, `local_epochs`,
      `client_weighting`, `client_weight_decay`,
      `client_learning_rate_schedule`, `model_aggregator`, `seed`,
      `jit_compile`: see `tff_bn.algorithms.Options`.

  Returns:
    A `tff.learning.templates.LearningProcess`; a `StatefulLearningProcess` if
    clients keep something, for `drift_correction` or as position encodings of
    their own.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed; or the model has
      no batch normalization layer that is trained.
  """
  layers = requirements.trained_batch_norm_layers('FBN', model)
  momentum = [layer.momentum for layer in layers]
  return averaging.build_shared(
      model,
      client_optimizer,
      build_work=functools.partial(_FbnWork, momentum=momentum),
      statistics_aggregator=moments_factories.FbnMomentsFactory(
          momentum, statistics_aggregator, pooled=pooled, unbiased=False
      ),
      running_variance=functools.partial(_unbiased, momentum),
      **options,
  )


class _FbnWork(client_work.ClientWork):
  """Local training that collects moments; then running statistics of them."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      client_weighting: str,
      correction: BoundCorrection,
      *,
      momentum: Sequence[float],
  ):
    keras_weights = model.keras_model.weights
    self._collector = MomentsCollector(
        [keras_weights[mean] for mean, _ in weights.statistics],
        config.jit_compile,
    )
    self._momentum = momentum
    training = LocalTraining(
        model,
        config,
        batch_norm_call=self._collector,
        collecting=self._collector.variables,
        correction=correction,
    )
    super().__init__(model, training, weights, client_weighting)

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """Lines 5 and 6 of algorithm 2, but N/(N-1); count NaN: dropped."""
    dropped = tf.math.is_nan(weight)
    statistics = []
    for (mean, variance), momentum in zip(
        self._weights.statistics, self._momentum, strict=True
    ):
      # Local training has left the running statistics as they were.
      mean, variance = after[mean], after[variance]
      seen = self._collector.moments(len(statistics), result.collected)
      rate = tf.constant(1 - momentum, mean.dtype)
      found = tf.logical_and(seen.count > 0, tf.logical_not(dropped))
      statistics.append(
          Moments(
              tf.where(
                  dropped,
                  tf.constant(np.nan, seen.count.dtype),
                  seen.count,
              ),
              tf.where(found, mean + rate * (seen.mean - mean), mean),
              tf.where(
                  found,
                  variance + rate * (seen.variance - variance),
                  variance,
              ),
          )
      )
    return statistics


def _unbiased(
    momentum: Sequence[float],
    layer: int,
    old: tf.Tensor,
    new: Moments,
) -> tf.Tensor:
  """Multiplies the variance of all clients' values by N/(N-1).

  The paper's clients do this, who know N because all have the same K. It is the
  same here, where only the server knows it.

  Args:
    momentum: 1 - β of each layer.
    layer: Which layer it is.
    old: The running variance before the round, S.
    new: The aggregate. Its variance is (1-β) S + β v.

  Returns:
    The new running variance, (1-β) S + β N/(N-1) v.
  """
  moved = new.variance - tf.constant(momentum[layer], old.dtype) * old
  # N/(N-1) - 1, which is bounded whatever counts clients send.
  variance = new.variance + moved / tf.maximum(new.count - 1, 1)
  # With attackers the aggregate can be anything.
  return tf.maximum(variance, 0)
