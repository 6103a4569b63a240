"""Federated averaging of those variables that a partition shares.

FedAvg, FedBN, SiloBN, local affine and single differ in the partition alone.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import model_update
from tff_bn.aggregators import moments_factories
from tff_bn.aggregators import robust_rule
from tff_bn.aggregators import weighted_mean
from tff_bn.clients.client_work import ClientWork
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.drift_correction import DriftCorrection
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import seeding
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.keras_model.partition import Partition
from tff_bn.keras_model.partition import Role
from tff_bn.keras_model.shared_weights import RunningVariance
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import finalizer
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.processes.stateful_process import StatefulProcessOutput

LearningAlgorithmState = tff.learning.templates.LearningAlgorithmState


def _check_aggregators(
    model_aggregator: model_update.AggregationFactory,
    statistics_aggregator: tff.aggregators.UnweightedAggregationFactory,
    client_weighting: str,
) -> None:
  """Raises an error if the aggregators cannot do what is asked."""
  if not isinstance(
      model_aggregator,
      (
          tff.aggregators.WeightedAggregationFactory,
          tff.aggregators.UnweightedAggregationFactory,
      ),
  ):
    raise TypeError(
        'model_aggregator must be a tff.aggregators factory, but is a'
        f' {type(model_aggregator).__name__}.'
    )
  if client_weighting != 'uniform' and not isinstance(
      model_aggregator, tff.aggregators.WeightedAggregationFactory
  ):
    raise ValueError(
        f'model_aggregator {type(model_aggregator).__name__} takes no weights,'
        f" so client_weighting={client_weighting!r} must be 'uniform'."
    )
  if not isinstance(
      statistics_aggregator, tff.aggregators.UnweightedAggregationFactory
  ):
    raise TypeError(
        'statistics_aggregator must be an unweighted factory over moments, such'
        ' as tff_bn.aggregators.PooledMomentsFactory(), but is a'
        f' {type(statistics_aggregator).__name__}.'
    )


def _check_drift_correction(drift_correction: DriftCorrection) -> None:
  if not isinstance(drift_correction, DriftCorrection):
    raise TypeError(
        'drift_correction must be a DriftCorrection, such as'
        ' tff_bn.algorithms.FedProx(0.001), but is a'
        f' {type(drift_correction).__name__}.'
    )


def local_training_work(
    model: BatchNormModel,
    config: LocalTrainingConfig,
    weights: SharedWeights,
    client_weighting: str,
    correction: BoundCorrection,
) -> ClientWork:
  """Builds the clients' work of ordinary local training.

  Args:
    model: The model.
    config: How to train.
    weights: Which variables are shared.
    client_weighting: `'num_examples'` or `'uniform'`.
    correction: What is done against the clients' drift.

  Returns:
    The work.
  """
  training = LocalTraining(model, config, correction=correction)
  return ClientWork(model, training, weights, client_weighting)


class _Parts:
  """What the stateless and the stateful process have in common."""

  def __init__(
      self,
      model: BatchNormModel,
      partition: Partition,
      client_optimizer: tff.learning.optimizers.Optimizer,
      *,
      build_work: Callable[..., ClientWork] = local_training_work,
      running_variance: Optional[RunningVariance] = None,
      server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None,
      local_steps: Optional[int] = None,
      local_epochs: int = 1,
      client_weighting: str = 'num_examples',
      client_weight_decay: float = 0.0,
      client_learning_rate_schedule: Optional[
          Callable[[tf.Tensor], Any]
      ] = None,
      client_warmup_steps: int = 0,
      client_gradient_clip_norm: Optional[float] = None,
      drift_correction: Optional[DriftCorrection] = None,
      model_aggregator: Optional[model_update.AggregationFactory] = None,
      statistics_aggregator: Optional[
          tff.aggregators.UnweightedAggregationFactory
      ] = None,
      seed: int = 0,
      jit_compile: bool = False,
  ):
    if model_aggregator is None:
      model_aggregator = weighted_mean.WeightedMeanFactory()
    if statistics_aggregator is None:
      statistics_aggregator = moments_factories.NaiveMomentsFactory()
    if isinstance(statistics_aggregator, robust_rule.Rule):
      statistics_aggregator = moments_factories.NaiveMomentsFactory(
          statistics_aggregator
      )
    _check_aggregators(
        model_aggregator, statistics_aggregator, client_weighting
    )
    config = LocalTrainingConfig(
        client_optimizer,
        local_steps=local_steps,
        local_epochs=local_epochs,
        client_weight_decay=client_weight_decay,
        client_learning_rate_schedule=client_learning_rate_schedule,
        client_warmup_steps=client_warmup_steps,
        client_gradient_clip_norm=client_gradient_clip_norm,
        seed=seed,
        jit_compile=jit_compile,
    )
    self.weights = SharedWeights(model, partition)
    correction = BoundCorrection()
    if drift_correction is not None:
      _check_drift_correction(drift_correction)
      correction = drift_correction.bind(model, self.weights, client_optimizer)
    self.work = build_work(
        model, config, self.weights, client_weighting, correction
    )
    self._aggregator_factory = model_update.ModelUpdateFactory(
        model_aggregator, statistics_aggregator
    )
    self._server_optimizer = server_optimizer
    self._running_variance = running_variance
    initial = model.from_model_weights(model.initial_weights)

    @tff.tensorflow.computation
    def initial_weights():
      return self.weights.shared([tf.constant(value) for value in initial])

    self.initial = initial
    self._seed = seed
    self._personal_names = [
        v.name for v in model.variables if v.role is Role.PERSONAL_PHASE
    ]
    self.initial_weights = initial_weights
    self.weights_type = initial_weights.type_signature.result
    self.client_type = tff.tensorflow.computation(
        self.initial_client_state, self.weights_type
    ).type_signature.result

  def initial_client_state(
      self, shared: ModelWeights
  ) -> collections.OrderedDict[str, tf.Tensor]:
    """What a client keeps that is seen for the first time.

    Args:
      shared: The shared weights that the server has now.

    Returns:
      Its local variables and what the correction keeps, by name.
    """
    # Of the local variables the server only knows the initial values.
    state = self.weights.local([tf.constant(value) for value in self.initial])
    values = self.weights.merge(shared, state)
    state.update(self.work.correction.initial_client_state(values))
    return state

  @property
  def personalize_fn(
      self,
  ) -> Optional[Callable[[Mapping[str, Any], int], Mapping[str, Any]]]:
    """See `StatefulLearningProcess`; `None` if nothing is personal."""
    return self._personalize if self._personal_names else None

  def _personalize(
      self, client_state: Mapping[str, Any], client_number: int
  ) -> collections.OrderedDict[str, Any]:
    """Draws the phases of a client's position encodings."""
    # NumPy takes no negative seeds.
    rng = seeding.generator(
        seeding.Stream.PERSONAL_PHASES, self._seed % 2**64, client_number
    )
    phases = rng.random(len(self._personal_names), np.float32)
    return collections.OrderedDict(
        client_state, **dict(zip(self._personal_names, phases, strict=True))
    )

  def build_server(self, update_type: tff.Type, weight_type: tff.Type) -> tuple[
      tff.templates.AggregationProcess,
      tff.learning.templates.FinalizerProcess,
  ]:
    """Builds the aggregator and the finalizer for a client's update."""
    aggregator = self._aggregator_factory.create(update_type, weight_type)
    return aggregator, finalizer.build_finalizer(
        self.weights,
        aggregator.next.type_signature.result.result.member,
        self._server_optimizer,
        self._running_variance,
    )


def build_shared(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    build_work: Callable[..., ClientWork] = local_training_work,
    running_variance: Optional[RunningVariance] = None,
    **options: Unpack[Options],
) -> Process:
  """Builds the averaging of all variables but what is personal in any case.

  Args:
    model: The model.
    client_optimizer: The client optimizer.
    build_work: Makes the clients' work of the model, the
      `LocalTrainingConfig`, the `SharedWeights`, the client weighting and the
      `BoundCorrection`.
    running_variance: What the running variances become, see
      `SharedWeights.apply`. Default: the aggregated ones.
    **options: See `Options`.

  Returns:
    A `LearningProcess`; a `StatefulLearningProcess` if clients keep something:
    for `drift_correction`, or position encodings of their own.
  """
  parts = _Parts(
      model,
      FEDAVG,
      client_optimizer,
      build_work=build_work,
      running_variance=running_variance,
      **options,
  )
  if parts.client_type:
    return _build_stateful(model, parts)
  return _build_stateless(parts)


def build_corrected(
    build_process: Callable[..., Process],
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    correction: DriftCorrection,
    **options: Any,
) -> Process:
  """Builds another algorithm with a correction of the clients' drift.

  Args:
    build_process: The other algorithm's builder.
    model: The model.
    client_optimizer: The client optimizer.
    correction: The correction.
    **options: The other arguments of `build_process`.

  Returns:
    The process.

  Raises:
    ValueError: If the other algorithm can't be corrected, or has a correction.
  """
  other = options.pop('drift_correction', None)
  if other is not None:
    raise ValueError(
        f'{type(correction).__name__} and {type(other).__name__} are both'
        " corrections of the clients' drift, of which there can be one only."
    )
  return build_process(
      model, client_optimizer, drift_correction=correction, **options
  )


def build_partitioned(
    model: BatchNormModel,
    partition: Partition,
    client_optimizer: tff.learning.optimizers.Optimizer,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds the averaging of the shared variables; the others are client state.

  Args:
    model: The model.
    partition: Which variables are local.
    client_optimizer: The client optimizer.
    **options: See `Options`.

  Returns:
    The process. A client's state is an `OrderedDict` from the names of the
    local variables (`model.variables[i].name`) to their values, and from other
    names to what it keeps for `drift_correction`.
  """
  return _build_stateful(
      model, _Parts(model, partition, client_optimizer, **options)
  )


def _build_stateless(parts: _Parts) -> tff.learning.templates.LearningProcess:
  client_work = parts.work.build_process()
  result_type = client_work.next.type_signature.result.result.member
  aggregator, final = parts.build_server(
      result_type.update, result_type.update_weight
  )
  return tff.learning.templates.compose_learning_process(
      parts.initial_weights,
      tff.learning.templates.build_broadcast_process(parts.weights_type),
      client_work,
      aggregator,
      final,
  )


def _build_stateful(
    model: BatchNormModel, parts: _Parts
) -> StatefulLearningProcess:
  weights, work = parts.weights, parts.work
  client_type = parts.client_type

  @tff.tensorflow.computation(
      work.state_type, parts.weights_type, client_type, work.data_type
  )
  def client_update(state, shared, client_state, dataset):
    result = work.run(state, shared, client_state, dataset)
    del result['values'], result['optimizer_state'], result['num_steps']
    return result

  result_type = client_update.type_signature.result
  aggregator, final = parts.build_server(
      result_type['update'], result_type['update_weight']
  )

  @tff.federated_computation
  def initialize():
    return tff.federated_zip(
        LearningAlgorithmState(
            tff.federated_eval(parts.initial_weights, tff.SERVER),
            tff.federated_value((), tff.SERVER),
            tff.federated_eval(work.initial_state, tff.SERVER),
            aggregator.initialize(),
            final.initialize(),
        )
    )

  state_type = initialize.type_signature.result

  @tff.tensorflow.computation(state_type.member)
  def initialize_client(state):
    return parts.initial_client_state(state.global_model_weights)

  @tff.federated_computation(
      state_type,
      tff.FederatedType(client_type, tff.CLIENTS),
      tff.FederatedType(work.data_type, tff.CLIENTS),
  )
  def next_fn(state, client_states, data):
    result = tff.federated_map(
        client_update,
        (
            tff.federated_broadcast(state.client_work),
            tff.federated_broadcast(state.global_model_weights),
            client_states,
            data,
        ),
    )
    aggregated = aggregator.next(
        state.aggregator, result['update'], result['update_weight']
    )
    finalized = final.next(
        state.finalizer, state.global_model_weights, aggregated.result
    )
    work_state, work_metrics = work.finish_round(
        state.client_work, result['report'], aggregated.result
    )
    return StatefulProcessOutput(
        state=tff.federated_zip(
            LearningAlgorithmState(
                finalized.result,
                state.distributor,
                work_state,
                aggregated.state,
                finalized.state,
            )
        ),
        client_states=result['client_state'],
        metrics=tff.federated_zip(
            collections.OrderedDict(
                client_work=work_metrics,
                aggregator=aggregated.measurements,
                finalizer=finalized.measurements,
            )
        ),
    )

  initial_local = weights.local(parts.initial)

  def get_client_model_weights(state, client_state):
    return model.to_model_weights(
        weights.merge(state.global_model_weights, client_state)
    )

  return StatefulLearningProcess(
      initialize,
      initialize_client,
      next_fn,
      get_model_weights_fn=lambda state: get_client_model_weights(
          state, initial_local
      ),
      get_client_model_weights_fn=get_client_model_weights,
      has_client_models=bool(initial_local),
      personalize_fn=parts.personalize_fn,
  )
