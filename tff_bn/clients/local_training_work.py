"""The client work of ordinary local training."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients.client_work import ClientUpdate
from tff_bn.clients.client_work import ClientWork
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.moving_statistics import Moves
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model.batch_norm_calls import TrainingCall
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers.batch_moments import Moments


class LocalTrainingWork(ClientWork):
  """Ordinary local training."""

  _training: LocalTraining

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: BoundCorrection,
      *,
      batch_norm_call: TrainingCall = fused_batch_norm.training,
      collecting: Sequence[tf.Variable] = (),
  ):
    """Traces local training.

    Args:
      model: The model.
      config: The settings of local training.
      weights: The shared variables.
      correction: The correction of the clients' drift.
      batch_norm_call: See `LocalTraining`.
      collecting: See `LocalTraining`.
    """
    training = LocalTraining(
        model,
        config,
        batch_norm_call=batch_norm_call,
        collecting=collecting,
        correction=correction,
    )
    super().__init__(model, training, weights)

  def initial_optimizer_state(self) -> Any:
    """Returns a new state of the optimizer, a structure of tensors."""
    return self._training.initial_optimizer_state()

  def run(
      self,
      state: Mapping[str, Any],
      shared: ModelWeights,
      client_state: Mapping[str, Any],
      dataset: tf.data.Dataset,
      optimizer_state: Optional[Any] = None,
      num_steps: Any = 0,
  ) -> collections.OrderedDict[str, Any]:
    """Trains one client, inside a `tff.tensorflow.computation`.

    Args:
      state: See `start`.
      shared: See `start`.
      client_state: See `start`.
      dataset: The client's dataset.
      optimizer_state: See `start`.
      num_steps: The number of steps that the optimizer has made before.

    Returns:
      See `report`.
    """
    start = self.start(state, shared, client_state, optimizer_state)
    result = self._training.train(
        start.values,
        dataset,
        start.optimizer_state,
        state['round_num'],
        start.correction,
        num_steps,
    )
    return self.report(start, result)

  def build_client_update(self) -> ClientUpdate:
    """See the base class."""

    @tff.tensorflow.computation(
        self.state_type, self._weights.weights_type(), self.data_type
    )
    def client_update(state, weights, dataset):
      return self._result_and_report(self.run(state, weights, {}, dataset))

    return lambda *args: tff.federated_map(client_update, args)


class FixedStatisticsWork(LocalTrainingWork):
  """Local training that normalizes with fixed running statistics."""

  _moves = Moves.NEVER

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: BoundCorrection,
  ):
    """See the base class."""
    super().__init__(
        model,
        config,
        weights,
        correction,
        batch_norm_call=fused_batch_norm.inference,
    )

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """Returns statistics of weight 0, so not even rounding changes them."""
    return super().statistics(after, tf.zeros_like(weight), result)
