"""Ditto: each client trains its own model near to the model of FedAvg.

Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through
Personalization, ICML 2021, algorithm 1.
"""

import collections
import functools
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.algorithms import fed_prox
from tff_bn.catalog import algorithms
from tff_bn.clients import client_work
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.personal_model import PersonalModelWork
from tff_bn.common import client_batches
from tff_bn.common import numerics
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_ditto']


def build_ditto(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    ditto_strength: float = 1.0,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds Ditto, which trains a personal model of each client beside FedAvg.

  In a round, a client trains the server's model w as in FedAvg and sends it.
  Then it trains its personal model v, on the same batches and with the same
  settings, and keeps it: v minimizes the loss plus λ/2 ‖v - w‖², where w are
  the trainable variables at the start of the round.

  The personal model is a whole model with its own batch normalization
  statistics. It starts as the server's model when the client first takes part.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer of both models. Its state starts afresh in
      each round.
    ditto_strength: λ, at least 0. With 0, personal models are trained without
      the server's model.
    **options: See `tff_bn.algorithms.Options`. A `drift_correction` corrects
      the training of w. Metrics of training are those of w.

  Returns:
    A process whose client state holds the client's personal model, which
    `get_client_model_weights` returns. A client that is dropped or has no data
    keeps it.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed.
  """
  algorithms.DITTO_STRENGTH.check(ditto_strength)
  return averaging.build_partitioned(
      model,
      FEDAVG,
      client_optimizer,
      build_work=functools.partial(_Ditto, ditto_strength=ditto_strength),
      **options,
  )


class _Ditto(PersonalModelWork):
  """Training of the server's model, and of the client's personal model."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
      *,
      ditto_strength: float,
  ):
    super().__init__(model, config, weights, correction)
    self._term = fed_prox.ProximalTerm(model, weights, ditto_strength)
    self._personal_training = LocalTraining(
        model, config, correction=self._term
    )

  def _report(
      self,
      start: client_work.RoundStart,
      dataset: client_batches.Data,
      result: LocalResult,
  ) -> collections.OrderedDict[str, Any]:
    """Trains the personal model, too."""
    report = super()._report(start, dataset, result)
    client_state = start.client_state
    personal = self._personal_training.train(
        list(self.client_model(start.values, client_state)),
        dataset,
        start.optimizer_state,
        start.work_state['round_num'],
        self._term.start(start.values, {}, {}),
    )
    keep = tf.logical_and(
        # The weight of a dropped client is NaN.
        tf.math.is_finite(report['update_weight']),
        numerics.all_finite(
            [
                self._weights.without_constants(personal.values),
                personal.loss_sum,
            ]
        ),
    )
    for name, value in self._personal(personal.values).items():
      report['client_state'][name] = tf.where(keep, value, client_state[name])
    return report
