"""A client's work in a round, and its role in TFF's learning templates."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients import update_norms
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_step import LocalStep
from tff_bn.clients.moving_statistics import Moves
from tff_bn.clients.moving_statistics import MovingStatistics
from tff_bn.common import numerics
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers.batch_moments import Moments

# See `ClientWork.build_client_update`.
ClientUpdate = Callable[
    [tff.Value, tff.Value, tff.Value], tuple[tff.Value, tff.Value]
]
# See `ClientWork.build_partial_update`.
PartialUpdate = Callable[
    [tff.Value, tff.Value, tff.Value], tuple[Any, Sequence[tff.Value]]
]


class RoundStart(NamedTuple):
  """A client's values before it trains.

  Attributes:
    work_state: The server's state for the clients, of `ClientWork.state_type`.
    client_state: The client's local variables and the drift correction's state.
    values: The values of all variables, in the order of `model.variables`.
    correction: The values of the drift correction's variables.
    optimizer_state: The optimizer's state.
  """

  work_state: Mapping[str, Any]
  client_state: Mapping[str, Any]
  values: list[tf.Tensor]
  correction: Sequence[tf.Tensor]
  optimizer_state: Any


class ClientWork:
  """A client's part of a round, and its report to the server.

  Subclasses say how a client trains: they implement `build_client_update`.

  Attributes:
    correction: The correction of the clients' drift.
    data_type: The TFF type of a client's dataset.
    initial_state: The `tff.Computation` that makes the server's state for the
      clients: the number of finished rounds, the optimizer's hyperparameters
      and the state of the drift correction.
    state_type: The type of this state.
  """

  # How often a round moves running statistics by the momentum of their layers.
  _moves = Moves.EACH_STEP

  def __init__(
      self,
      model: BatchNormModel,
      training: LocalStep,
      weights: SharedWeights,
  ):
    """Initializes the work.

    Args:
      model: The model.
      training: The local training, or its optimizer step.
      weights: The shared variables.
    """
    self._training = training
    self._weights = weights
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

  @property
  def moving_statistics(self) -> MovingStatistics:
    """How a round moves the running statistics."""
    return MovingStatistics(
        self._moves,
        are_local=not self._weights.statistics,
        config=self._training.config,
    )

  def build_client_update(self) -> ClientUpdate:
    """Builds the clients' part of a round in which all variables are shared.

    Returns:
      A function, for use in a `tff.federated_computation`, of the state, the
      shared weights and the data, all placed at the clients. It returns
      `tff.learning.templates.ClientResult`s and the reports of `report`.
    """
    raise NotImplementedError

  @property
  def completes_update(self) -> bool:
    """Whether clients leave out a part of their update, which the server knows.

    The parts of the round are then `build_partial_update`, the aggregation, and
    `complete_update`.
    """
    return False

  def build_partial_update(self) -> PartialUpdate:
    """Builds the clients' part of a round in which they leave something out.

    Returns:
      A function as from `build_client_update`. It returns what that one
      returns, and the values at the server that `complete_update` needs.
    """
    update_clients = self.build_client_update()
    return lambda *args: (update_clients(*args), [])

  def complete_update(
      self,
      state: Mapping[str, Any],
      weights: ModelWeights,
      update: Mapping[str, Any],
      known: Sequence[Any],
  ) -> collections.OrderedDict[str, Any]:
    """Completes the aggregated update, inside a `tff.tensorflow.computation`.

    Args:
      state: Of type `state_type`.
      weights: The shared weights before the round.
      update: The aggregated update.
      known: The values of `build_partial_update`.

    Returns:
      The update with all parts.
    """
    del state, weights, known
    return collections.OrderedDict(update)

  def start(
      self,
      state: Mapping[str, Any],
      shared: ModelWeights,
      client_state: Mapping[str, Any],
      optimizer_state: Optional[Any] = None,
  ) -> RoundStart:
    """Prepares a client for a round, inside a `tff.tensorflow.computation`.

    Args:
      state: Of type `state_type`.
      shared: The shared weights.
      client_state: The client's local variables and the drift correction's
        state.
      optimizer_state: The optimizer's state. Default: a new one.

    Returns:
      The values that training starts from.
    """
    values = self._values_before(shared, client_state)
    if optimizer_state is None:
      optimizer_state = self._training.set_hparams(
          self._training.initial_optimizer_state(), state['hparams']
      )
    return RoundStart(
        work_state=state,
        client_state=client_state,
        values=values,
        correction=self.correction.start(
            values, state['correction'], client_state
        ),
        optimizer_state=self._training.set_learning_rate(
            optimizer_state, state['hparams'], state['round_num']
        ),
    )

  def _values_before(
      self, shared: ModelWeights, client_state: Mapping[str, Any]
  ) -> list[Any]:
    """Returns the values of all variables before training."""
    return self._weights.merged_tensors(shared, client_state)

  def report(
      self,
      start: RoundStart,
      result: LocalResult,
      *,
      sound: Optional[tf.Tensor] = None,
      exchanged: Any = 0.0,
  ) -> collections.OrderedDict[str, Any]:
    """Turns the result of local training into a client's update and new state.

    A client whose update or loss is not finite is dropped: its weight is NaN,
    which all aggregators of `ModelUpdateFactory` understand, it keeps its old
    state, and it is counted. A client without data has weight 0.

    Args:
      start: The values before training.
      result: The result of training.
      sound: A bool scalar; if false, the client is dropped even if all numbers
        are finite. Default: true.
      exchanged: The norm of the values that the client sent earlier in the
        round, see `tff_bn.clients.update_norms.norms`.

    Returns:
      An `OrderedDict` of `update`, `update_weight`, `client_state` (the new
      one), `values` (the new values of all variables), `optimizer_state`,
      `num_steps` and `report` (sums for the metrics).
    """
    before, client_state = start.values, start.client_state
    kept, sent = self.correction.finish(
        start.correction, before, result.values, result.corrected, client_state
    )
    keep = numerics.all_finite(
        [
            self._weights.without_constants(result.values),
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
    after = self._weights.select(keep, result.values, before)
    num_examples = numerics.where_or_zero(keep, result.num_examples)
    loss_sum = numerics.where_or_zero(keep, result.loss_sum)
    loss = loss_sum / tf.cast(num_examples, loss_sum.dtype)
    weight = self.correction.client_weight(
        start.work_state['correction'], self.client_weight(num_examples), loss
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
            keep, result.optimizer_state, start.optimizer_state
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
                **self.correction.counts(
                    start.work_state['correction'],
                    client_state,
                    numerics.where_or_zero(trained, result.num_steps),
                ),
                num_clients=tf.ones([], tf.int32),
                num_dropped_clients=1 - tf.cast(keep, tf.int32),
                num_participants=tf.cast(weight > 0, tf.int32),
            ),
            norms=norms,
        ),
    )

  def client_weight(self, num_examples: tf.Tensor) -> tf.Tensor:
    """Returns a client's weight, a float32 scalar; 0 without examples."""
    if self._training.config.client_weighting == 'uniform':
      num_examples = num_examples > 0
    return tf.cast(num_examples, tf.float32)

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """Returns the batch normalization statistics that a client sends.

    Here they are the client's running statistics with its weight. With weight 0
    the server keeps its own.

    Args:
      after: The values of all variables after local training.
      weight: The client's weight; NaN if it is dropped.
      result: The result of local training.

    Returns:
      One entry for each pair of shared running statistics.
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
    """Ends a round, in a `tff.federated_computation`.

    Args:
      state: Of type `state_type`, placed at the server.
      report: The clients' `report`, placed at the clients.
      aggregated: The aggregated update at the server, if the correction needs
        it.

    Returns:
      The next state and the round's metrics, at the server. The metrics are
      `train`, `num_clients`, `num_dropped_clients`, `num_participants` (the
      number of clients with weight), the result of
      `tff_bn.clients.update_norms.compare`, and `correction`.
    """
    # Summed apart from the metrics: the next state needs only these sums.
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
          old['correction'],
          clients,
          aggregated,
          self._training.first_learning_rate(old['hparams'], old['round_num']),
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
    """Builds the client work of TFF's templates; all variables are shared."""
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
