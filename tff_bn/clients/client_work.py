"""Client work: local training as a part of TFF's learning templates."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients import update_norms
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_step import LocalStep
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import numerics
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers.batch_moments import Moments

# What the clients do in a round, see `ClientWork.build_client_update`.
ClientUpdate = Callable[
    [tff.Value, tff.Value, tff.Value], tuple[tff.Value, tff.Value]
]

CLIENT_WEIGHTINGS = ('num_examples', 'uniform')


def check_client_weighting(client_weighting: str) -> None:
  """Raises a `ValueError` if the weighting is unknown."""
  if client_weighting not in CLIENT_WEIGHTINGS:
    raise ValueError(
        f'client_weighting={client_weighting!r} must be one of'
        f' {", ".join(map(repr, CLIENT_WEIGHTINGS))}.'
    )


class ClientWork:
  """Local training of one client, and what the server gets of it.

  Attributes:
    state_type: The type of the part of the server's state that clients need:
      the number of finished rounds, the optimizer's hyperparameters, the state
      of the correction of the clients' drift.
    correction: What is done against the clients' drift.
    data_type: The type of a client's dataset.
  """

  def __init__(
      self,
      model: BatchNormModel,
      training: LocalStep,
      weights: SharedWeights,
      client_weighting: str,
  ):
    """Initializes the work.

    Args:
      model: The model.
      training: How clients train: a `LocalTraining`, or what a subclass needs.
      weights: Which variables are shared.
      client_weighting: `'num_examples'` or `'uniform'`.

    Raises:
      ValueError: If `client_weighting` is unknown.
    """
    check_client_weighting(client_weighting)
    self._training = training
    self._weights = weights
    self._uniform = client_weighting == 'uniform'
    self.correction = training.correction
    hparams = training.default_hparams

    @tff.tensorflow.computation
    def initial_state():
      return collections.OrderedDict(
          round_num=tf.zeros([], tf.int32),
          hparams=tf.nest.map_structure(tf.constant, hparams),
          correction=self.correction.initial_server_state(),
      )

    self.initial_state = initial_state
    self.state_type = initial_state.type_signature.result
    self.data_type = tff.SequenceType(
        tff.types.tensorflow_to_type(model.input_spec)
    )

  def run(
      self,
      state: Any,
      shared: ModelWeights,
      client_state: Mapping[str, Any],
      dataset: tf.data.Dataset,
      optimizer_state: Optional[Any] = None,
      num_steps: Any = 0,
  ) -> collections.OrderedDict[str, Any]:
    """Trains one client; to be called inside a `tff.tensorflow.computation`.

    A client whose update or loss is not finite is dropped: its weight is NaN,
    which all aggregators of `ModelUpdateFactory` understand, its state stays as
    it was, and it is counted. A client without data has weight 0.

    Args:
      state: Of type `state_type`.
      shared: The shared weights.
      client_state: The client's local variables, and what the correction keeps.
      dataset: The client's dataset.
      optimizer_state: The optimizer's state at the start. Default: a new one.
      num_steps: How many steps the optimizer has made before.

    Returns:
      An `OrderedDict` of `update`, `update_weight`, `client_state` (the new
      one), `values` (all new values), `optimizer_state`, `num_steps` and
      `report` (what the metrics are made of).
    """
    before = self._weights.merge(shared, client_state)
    optimizer_state = self._start_optimizer(state, optimizer_state)
    started = self.correction.start(before, state['correction'], client_state)
    result = self._training.train(
        before,
        dataset,
        optimizer_state,
        state['round_num'],
        started,
        num_steps,
    )
    return self.report(
        state, client_state, before, started, optimizer_state, result
    )

  def _start_optimizer(
      self, state: Any, optimizer_state: Optional[Any] = None
  ) -> Any:
    """The optimizer's state before the first step of a round."""
    if optimizer_state is None:
      optimizer_state = self._training.set_hparams(
          self._training.initial_optimizer_state(), state['hparams']
      )
    return self._training.set_learning_rate(optimizer_state, state['round_num'])

  def report(
      self,
      state: Any,
      client_state: Mapping[str, Any],
      before: list[tf.Tensor],
      started: Sequence[tf.Tensor],
      optimizer_state: Any,
      result: LocalResult,
      sound: Optional[tf.Tensor] = None,
      exchanged: Any = 0.0,
  ) -> collections.OrderedDict[str, Any]:
    """Makes what `run` returns of the result of local training.

    Args:
      state: Of type `state_type`.
      client_state: The client's state before it.
      before: The values of all variables before it.
      started: The values of the correction's variables before it.
      optimizer_state: The optimizer's state before it.
      result: The result.
      sound: Whether the result may be used even if all its numbers are finite,
        a bool scalar. Default: yes.
      exchanged: The norm of what was exchanged before, see
        `tff_bn.clients.update_norms.norms`.

    Returns:
      See `run`.
    """
    kept, sent = self.correction.finish(
        started, before, result.values, result.corrected, client_state
    )
    keep = numerics.all_finite(
        [
            result.values,
            result.loss_sum,
            result.collected,
            result.corrected,
            result.optimizer_state,
            # Without data they mean nothing.
            numerics.where_or_zero(result.num_examples > 0, (kept, sent)),
        ]
    )
    if sound is not None:
      keep = tf.logical_and(keep, sound)
    after = numerics.where(keep, result.values, before)
    num_examples = numerics.where_or_zero(keep, result.num_examples)
    loss_sum = numerics.where_or_zero(keep, result.loss_sum)
    loss = loss_sum / tf.cast(num_examples, loss_sum.dtype)
    weight = self.correction.client_weight(
        state['correction'], self.client_weight(num_examples), loss
    )
    weight = tf.where(keep, weight, tf.constant(np.nan, weight.dtype))
    update = self._weights.update(
        before, after, self.statistics(after, weight, result)
    )
    norms = update_norms.norms(
        update,
        [(before[m], before[v]) for m, v in self._weights.statistics],
        exchanged,
        weight > 0,
    )
    trained = num_examples > 0
    update.update(numerics.where_or_zero(trained, sent))
    new_client_state = self._weights.local(after)
    for name, value in kept.items():
      new_client_state[name] = tf.where(trained, value, client_state[name])
    return collections.OrderedDict(
        update=update,
        update_weight=weight,
        client_state=new_client_state,
        values=after,
        optimizer_state=numerics.where(
            keep, result.optimizer_state, optimizer_state
        ),
        num_steps=result.num_steps,
        report=collections.OrderedDict(
            training=collections.OrderedDict(
                loss_sum=loss_sum,
                metric_sums=numerics.where_or_zero(keep, result.metric_sums),
                num_examples=num_examples,
            ),
            clients=collections.OrderedDict(
                self.correction.sums(loss),
                num_clients=tf.ones([], tf.int32),
                num_dropped_clients=1 - tf.cast(keep, tf.int32),
                num_participants=tf.cast(weight > 0, tf.int32),
            ),
            norms=norms,
        ),
    )

  def client_weight(self, num_examples: tf.Tensor) -> tf.Tensor:
    """A client's weight among the clients, float32; 0 without examples."""
    if self._uniform:
      num_examples = num_examples > 0
    return tf.cast(num_examples, tf.float32)

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """What a client sends of its batch normalization statistics.

    Args:
      after: The values of all variables after local training.
      weight: The client's weight; NaN if it is dropped.
      result: The result of local training.

    Returns:
      One entry for each pair of shared running statistics: here the client's
      running statistics with its weight. Weight 0 keeps the server's.
    """
    del result
    return [
        Moments(
            tf.cast(weight, after[mean].dtype), after[mean], after[variance]
        )
        for mean, variance in self._weights.statistics
    ]

  def finish_round(
      self, state: tff.Value, report: tff.Value, aggregated: Any = ()
  ) -> tuple[tff.Value, tff.Value]:
    """Ends a round; for use in a `tff.federated_computation`.

    Args:
      state: Of type `state_type`, placed at the server.
      report: The clients' `report`, placed at the clients.
      aggregated: The aggregate of the clients' updates at the server, if the
        correction needs it.

    Returns:
      The next state and the round's metrics, at the server. The metrics are
      `train`, `num_clients`, `num_dropped_clients`, `num_participants` (clients
      with weight), what `tff_bn.clients.update_norms.compare` returns, and
      `correction`.
    """
    # Apart, as the next state depends on these sums only.
    clients = tff.federated_sum(report['clients'])
    if not isinstance(aggregated, tff.Value):
      aggregated = tff.federated_value(aggregated, tff.SERVER)

    @tff.tensorflow.computation(
        self.state_type,
        clients.type_signature.member,
        aggregated.type_signature.member,
    )
    def next_state(old, clients, aggregated):
      correction = self.correction.next_server_state(
          old['correction'], clients, aggregated
      )
      return collections.OrderedDict(
          old,
          round_num=old['round_num'] + 1,
          correction=numerics.where(
              numerics.all_finite(correction), correction, old['correction']
          ),
      )

    new_state = tff.federated_map(next_state, (state, clients, aggregated))
    training = tff.federated_sum(report['training'])
    norms = update_norms.compare(report['norms'])

    @tff.tensorflow.computation(
        self.state_type,
        clients.type_signature.member,
        training.type_signature.member,
        norms.type_signature.member,
    )
    def metrics(state, clients, training, norms):
      return collections.OrderedDict(
          train=self._training.finalize_metrics(
              training['loss_sum'],
              training['metric_sums'],
              training['num_examples'],
          ),
          num_clients=clients['num_clients'],
          num_dropped_clients=clients['num_dropped_clients'],
          num_participants=clients['num_participants'],
          **norms,
          correction=self.correction.metrics(state['correction'], clients),
      )

    return new_state, tff.federated_map(
        metrics, (new_state, clients, training, norms)
    )

  def build_client_update(self) -> ClientUpdate:
    """Builds what the clients do in a round; all variables are shared.

    Returns:
      A function, for use in a `tff.federated_computation`, of the state, the
      shared weights and the data, all placed at the clients. It returns
      `tff.learning.templates.ClientResult`s and the reports of `run`.
    """

    @tff.tensorflow.computation(
        self.state_type, self._weights.weights_type(), self.data_type
    )
    def client_update(state, weights, dataset):
      return self._result_and_report(self.run(state, weights, {}, dataset))

    return lambda *args: tff.federated_map(client_update, args)

  def _result_and_report(
      self, result: Mapping[str, Any]
  ) -> tuple[tff.learning.templates.ClientResult, Any]:
    return (
        tff.learning.templates.ClientResult(
            result['update'], result['update_weight']
        ),
        result['report'],
    )

  def build_process(self) -> tff.learning.templates.ClientWorkProcess:
    """The work as one role of `tff.learning.templates`; all is shared."""
    hparams_type = self.state_type['hparams']
    weights_type = self._weights.weights_type()

    @tff.federated_computation
    def initialize():
      return tff.federated_eval(self.initial_state, tff.SERVER)

    update_clients = self.build_client_update()

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(self.data_type, tff.CLIENTS),
    )
    def next_fn(state, weights, data):
      result, report = update_clients(
          tff.federated_broadcast(state), weights, data
      )
      new_state, metrics = self.finish_round(state, report)
      return tff.templates.MeasuredProcessOutput(new_state, result, metrics)

    @tff.tensorflow.computation(self.state_type)
    def get_hparams(state):
      return state['hparams']

    @tff.tensorflow.computation(self.state_type, hparams_type)
    def set_hparams(state, hparams):
      return collections.OrderedDict(state, hparams=hparams)

    return tff.learning.templates.ClientWorkProcess(
        initialize,
        next_fn,
        get_hparams_fn=get_hparams,
        set_hparams_fn=set_hparams,
    )


class FixedStatisticsWork(ClientWork):
  """Local training that uses and keeps the running statistics."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      client_weighting: str,
      correction: BoundCorrection,
  ):
    """Traces local training.

    Args:
      model: The model.
      config: How to train.
      weights: Which variables are shared.
      client_weighting: `'num_examples'` or `'uniform'`.
      correction: What is done against the clients' drift.

    Raises:
      ValueError: If `client_weighting` is unknown.
    """
    training = LocalTraining(
        model,
        config,
        batch_norm_call=fused_batch_norm.inference,
        correction=correction,
    )
    super().__init__(model, training, weights, client_weighting)

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """Weight 0: not even rounding changes the server's statistics."""
    return super().statistics(after, tf.zeros_like(weight), result)
