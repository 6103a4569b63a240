"""A client's work in a round, and how the server ends the round."""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import enum
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.catalog import local_training
from tff_bn.clients import update_norms
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_step import LocalStep
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import array_form
from tff_bn.common import client_batches
from tff_bn.common import numerics
from tff_bn.common.stand_ins import StandIns
from tff_bn.keras_model import step_flops
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers.batch_moments import Moments


class Moves(enum.Enum):
  """How often a client's round moves running statistics by their momentum."""

  EACH_STEP = enum.auto()
  ONCE = enum.auto()
  # The statistics are fixed, or the evaluation uses other ones.
  NEVER = enum.auto()


@dataclasses.dataclass(frozen=True)
class MovingStatistics:
  """How a round moves the running statistics of batch normalization.

  A move with the momentum m keeps the share m of the statistics before it.

  Attributes:
    moves: How often a client's round moves them.
    are_local: Whether each client has its own; otherwise, a round ends with the
      mean of the clients' statistics.
    config: The settings of local training.
  """

  moves: Moves
  are_local: bool
  config: LocalTrainingConfig

  def num_moves(self, num_batches: np.ndarray, num_calls: int) -> np.ndarray:
    """Returns how often a client's round moves the statistics of a layer.

    Args:
      num_batches: The number of batches in each client's dataset.
      num_calls: The number of the layer's calls in a step.
    """
    match self.moves:
      case Moves.EACH_STEP:
        return num_calls * self.config.num_steps(num_batches)
      case Moves.ONCE:
        return np.ones_like(num_batches)
      case Moves.NEVER:
        return np.zeros_like(num_batches)


class ClientsRound(NamedTuple):
  """What the clients' part of a round returns.

  Attributes:
    result: What `for_round` returns, at the clients.
    exchange_states: The next state of each of `ClientUpdate.exchanges`.
    exchange_measurements: The measurements of each of them.
  """

  result: tff.Value
  exchange_states: Sequence[tff.Value] = ()
  exchange_measurements: Sequence[tff.Value] = ()


class ClientUpdate(NamedTuple):
  """The clients' part of a round, and the type of one client's result.

  Attributes:
    run: Makes this part, in a `tff.federated_computation`. It takes the states
      of `exchanges`, a list of values at the server; the server's state for the
      clients, the shared weights, the clients' states if they have any, and the
      data, all at the clients. It returns a `ClientsRound`.
    result_type: The type of one client's result.
    array_forms: The computations in it that take a client's dataset.
    stand_ins: Has made the stand-ins that `run` calls for computations.
    exchanges: The aggregators of the exchanges before the update. Empty if
      there are none, or if these need no state.
  """

  run: Callable[..., ClientsRound]
  result_type: tff.StructType
  array_forms: Sequence[array_form.ArrayForm]
  stand_ins: StandIns
  exchanges: Sequence[tff.templates.AggregationProcess] = ()


class RoundStart(NamedTuple):
  """A client's values before it trains.

  Attributes:
    work_state: The part of the server's state that clients get.
    client_state: The client's local variables and the drift correction's state.
    values: The values of all variables, in the order of `model.variables`.
    correction: The values of the drift correction's variables, if there is one.
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
    correction: The correction of the clients' drift; `None`: none.
    data_type: The TFF type of a client's dataset.
    initial_state: The `tff.Computation` that makes the server's state for the
      clients: the number of finished rounds, the optimizer's hyperparameters
      and the state of the drift correction.
    state_type: The type of this state.
    sent_type: The type of the part of this state that clients get.
  """

  # How often a round moves running statistics by the momentum of their layers.
  _moves = Moves.EACH_STEP

  def __init__(
      self,
      model: BatchNormModel,
      training: LocalStep,
      weights: SharedWeights,
  ):
    self._model = model
    self._training = training
    self._weights = weights
    self.correction = training.correction
    hparams = training.default_hparams

    @tff.tensorflow.computation
    def initial_state():
      return collections.OrderedDict(
          round_num=tf.zeros([], tf.int32),
          hparams=tf.nest.map_structure(tf.constant, hparams),
          correction=(
              collections.OrderedDict()
              if self.correction is None
              else self.correction.initial_server_state()
          ),
      )

    self.initial_state = initial_state
    self.state_type = self.sent_type = initial_state.type_signature.result
    self._select_sent: Optional[tff.Computation] = None
    if self.correction is not None:
      select = self.correction.state_for_clients

      @tff.tensorflow.computation(self.state_type)
      def select_sent(state):
        return collections.OrderedDict(
            state, correction=select(state['correction'])
        )

      self._select_sent = select_sent
      self.sent_type = select_sent.type_signature.result
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

  @property
  def _is_compilable(self) -> bool:
    """Whether XLA can compile what a client computes."""
    return self._training.is_compilable

  def _build_form(
      self,
      function: Callable[[Sequence[Any], client_batches.Data], Any],
      types: Sequence[Any],
  ) -> array_form.ArrayForm:
    """Builds a computation of a client; see `array_form.build`."""
    flops = step_flops.of_model(self._model) if self._is_compilable else None
    return array_form.build(function, types, self._model.input_spec, flops)

  def build_client_update(
      self, client_type: Optional[tff.StructType]
  ) -> ClientUpdate:
    """Builds the clients' part of a round.

    Args:
      client_type: The type of a client's state; `None` if clients keep none.
    """
    raise NotImplementedError

  # The number of exchanges before the update.
  num_exchanges = 0

  # Whether clients have own models beside their local variables.
  has_client_models = False

  def initial_client_state(self, values: Sequence[Any]) -> Mapping[str, Any]:
    """Returns what a new client keeps beside its local variables.

    Args:
      values: The values of all variables that the client starts with.
    """
    if self.correction is None:
      return {}
    return self.correction.initial_client_state(values)

  def client_model(
      self, values: Sequence[Any], client_state: Mapping[str, Any]
  ) -> Sequence[Any]:
    """Returns a client's model.

    Args:
      values: The values of all variables, shared and local.
      client_state: The client's state.
    """
    del client_state
    return values

  # Whether a client's state has its number, see `numbered`.
  has_client_number = False

  def numbered(
      self, client_state: Mapping[str, Any], client_number: int
  ) -> collections.OrderedDict[str, Any]:
    """Returns a new client's state with the client's number.

    For works with `has_client_number`.
    """
    raise NotImplementedError

  def update_aggregator(
      self, update_type: tff.StructType, weight_type: tff.Type
  ) -> Optional[tff.templates.AggregationProcess]:
    """Returns the process that aggregates the clients' updates.

    Here it is `None`: the one of the options.
    """
    del update_type, weight_type
    return None

  def finish_clients(
      self,
      client_states: tff.Value,
      sent: tff.Value,
      aggregated: tff.Value,
  ) -> tff.Value:
    """Ends a round for the clients, in a `tff.federated_computation`.

    Args:
      client_states: The clients' new states.
      sent: The shared weights before the round, at the clients.
      aggregated: The aggregated update, at the server.

    Returns:
      The states with what the server tells the clients; here nothing.
    """
    del sent, aggregated
    return client_states

  def state_for_clients(self, state: tff.Value) -> tff.Value:
    """Returns the part of the state that clients need, at the server."""
    if self._select_sent is None:
      return state
    return tff.federated_map(self._select_sent, state)

  def start(
      self,
      state: Mapping[str, Any],
      shared: ModelWeights,
      client_state: Mapping[str, Any],
      optimizer_state: Optional[Any] = None,
  ) -> RoundStart:
    """Prepares a client for a round, inside a `tff.tensorflow.computation`.

    A new optimizer state is made unless `optimizer_state` is given. See
    `RoundStart` for the other arguments.
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
        correction=(
            ()
            if self.correction is None
            else self.correction.start(
                values, state['correction'], client_state
            )
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

    A client whose update or loss is not finite, or the sum of whose examples'
    weights is negative, is dropped: its weight is NaN,
    which all aggregators of `ModelUpdateFactory` understand, it keeps its old
    state, and it is counted. A client without data has weight 0.

    Args:
      start: The values before training.
      result: The result of training.
      sound: A bool scalar; if false, the client is dropped even if all numbers
        are finite. Default: true.
      exchanged: See `tff_bn.clients.update_norms.norms`.

    Returns:
      An `OrderedDict` of `update`, `update_weight`, `client_state` (the new
      one), `values` (the new values of all variables), `optimizer_state`,
      `num_steps` and `report` (sums for the metrics).
    """
    before, client_state = start.values, start.client_state
    correction = self.correction
    kept: Mapping[str, Any] = {}
    sent: Mapping[str, Any] = {}
    if correction is not None:
      kept, sent = correction.finish(
          start.correction,
          before,
          result.values,
          result.corrected,
          client_state,
      )
    keep = numerics.all_finite(
        [
            self._weights.without_constants(result.values),
            result.loss_sum,
            result.collected,
            result.corrected,
            result.optimizer_state,
            # Without data, these values can be NaN.
            numerics.where_or_zero(result.num_examples > 0, (kept, sent)),
        ]
    )
    if sound is not None:
      keep = tf.logical_and(keep, sound)
    if self._training.sums_weights:
      keep = tf.logical_and(keep, result.weight_sum >= 0)
    after = self._weights.select(keep, result.values, before)
    num_examples = numerics.where_or_zero(keep, result.num_examples)
    trained = num_examples > 0
    loss_sum = numerics.where_or_zero(keep, result.loss_sum)
    weight = self.client_weight(
        num_examples, numerics.where_or_zero(keep, result.weight_sum)
    )
    sums: collections.OrderedDict[str, Any] = collections.OrderedDict()
    if correction is not None:
      server_state = start.work_state['correction']
      loss = loss_sum / tf.cast(num_examples, loss_sum.dtype)
      weight = correction.client_weight(server_state, weight, loss)
      num_steps = numerics.where_or_zero(trained, result.num_steps)
      sums.update(correction.sums(loss))
      sums.update(correction.counts(server_state, client_state, num_steps))
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
    update.update(numerics.where_or_zero(trained, sent))
    new_client_state = self._weights.local(after)
    for name, value in kept.items():
      new_client_state[name] = numerics.where(
          trained, value, client_state[name]
      )
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
                sums,
                num_clients=tf.ones([], tf.int32),
                num_dropped_clients=1 - tf.cast(keep, tf.int32),
                num_participants=tf.cast(weight > 0, tf.int32),
            ),
            norms=norms,
        ),
    )

  def client_weight(
      self, num_examples: tf.Tensor, weight_sum: tf.Tensor
  ) -> tf.Tensor:
    """Returns a client's weight, a float32 scalar; 0 without examples.

    See `LocalResult` for the arguments.
    """
    if self._training.sums_weights:
      return weight_sum
    if self._training.config.client_weighting == local_training.UNIFORM:
      num_examples = num_examples > 0
    return tf.cast(num_examples, tf.float32)

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """Returns the batch normalization statistics that a client sends.

    Here they are the running statistics `after` local training, one entry for
    each shared pair, with the client's weight, which is NaN if it is dropped.
    With weight 0 the server keeps its own.
    """
    del result
    return [
        Moments(
            tf.cast(weight, after[mean].dtype), after[mean], after[variance]
        )
        for mean, variance in self._weights.statistics
    ]

  def server_update(self, state: tff.Value, aggregated: tff.Value) -> tff.Value:
    """Returns the update that the server's step uses, at the server.

    For use in a `tff.federated_computation`.

    Args:
      state: The server's state for the clients.
      aggregated: The aggregated update.
    """
    correction = self.correction
    unchanged = BoundCorrection.server_update
    if correction is None or type(correction).server_update is unchanged:
      return aggregated

    @tff.tensorflow.computation(
        self.state_type, aggregated.type_signature.member
    )
    def corrected(state, aggregated):
      return collections.OrderedDict(
          aggregated,
          **correction.server_update(state['correction'], aggregated),
      )

    return tff.federated_map(corrected, (state, aggregated))

  def finish_round(
      self, state: tff.Value, report: tff.Value, *for_correction: tff.Value
  ) -> tuple[tff.Value, tff.Value]:
    """Ends a round, in a `tff.federated_computation`.

    Args:
      state: The server's state for the clients.
      report: The clients' `report`.
      *for_correction: The aggregated update, and the shared weights before and
        after the round, at the server. Not needed without a correction.

    Returns:
      The next state and the round's metrics, at the server. The metrics are
      `train`, `num_clients`, `num_dropped_clients`, `num_participants` (the
      number of clients with weight), the result of
      `tff_bn.clients.update_norms.compare`, and `correction`.
    """
    # Summed apart from the metrics: the next state needs only these sums.
    clients = tff.federated_sum(report['clients'])
    correction = self.correction
    arguments = (state, clients, *(for_correction if correction else ()))

    @tff.tensorflow.computation([a.type_signature.member for a in arguments])
    def next_state(arguments):
      old, clients, *for_correction = arguments
      new = collections.OrderedDict(old, round_num=old['round_num'] + 1)
      if correction is not None:
        update, before, after = for_correction
        state = correction.next_server_state(
            old['correction'],
            clients,
            collections.OrderedDict(
                update, weights_before=before, weights_after=after
            ),
            self._training.first_learning_rate(
                old['hparams'], old['round_num']
            ),
        )
        new['correction'] = numerics.where(
            numerics.all_finite(state), state, old['correction']
        )
      return new

    new_state = tff.federated_map(next_state, arguments)
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
          correction=(
              collections.OrderedDict()
              if correction is None
              else correction.metrics(state['correction'], clients)
          ),
      )

    return new_state, tff.federated_map(
        metrics, (new_state, clients, training, norms)
    )


def for_round(result: Mapping[str, Any]) -> collections.OrderedDict[str, Any]:
  """Selects the entries of `ClientWork.report` that a federated round needs."""
  names = ('update', 'update_weight', 'client_state', 'report')
  return collections.OrderedDict((name, result[name]) for name in names)
