"""Federated averaging of the variables that a partition shares.

FedAvg, FedBN, SiloBN, local affine and single differ only in the partition.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import summed_update
from tff_bn.clients.client_work import ClientsRound
from tff_bn.clients.client_work import ClientWork
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.drift_correction import DriftCorrection
from tff_bn.clients.local_training import LocalTrainingWork
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import checks
from tff_bn.common import garbage
from tff_bn.common.stand_ins import StandIns
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.keras_model.partition import Partition
from tff_bn.keras_model.shared_weights import MoveStatistics
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import checked_round
from tff_bn.processes import finalizer
from tff_bn.processes import options as options_lib
from tff_bn.processes import personal_phases
from tff_bn.processes import requirements
from tff_bn.processes import whole_models
from tff_bn.processes.options import Options
from tff_bn.processes.options import ProcessConfig
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.processes.stateful_process import StatefulProcessOutput

LearningAlgorithmState = tff.learning.templates.LearningAlgorithmState


# Builds the clients' work in a round.
BuildWork = Callable[
    [
        BatchNormModel,
        LocalTrainingConfig,
        SharedWeights,
        Optional[BoundCorrection],
    ],
    ClientWork,
]
# Builds `StatefulLearningProcess.evaluation_state` from the work, the weights,
# and the types of the server's and of a client's state.
BuildEvaluationState = Callable[
    [ClientWork, SharedWeights, tff.FederatedType, tff.Type], tff.Computation
]


def build_shared(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    build_work: BuildWork = LocalTrainingWork,
    move_statistics: Optional[MoveStatistics] = None,
    partition: Partition = FEDAVG,
    exchanges_of: Optional[Process] = None,
    **options: Unpack[Options],
) -> Process:
  """Builds a process that averages every variable, or most of them.

  Personal phases of position encodings are always local. Variables that
  training cannot change are not averaged.

  Args:
    model: The model.
    client_optimizer: The client optimizer.
    build_work: Builds the clients' work. Default: ordinary local training.
    move_statistics: Computes the new running statistics, see
      `SharedWeights.apply`. Default: the aggregated ones.
    partition: Which variables are fixed or local. Default: none.
    exchanges_of: An earlier phase, whose exchanges within a round may have
      states and measurements: the states stay as they are, and the measurements
      are 0.
    **options: See `Options`.

  Returns:
    A `LearningProcess`; a `StatefulLearningProcess` if clients keep a state,
    for local layers, `drift_correction` or personal position encodings.
  """
  return _build_process(
      model,
      partition,
      client_optimizer,
      build_work,
      move_statistics,
      None,
      options,
      keeps_states=False,
      exchanges_of=exchanges_of,
  )


def build_corrected(
    build_process: Callable[..., Process],
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    correction: DriftCorrection,
    **options: Any,
) -> Process:
  """Builds the process of another algorithm with a drift correction.

  Args:
    build_process: The other algorithm's builder.
    model: The model.
    client_optimizer: The client optimizer.
    correction: The correction.
    **options: The other arguments of `build_process`.

  Raises:
    ValueError: If the other algorithm cannot be corrected, or `options` have a
      second correction.
  """
  other = options.pop('drift_correction', None)
  if other is not None:
    raise ValueError(
        f'{type(correction).__name__} and {type(other).__name__} are both'
        " corrections of the clients' drift; a process can have only one."
    )
  checks.check_function('build_process', build_process, 'builds a process')
  return build_process(
      model, client_optimizer, drift_correction=correction, **options
  )


def build_partitioned(
    model: BatchNormModel,
    partition: Partition,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    build_work: BuildWork = LocalTrainingWork,
    move_statistics: Optional[MoveStatistics] = None,
    build_evaluation_state: Optional[BuildEvaluationState] = None,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds a process that averages shared variables and keeps others local.

  Args:
    model: The model.
    partition: Which variables are local.
    client_optimizer: The client optimizer.
    build_work: See `build_shared`.
    move_statistics: See `build_shared`.
    build_evaluation_state: Builds the computation of the state that is
      evaluated. Default: states are evaluated as they are.
    **options: See `Options`.

  Returns:
    The process. A client's state is an `OrderedDict` from the names of the
    local variables (`model.variables[i].name`) to their values, and from other
    names to the state of `drift_correction`.
  """
  process = _build_process(
      model,
      partition,
      client_optimizer,
      build_work,
      move_statistics,
      build_evaluation_state,
      options,
      keeps_states=True,
  )
  assert isinstance(process, StatefulLearningProcess)
  return process


@garbage.collected_rarely()
def _build_process(
    model: BatchNormModel,
    partition: Partition,
    client_optimizer: tff.learning.optimizers.Optimizer,
    build_work: BuildWork,
    move_statistics: Optional[MoveStatistics],
    build_evaluation_state: Optional[BuildEvaluationState],
    options: Options,
    *,
    keeps_states: bool,
    exchanges_of: Optional[Process] = None,
) -> Process:
  """Checks the options and builds the process of `build_partitioned`.

  Without `keeps_states`, it is the process of `build_shared`.
  """
  requirements.check_model(model)
  options_lib.check_names(Options, options)
  config = ProcessConfig(client_optimizer, **options)

  def build(correction):
    return _Round(
        model,
        partition,
        dataclasses.replace(config, drift_correction=correction),
        build_work,
        move_statistics,
        keeps_states=keeps_states,
        exchanges_of=exchanges_of,
    ).build_process(build_evaluation_state)

  variants = config.round_variants()
  if variants is None:
    return build(config.drift_correction)
  return variants.combine(build(variants.short), build(variants.full))


# The options of the server's model, which the clients' models make together.
SERVER_OPTIONS = (
    'drift_correction',
    'server_optimizer',
    'model_aggregator',
    'statistics_aggregator',
    'sum_aggregator',
    'client_filter',
)


def check_left_out(
    algorithm: str, options: Options, names: Sequence[str]
) -> None:
  """Raises a `ValueError` if an option is given that has no effect.

  Args:
    algorithm: The name of the algorithm, and why they have none.
    options: The builder's options.
    names: The names of options that have none.
  """
  for name in names:
    if options.get(name) is not None:
      raise ValueError(f'{name} has no effect in {algorithm}; leave it out.')


# What each client counts, see `ClientWork.report`.
_CLIENT_COUNTS = {'num_clients', 'num_dropped_clients', 'num_participants'}


def _names(struct_type: tff.StructType) -> set[Any]:
  return {name for name, _ in tff.structure.iter_elements(struct_type)}


def _zipped(values: Sequence[tff.Value]) -> tff.Value:
  """Zips values at the server; an empty structure if there are none."""
  if not values:
    return tff.federated_value((), tff.SERVER)
  return tff.federated_zip(list(values))


class _Round:
  """A round of federated averaging, composed of its parts.

  1.  The server sends its state and the shared weights to the clients.
  2.  Each client does its work.
  3.  The aggregator combines the clients' updates, and the drift correction may
      change the result.
  4.  The finalizer makes the server's step.
  5.  The work ends the round: the drift correction's next state, metrics.

  The server's state has the states of exchanges before the update, if they need
  any, in TFF's place for a distributor.

  Clients keep their local variables, and what the work keeps at the clients. If
  that is nothing, and `keeps_states` is false, the process is a
  `tff.learning.templates.LearningProcess`.
  """

  def __init__(
      self,
      model: BatchNormModel,
      partition: Partition,
      config: ProcessConfig,
      build_work: BuildWork,
      move_statistics: Optional[MoveStatistics],
      *,
      keeps_states: bool,
      exchanges_of: Optional[Process],
  ):
    requirements.check_renorm(model, partition, config.statistics_aggregator)
    self._model = model
    self._config = config
    self._weights = SharedWeights(model, partition)
    correction = None
    if config.drift_correction is not None:
      correction = config.drift_correction.bind(
          model, self._weights, config.client_optimizer
      )
    self._work = build_work(model, config, self._weights, correction)
    self._initial = model.from_model_weights(model.initial_weights)
    client_type = tff.tensorflow.computation(
        self._initial_client_state, self._weights.weights_type()
    ).type_signature.result
    # The type of a client's state; `None` if clients keep none.
    self._client_type = client_type if client_type or keeps_states else None
    self._exchanges_of = exchanges_of
    self._update_clients = self._work.build_client_update(self._client_type)
    result_type = self._update_clients.result_type
    self._check_sums(result_type)
    self._aggregator = self._work.update_aggregator(
        result_type['update'], result_type['update_weight']
    ) or config.update_aggregator(
        result_type['update'],
        result_type['update_weight'],
        self._work.num_exchanges,
    )
    self._finalizer = finalizer.build_finalizer(
        self._weights,
        self._aggregator.next.type_signature.result.result.member,
        config.server_optimizer,
        move_statistics,
        config.server_clip_norm,
    )
    self._initialize = self._build_initialize()

  @property
  def _state_type(self) -> tff.FederatedType:
    return self._initialize.type_signature.result

  def _build_initialize(self) -> tff.Computation:
    @tff.tensorflow.computation
    def initial_weights():
      return tf.nest.map_structure(
          tf.constant, self._weights.shared(self._initial)
      )

    stand_ins = StandIns()
    stand_in = stand_ins.of(initial_weights)

    @tff.federated_computation
    def initialize():
      return tff.federated_zip(
          LearningAlgorithmState(
              tff.federated_eval(stand_in, tff.SERVER),
              self._initial_exchange_states(),
              tff.federated_eval(self._work.initial_state, tff.SERVER),
              self._aggregator.initialize(),
              self._finalizer.initialize(),
          )
      )

    return stand_ins.replaced(initialize)

  def _exchange_measurements(self, clients_round: ClientsRound) -> tff.Value:
    """Returns the measurements of the exchanges before the updates."""
    if self._exchanges_of is None:
      return _zipped(clients_round.exchange_measurements)
    measurements_type = (
        self._exchanges_of.next.type_signature.result.metrics.member.distributor
    )

    @tff.tensorflow.computation
    def nothing():
      return tff.types.structure_from_tensor_type_tree(
          lambda t: tf.zeros(t.shape, t.dtype), measurements_type
      )

    return tff.federated_eval(nothing, tff.SERVER)

  def _check_sums(self, result_type: tff.StructType) -> None:
    """Checks that `sum_aggregator` gets all that the model is computed from."""
    factory = self._config.sum_aggregator
    if factory is None:
      return
    correction = type(self._config.drift_correction).__name__
    sums = _names(result_type['report']['clients']) - _CLIENT_COUNTS
    if sums:
      raise ValueError(
          f'drift_correction={correction} is impossible with sum_aggregator:'
          f' its clients also send {", ".join(sorted(sums))}, apart from their'
          ' updates.'
      )
    if summed_update.of_round(factory).num_clients is None:
      return
    counters = self._weights.layers_with_counters
    if counters:
      raise ValueError(
          f'sum_aggregator={type(factory).__name__} is impossible with'
          ' variables of integers that training changes, whose changes have no'
          f' norm to compare with others, as in the layer {counters[0]!r}.'
      )
    parts = _names(result_type['update']) - SharedWeights.PARTS
    if parts:
      raise ValueError(
          f'drift_correction={correction} is impossible with'
          f' sum_aggregator={type(factory).__name__}: its clients also send'
          f' {", ".join(sorted(parts))}, for which there is no norm.'
      )

  def _references(self, *weights: tff.Value) -> list[tff.Value]:
    """Returns the last arguments of the aggregator, if it is a `SummedUpdate`.

    `weights` are the shared weights before the round, at clients and server.
    """
    if self._config.sum_aggregator is None:
      return []
    if not self._weights.statistics:
      return [
          tff.federated_value((), value.type_signature.placement)
          for value in weights
      ]

    @tff.tensorflow.computation(self._weights.weights_type())
    def running_statistics(weights):
      return self._weights.running_statistics(weights)

    return [tff.federated_map(running_statistics, value) for value in weights]

  def _initial_exchange_states(self) -> tff.Value:
    """Returns the states of the exchanges before the clients' updates."""
    if self._exchanges_of is not None:
      return self._exchanges_of.initialize().distributor
    return _zipped(
        [process.initialize() for process in self._update_clients.exchanges]
    )

  def _initial_client_state(
      self, shared: ModelWeights
  ) -> collections.OrderedDict[str, tf.Tensor]:
    """Returns a new client's local variables and the state of the work."""
    # The server knows only the initial values of local variables.
    state = collections.OrderedDict(
        (name, tf.constant(value))
        for name, value in self._weights.local(self._initial).items()
    )
    values = self._weights.merge(shared, state)
    state.update(self._work.initial_client_state(values))
    return state

  def build_process(
      self, build_evaluation_state: Optional[BuildEvaluationState]
  ) -> Process:
    """Builds a `StatefulLearningProcess` if clients keep states."""
    if self._client_type is not None:
      return self._build_stateful(build_evaluation_state)

    @tff.federated_computation(
        self._state_type, tff.FederatedType(self._work.data_type, tff.CLIENTS)
    )
    def next_fn(state, client_data):
      state, _, metrics = self._next(state, client_data)
      return tff.learning.templates.LearningProcessOutput(state, metrics)

    @tff.tensorflow.computation(self._state_type.member)
    def get_hparams(state):
      return collections.OrderedDict(
          client_work=state.client_work['hparams'],
          finalizer=self._finalizer.get_hparams(state.finalizer),
      )

    @tff.tensorflow.computation(
        self._state_type.member, get_hparams.type_signature.result
    )
    def set_hparams(state, hparams):
      return state._replace(
          client_work=collections.OrderedDict(
              state.client_work, hparams=hparams['client_work']
          ),
          finalizer=self._finalizer.set_hparams(
              state.finalizer, hparams['finalizer']
          ),
      )

    return whole_models.build_process(
        self._model,
        self._weights,
        self._initialize,
        checked_round.check_arguments(
            self._update_clients.stand_ins.replaced(next_fn),
            self._work.moving_statistics,
            self._update_clients.array_forms,
        ),
        get_hparams_fn=get_hparams,
        set_hparams_fn=set_hparams,
    )

  def _build_stateful(
      self, build_evaluation_state: Optional[BuildEvaluationState]
  ) -> StatefulLearningProcess:
    weights = self._weights

    @tff.federated_computation(
        self._state_type,
        tff.FederatedType(self._client_type, tff.CLIENTS),
        tff.FederatedType(self._work.data_type, tff.CLIENTS),
    )
    def next_fn(state, client_states, data):
      return StatefulProcessOutput(*self._next(state, data, client_states))

    @tff.tensorflow.computation(self._state_type.member)
    def initialize_client(state):
      return self._initial_client_state(state.global_model_weights)

    evaluation_state = None
    if build_evaluation_state is not None:
      evaluation_state = build_evaluation_state(
          self._work, weights, self._state_type, self._client_type
      )
    initial_local = weights.local(self._initial)

    def get_model_weights(state):
      return self._model.to_model_weights(
          weights.merge(state.global_model_weights, initial_local)
      )

    def get_client_model_weights(state, client_state):
      values = weights.merge(state.global_model_weights, client_state)
      return self._model.to_model_weights(
          self._work.client_model(values, client_state)
      )

    return StatefulLearningProcess(
        self._initialize,
        initialize_client,
        checked_round.check_arguments(
            self._update_clients.stand_ins.replaced(next_fn),
            self._work.moving_statistics,
            self._update_clients.array_forms,
        ),
        get_model_weights_fn=get_model_weights,
        get_client_model_weights_fn=get_client_model_weights,
        set_model_weights_fn=functools.partial(
            whole_models.set_shared_weights, self._model, weights
        ),
        has_client_models=(
            weights.has_local_predictions or self._work.has_client_models
        ),
        personalize_fn=(
            self._personalize
            if self._work.has_client_number
            or personal_phases.names(self._model)
            else None
        ),
        evaluation_state=evaluation_state,
    )

  def _next(
      self, state: tff.Value, data: tff.Value, *client_states: tff.Value
  ) -> tuple[tff.Value, tff.Value, tff.Value]:
    """Makes a round, in a `tff.federated_computation`.

    Returns:
      The server's next state, the clients' new states and the metrics.
    """
    work = self._work
    before = state.global_model_weights
    sent = tff.federated_broadcast(before)
    clients_round = self._update_clients.run(
        [
            state.distributor[number]
            for number in range(len(self._update_clients.exchanges))
        ],
        tff.federated_broadcast(work.state_for_clients(state.client_work)),
        sent,
        *client_states,
        data,
    )
    result = clients_round.result
    aggregated = self._aggregator.next(
        state.aggregator,
        result['update'],
        result['update_weight'],
        *self._references(sent, before),
    )
    finalized = self._finalizer.next(
        state.finalizer,
        before,
        work.server_update(state.client_work, aggregated.result),
    )
    work_state, work_metrics = work.finish_round(
        state.client_work,
        result['report'],
        aggregated.result,
        before,
        finalized.result,
    )
    new_state = tff.federated_zip(
        LearningAlgorithmState(
            finalized.result,
            _zipped(clients_round.exchange_states)
            if clients_round.exchange_states
            else state.distributor,
            work_state,
            aggregated.state,
            finalized.state,
        )
    )
    metrics = tff.federated_zip(
        collections.OrderedDict(
            distributor=self._exchange_measurements(clients_round),
            client_work=work_metrics,
            aggregator=aggregated.measurements,
            finalizer=finalized.measurements,
        )
    )
    client_states = work.finish_clients(
        result['client_state'], sent, aggregated.result
    )
    return new_state, client_states, metrics

  def _personalize(
      self, client_state: Mapping[str, Any], client_number: int
  ) -> collections.OrderedDict[str, Any]:
    """Draws the phases of a client's position encodings; adds its number."""
    if self._work.has_client_number:
      client_state = self._work.numbered(client_state, client_number)
    phases = personal_phases.draw(self._model, self._config.seed, client_number)
    return collections.OrderedDict(client_state, **phases)
