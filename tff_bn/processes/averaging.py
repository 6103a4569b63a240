"""Federated averaging of the variables that a partition shares.

FedAvg, FedBN, SiloBN, local affine and single differ only in the partition.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, Optional, Protocol
import warnings

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import moments_factories
from tff_bn.clients.client_work import ClientWork
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.drift_correction import DriftCorrection
from tff_bn.clients.drift_correction import RoundVariants
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.local_training_work import LocalTrainingWork
from tff_bn.common import checks
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.keras_model.partition import Partition
from tff_bn.keras_model.partition import Role
from tff_bn.keras_model.shared_weights import MoveStatistics
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import checked_round
from tff_bn.processes import finalizer
from tff_bn.processes import options as options_lib
from tff_bn.processes import personal_phases
from tff_bn.processes import requirements
from tff_bn.processes import short_rounds
from tff_bn.processes import whole_models
from tff_bn.processes.options import Options
from tff_bn.processes.options import ProcessConfig
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.processes.stateful_process import StatefulProcessOutput

LearningAlgorithmState = tff.learning.templates.LearningAlgorithmState
# Builds the computation that completes an aggregated update of the given type,
# see `ClientWork.complete_update`.
_BuildCompletion = Callable[[tff.Type], tff.Computation]


class BuildWork(Protocol):
  """Builds the clients' work in a round."""

  def __call__(  # noqa: D102
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: BoundCorrection,
  ) -> ClientWork:
    ...


class BuildEvaluationState(Protocol):
  """Builds `StatefulLearningProcess.evaluation_state`."""

  def __call__(  # noqa: D102
      self,
      work: ClientWork,
      weights: SharedWeights,
      state_type: tff.FederatedType,
      client_type: tff.Type,
  ) -> tff.Computation:
    ...


class _Parts:
  """The parts that the stateless and the stateful process share."""

  def __init__(
      self,
      model: BatchNormModel,
      partition: Partition,
      config: ProcessConfig,
      build_work: BuildWork = LocalTrainingWork,
      move_statistics: Optional[MoveStatistics] = None,
  ):
    self.model = model
    _check_renorm(model, partition, config)
    self.weights = SharedWeights(model, partition)
    correction = BoundCorrection()
    if config.drift_correction is not None:
      correction = config.drift_correction.bind(
          model, self.weights, config.client_optimizer
      )
    self.work = build_work(model, config, self.weights, correction)
    self._config = config
    self._move_statistics = move_statistics
    initial = model.from_model_weights(model.initial_weights)

    @tff.tensorflow.computation
    def initial_weights():
      return tf.nest.map_structure(tf.constant, self.weights.shared(initial))

    self.initial = initial
    self._has_phases = bool(personal_phases.names(model))
    self.initial_weights = initial_weights
    self.weights_type = initial_weights.type_signature.result
    self.client_type = tff.tensorflow.computation(
        self.initial_client_state, self.weights_type
    ).type_signature.result

  def initial_client_state(
      self, shared: ModelWeights
  ) -> collections.OrderedDict[str, tf.Tensor]:
    """Returns the initial state of a new client.

    Args:
      shared: The server's shared weights.

    Returns:
      The client's local variables and the drift correction's state, by name.
    """
    # The server knows only the initial values of local variables.
    state = collections.OrderedDict(
        (name, tf.constant(value))
        for name, value in self.weights.local(self.initial).items()
    )
    values = self.weights.merge(shared, state)
    state.update(self.work.correction.initial_client_state(values))
    return state

  @property
  def personalize_fn(
      self,
  ) -> Optional[Callable[[Mapping[str, Any], int], Mapping[str, Any]]]:
    """See `StatefulLearningProcess`; `None` without personal phases."""
    return self._personalize if self._has_phases else None

  def _personalize(
      self, client_state: Mapping[str, Any], client_number: int
  ) -> collections.OrderedDict[str, Any]:
    """Draws the phases of a client's position encodings."""
    phases = personal_phases.draw(self.model, self._config.seed, client_number)
    return collections.OrderedDict(client_state, **phases)

  def set_model_weights(self, state: Any, model_weights: ModelWeights) -> Any:
    """See `StatefulLearningProcess`."""
    values = self.model.from_model_weights(model_weights)
    self.model.check_types(values)
    self.weights.check_constants(values)
    shared = self.weights.shared(values)
    try:
      tf.nest.assert_same_structure(state.global_model_weights, shared)
    except (AttributeError, TypeError, ValueError) as error:
      raise TypeError(
          'state must be a state of this process, such as'
          f' process.initialize(), but is a {type(state).__name__} of another'
          ' structure.'
      ) from error
    given = self.weights.local(values)
    others = [
        name
        for name, value in self.weights.local(self.initial).items()
        if not np.array_equal(given[name], value, equal_nan=True)
    ]
    if others:
      warnings.warn(
          f'model_weights has other values than the model for {len(others)}'
          f' local variables, such as {others[0]}. The server has no local'
          " variables, so new clients start with the model's values. To start"
          ' with others, build the process from a BatchNormModel whose'
          ' keras_model_fn returns a model with them.',
          stacklevel=3,
      )
    return state._replace(global_model_weights=shared)

  def build_server(
      self,
      update_type: tff.Type,
      weight_type: tff.Type,
      build_completion: Optional[_BuildCompletion] = None,
  ) -> tuple[
      tff.templates.AggregationProcess,
      tff.learning.templates.FinalizerProcess,
  ]:
    """Builds the aggregator and the finalizer for a client's update."""
    factory = self._config.update_factory()
    aggregator = factory.create(update_type, weight_type)
    aggregated_type = aggregator.next.type_signature.result.result.member
    if build_completion is not None:
      aggregated_type = build_completion(aggregated_type).type_signature.result
    return aggregator, finalizer.build_finalizer(
        self.weights,
        aggregated_type,
        self._config.server_optimizer,
        self._move_statistics,
        self._config.server_clip_norm,
    )


def _check_renorm(
    model: BatchNormModel, partition: Partition, config: ProcessConfig
) -> None:
  """Checks that the statistics of `renorm=True` follow the running ones."""
  if partition.is_local(Role.MOVING_MEAN) and not partition.is_local(
      Role.OTHER_STATE
  ):
    requirements.check_no_renorm(
        partition.name,
        model,
        'running means and variances stay with the client, but the further'
        ' running statistics of the layer would be shared',
    )
  # The naive mean treats all running statistics alike.
  if not isinstance(
      config.statistics_aggregator,
      (moments_factories.NaiveMomentsFactory, type(None)),
  ):
    requirements.check_no_renorm(
        'statistics_aggregator',
        model,
        'it aggregates running means and variances, but the layer computes its'
        ' variance from further running statistics',
    )


def build_shared(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    build_work: BuildWork = LocalTrainingWork,
    move_statistics: Optional[MoveStatistics] = None,
    **options: Unpack[Options],
) -> Process:
  """Builds a process that averages every variable except personal phases.

  Personal phases of position encodings are always local. Variables that
  training cannot change are not averaged.

  Args:
    model: The model.
    client_optimizer: The client optimizer.
    build_work: Builds the clients' work. Default: ordinary local training.
    move_statistics: Computes the new running statistics, see
      `SharedWeights.apply`. Default: the aggregated ones.
    **options: See `Options`.

  Returns:
    A `LearningProcess`; a `StatefulLearningProcess` if clients keep a state,
    for `drift_correction` or for personal position encodings.
  """
  requirements.check_model(model)
  options_lib.check_names(Options, options)
  config = ProcessConfig(client_optimizer, **options)

  def build_parts(config):
    return _Parts(model, FEDAVG, config, build_work, move_statistics)

  variants = config.round_variants()
  if variants is not None:
    return _build_short_rounds(
        lambda config: _build_stateful(build_parts(config)), config, variants
    )
  parts = build_parts(config)
  if parts.client_type:
    return _build_stateful(parts)
  build = _build_stateless
  if parts.work.correction.needs_aggregated or parts.work.completes_update:
    build = _build_with_feedback
  return whole_models.complete(build(parts), model, parts.weights)


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

  Returns:
    The process.

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
  requirements.check_model(model)
  options_lib.check_names(Options, options)
  config = ProcessConfig(client_optimizer, **options)

  def build(config):
    parts = _Parts(model, partition, config, build_work, move_statistics)
    return _build_stateful(parts, build_evaluation_state)

  variants = config.round_variants()
  if variants is not None:
    return _build_short_rounds(build, config, variants)
  return build(config)


def _build_short_rounds(
    build: Callable[[ProcessConfig], StatefulLearningProcess],
    config: ProcessConfig,
    variants: RoundVariants,
) -> StatefulLearningProcess:
  """Builds a process whose rounds use a variant of the drift correction."""
  short, full = (
      build(dataclasses.replace(config, drift_correction=correction))
      for correction in (variants.short, variants.full)
  )
  return short_rounds.build_process(short, full, variants.num_clients)


def _build_stateless(parts: _Parts) -> tff.learning.templates.LearningProcess:
  client_work = parts.work.build_process()
  result_type = client_work.next.type_signature.result.result.member
  aggregator, final = parts.build_server(
      result_type.update, result_type.update_weight
  )
  return checked_round.check_next(
      tff.learning.templates.compose_learning_process(
          parts.initial_weights,
          tff.learning.templates.build_broadcast_process(parts.weights_type),
          client_work,
          aggregator,
          final,
      ),
      parts.work.moving_statistics,
  )


def _build_with_feedback(
    parts: _Parts,
) -> tff.learning.templates.LearningProcess:
  """Builds a process whose server does more with the aggregated update.

  TFF's templates pass it to the finalizer only. Here the drift correction may
  need it, and the client work may complete it.
  """
  work = parts.work
  update_clients = work.build_partial_update()

  @tff.federated_computation(
      tff.FederatedType(work.state_type, tff.CLIENTS),
      tff.FederatedType(parts.weights_type, tff.CLIENTS),
      tff.FederatedType(work.data_type, tff.CLIENTS),
  )
  def client_results(state, shared, data):
    (result, report), known = update_clients(state, shared, data)
    return result, report, *known

  result_type = client_results.type_signature.result[0].member
  build_completion = None
  if work.completes_update:
    known_types = [t.member for t in client_results.type_signature.result[2:]]
    build_completion = functools.partial(
        _build_completion, work, parts.weights_type, known_types
    )
  aggregator, final = parts.build_server(
      result_type.update, result_type.update_weight, build_completion
  )
  initialize = _build_initialize(parts, aggregator, final)
  state_type = initialize.type_signature.result

  @tff.federated_computation(
      state_type, tff.FederatedType(work.data_type, tff.CLIENTS)
  )
  def next_fn(state, data):
    (result, report), known = update_clients(
        tff.federated_broadcast(state.client_work),
        tff.federated_broadcast(state.global_model_weights),
        data,
    )

    def complete(update):
      if build_completion is None:
        return update
      return tff.federated_map(
          build_completion(update.type_signature.member),
          (
              state.client_work,
              state.global_model_weights,
              update,
              tff.federated_zip(known),
          ),
      )

    return tff.learning.templates.LearningProcessOutput(
        *_server_round(
            work,
            aggregator,
            final,
            state,
            (result.update, result.update_weight),
            report,
            complete,
        )
    )

  @tff.tensorflow.computation(state_type.member)
  def get_model_weights(state):
    return state.global_model_weights

  @tff.tensorflow.computation(state_type.member, parts.weights_type)
  def set_model_weights(state, weights):
    return state._replace(global_model_weights=weights)

  @tff.tensorflow.computation(state_type.member)
  def get_hparams(state):
    return collections.OrderedDict(
        client_work=state.client_work['hparams'],
        finalizer=final.get_hparams(state.finalizer),
    )

  @tff.tensorflow.computation(
      state_type.member, get_hparams.type_signature.result
  )
  def set_hparams(state, hparams):
    return state._replace(
        client_work=collections.OrderedDict(
            state.client_work, hparams=hparams['client_work']
        ),
        finalizer=final.set_hparams(state.finalizer, hparams['finalizer']),
    )

  return tff.learning.templates.LearningProcess(
      initialize,
      checked_round.check_arguments(next_fn, work.moving_statistics),
      get_model_weights,
      set_model_weights,
      get_hparams_fn=get_hparams,
      set_hparams_fn=set_hparams,
  )


def _build_completion(
    work: ClientWork,
    weights_type: tff.Type,
    known_types: Sequence[tff.Type],
    update_type: tff.Type,
) -> tff.Computation:
  """Builds the computation of `ClientWork.complete_update`."""

  @tff.tensorflow.computation(
      work.state_type, weights_type, update_type, list(known_types)
  )
  def complete(state, weights, update, known):
    return work.complete_update(state, weights, update, known)

  return complete


def _build_initialize(
    parts: _Parts,
    aggregator: tff.templates.AggregationProcess,
    final: tff.learning.templates.FinalizerProcess,
) -> tff.Computation:
  @tff.federated_computation
  def initialize():
    return tff.federated_zip(
        LearningAlgorithmState(
            tff.federated_eval(parts.initial_weights, tff.SERVER),
            tff.federated_value((), tff.SERVER),
            tff.federated_eval(parts.work.initial_state, tff.SERVER),
            aggregator.initialize(),
            final.initialize(),
        )
    )

  return initialize


def _build_stateful(
    parts: _Parts,
    build_evaluation_state: Optional[BuildEvaluationState] = None,
) -> StatefulLearningProcess:
  model, weights, work = parts.model, parts.weights, parts.work
  if not isinstance(work, LocalTrainingWork):
    raise TypeError(f'{type(work).__name__} supports no client states.')
  client_type = parts.client_type

  @tff.tensorflow.computation(work.state_type)
  def state_for_clients(state):
    correction = work.correction.state_for_clients(state['correction'])
    return collections.OrderedDict(state, correction=correction)

  @tff.tensorflow.computation(
      state_for_clients.type_signature.result,
      parts.weights_type,
      client_type,
      work.data_type,
  )
  def client_update(state, shared, client_state, dataset):
    result = work.run(state, shared, client_state, dataset)
    del result['values'], result['optimizer_state'], result['num_steps']
    return result

  result_type = client_update.type_signature.result
  aggregator, final = parts.build_server(
      result_type['update'], result_type['update_weight']
  )
  initialize = _build_initialize(parts, aggregator, final)
  state_type = initialize.type_signature.result

  @tff.tensorflow.computation(state_type.member)
  def initialize_client(state):
    return parts.initial_client_state(state.global_model_weights)

  evaluation_state = None
  if build_evaluation_state is not None:
    evaluation_state = build_evaluation_state(
        work, weights, state_type, client_type
    )
  initial_local = weights.local(parts.initial)

  def get_client_model_weights(state, client_state):
    return model.to_model_weights(
        weights.merge(state.global_model_weights, client_state)
    )

  return StatefulLearningProcess(
      initialize,
      initialize_client,
      checked_round.check_arguments(
          _build_stateful_next(
              work,
              state_for_clients,
              client_update,
              aggregator,
              final,
              state_type,
          ),
          work.moving_statistics,
      ),
      get_model_weights_fn=lambda state: get_client_model_weights(
          state, initial_local
      ),
      get_client_model_weights_fn=get_client_model_weights,
      set_model_weights_fn=parts.set_model_weights,
      has_client_models=weights.has_local_predictions,
      personalize_fn=parts.personalize_fn,
      evaluation_state=evaluation_state,
  )


def _build_stateful_next(
    work: ClientWork,
    state_for_clients: tff.Computation,
    client_update: tff.Computation,
    aggregator: tff.templates.AggregationProcess,
    final: tff.learning.templates.FinalizerProcess,
    state_type: tff.FederatedType,
) -> tff.Computation:
  """Builds a round: the clients' work, the aggregation, the server's step."""
  client_type = client_update.type_signature.parameter[2]

  @tff.federated_computation(
      state_type,
      tff.FederatedType(client_type, tff.CLIENTS),
      tff.FederatedType(work.data_type, tff.CLIENTS),
  )
  def next_fn(state, client_states, data):
    result = tff.federated_map(
        client_update,
        (
            tff.federated_broadcast(
                tff.federated_map(state_for_clients, state.client_work)
            ),
            tff.federated_broadcast(state.global_model_weights),
            client_states,
            data,
        ),
    )
    new_state, metrics = _server_round(
        work,
        aggregator,
        final,
        state,
        (result['update'], result['update_weight']),
        result['report'],
    )
    return StatefulProcessOutput(
        state=new_state, client_states=result['client_state'], metrics=metrics
    )

  return next_fn


def _server_round(
    work: ClientWork,
    aggregator: tff.templates.AggregationProcess,
    final: tff.learning.templates.FinalizerProcess,
    state: tff.Value,
    update_and_weight: tuple[tff.Value, tff.Value],
    report: tff.Value,
    complete: Callable[[tff.Value], tff.Value] = lambda update: update,
) -> tuple[tff.Value, tff.Value]:
  """Aggregates, makes the server's step and ends the round.

  Args:
    work: The clients' work.
    aggregator: The aggregator of the clients' updates.
    final: The server's step.
    state: The server's state.
    update_and_weight: The clients' updates and weights.
    report: The clients' reports.
    complete: Completes the aggregated update. Default: it is complete.

  Returns:
    The next state and the round's metrics, at the server.
  """
  aggregated = aggregator.next(state.aggregator, *update_and_weight)
  update = complete(aggregated.result)
  finalized = final.next(state.finalizer, state.global_model_weights, update)
  if work.correction.needs_aggregated:
    weights_type = finalized.result.type_signature.member

    @tff.tensorflow.computation(
        update.type_signature.member, weights_type, weights_type
    )
    def with_weights(update, before, after):
      return collections.OrderedDict(
          update, weights_before=before, weights_after=after
      )

    update = tff.federated_map(
        with_weights, (update, state.global_model_weights, finalized.result)
    )
  work_state, work_metrics = work.finish_round(
      state.client_work, report, update
  )
  new_state = tff.federated_zip(
      LearningAlgorithmState(
          finalized.result,
          state.distributor,
          work_state,
          aggregated.state,
          finalized.state,
      )
  )
  metrics = tff.federated_zip(
      collections.OrderedDict(
          # As in the metrics of TFF's templates.
          distributor=tff.federated_value((), tff.SERVER),
          client_work=work_metrics,
          aggregator=aggregated.measurements,
          finalizer=finalized.measurements,
      )
  )
  return new_state, metrics
