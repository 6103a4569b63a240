"""HBN: hybrid batch normalization.

Chen, Xu, Wu, Kittler, Hybrid Batch Normalisation: Resolving the Dilemma of
Batch Normalisation in Federated Learning, ICML 2025, arXiv:2505.21877.
"""

import collections
from collections.abc import Callable, Sequence
import functools
from typing import Optional

import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import moments_factories
from tff_bn.aggregators import robust_moments
from tff_bn.aggregators import summed_update
from tff_bn.catalog import algorithms
from tff_bn.clients.client_work import ClientWork
from tff_bn.clients.client_work import Moves
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_training import LocalTrainingWork
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.moments_collector import StatisticsPass
from tff_bn.common import client_batches
from tff_bn.common import numerics
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import HBN
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.keras_model.shared_weights import Statistics
from tff_bn.layers.batch_moments import Moments
from tff_bn.layers.hybrid_batch_normalization import HybridBatchNormalization
from tff_bn.processes import averaging
from tff_bn.processes import options as options_lib
from tff_bn.processes import requirements
from tff_bn.processes.options import Options
from tff_bn.processes.options import ProcessConfig
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_hbn']

_LearningAlgorithmState = tff.learning.templates.LearningAlgorithmState


def build_hbn(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    statistics_rate: float = 0.002,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds HBN, algorithm 1 of the paper.

  Clients normalize with a mixture of the global statistics (μ, σ²), which are
  constant in a round, and the statistics of their batches, see
  `tff_bn.layers.HybridBatchNormalization`. The share of the batch is trained
  for each channel and never leaves the client. A round has one exchange:

  1.  Each client makes a pass over its batches of the round with the model that
      it received and its own shares, in training mode and without gradients,
      and computes the number n_k, mean μ_k and biased variance σ²_k of the
      inputs of each layer.
  2.  It trains on the same batches. The statistics stay constant.
  3.  The server averages the trained variables, except for the shares, and
      pools the moments of the clients' N = Σ n_k values:

          μ' = Σ n_k μ_k / N,  σ'² = Σ n_k (σ²_k + (μ_k - μ')²) / (N - 1).

      With the rate r it sets μ ← (1-r) μ + r μ', and σ² in the same way.

  **Evaluation.** Predictions use the global statistics alone, which follow the
  model slowly. So evaluation uses fresh statistics of the present model, from a
  pass of all clients with r = 1. `process.evaluation_state` makes this pass. It
  takes the arguments of `process.next` and uses the whole datasets, whatever
  `local_steps` is:
  ```
  evaluated = process.evaluation_state(state, client_states, client_datasets)
  keras_model = model.to_keras(process.get_model_weights(evaluated))
  ```
  `tff_bn.training.train` does so for all evaluations and for the final model;
  the exchanges that it counts do not include this.

  With a `sum_aggregator` of a fixed number of clients, as for differential
  privacy, there is no such pass: evaluation uses the running statistics.

  In this pass, each layer normalizes with the statistics of its batch alone.
  With the mixture, the inputs of deeper layers would differ from the inputs in
  the evaluated model.

  **Rate and start.** With r = 0.002, the statistics reach the data after many
  hundred rounds. For fewer rounds, a larger rate helps, and a start from the
  statistics of the data helps more (docs/algorithms/hbn.md):
  ```
  state = process.evaluation_state(
      process.initialize(), client_states, client_datasets)
  ```

  Example of a model, from any Keras model with batch normalization:
  ```
  model = BatchNormModel(
      lambda: tff_bn.convert_batch_norm(build_keras_model(), to='hybrid'), ...)
  ```

  The authors' code differs from the paper: its first pass stops after one
  batch, counts images instead of values, and collects the mixed statistics.
  Here the paper is followed.

  Args:
    model: The model. All its trainable batch normalization layers must be
      `tff_bn.layers.HybridBatchNormalization`.
    client_optimizer: The optimizer of local training.
    statistics_rate: r, greater than 0 and at most 1.
    **options: See `tff_bn.algorithms.Options`. `statistics_aggregator` must be
      a `tff_bn.aggregators.Rule`, such as `CoordinateMedian()`; it replaces the
      means in μ' and σ'². Default: the means. `client_filter` must not be
      given.

  Returns:
    A process whose client state holds the shares of the client.
    `get_model_weights` returns the server's model with the initial shares,
    which predicts the same as the clients' models.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or the model has
      no trainable batch normalization layer, or one of another class.
  """
  requirements.check_model(model)
  options_lib.check_names(Options, options)
  ProcessConfig(client_optimizer, **options)  # Checks them.
  layers = requirements.trained_batch_norm_layers('HBN', model)
  _check_classes(model, layers)
  algorithms.HBN_STATISTICS_RATE.check(statistics_rate)
  if options.get('client_filter') is not None:
    raise ValueError(
        f'client_filter={options["client_filter"]!r} is impossible with HBN,'
        ' which combines the statistics of all clients for each evaluation.'
    )
  rule = robust_moments.statistics_rule('HBN', options)
  factory = moments_factories.PooledMomentsFactory(rule)
  options['statistics_aggregator'] = factory
  sums = options.get('sum_aggregator')
  if sums is not None:
    sums = summed_update.of_round(sums)
  # A pass of all clients would need noise of its own.
  has_pass = sums is None or sums.num_clients is None
  return averaging.build_partitioned(
      model,
      HBN,
      client_optimizer,
      build_work=_HbnWork,
      move_statistics=functools.partial(_moved, statistics_rate),
      build_evaluation_state=functools.partial(
          _build_evaluation_state, factory, sums
      )
      if has_pass
      else None,
      **options,
  )


def _check_classes(
    model: BatchNormModel, layers: Sequence[keras.layers.Layer]
) -> None:
  """Checks that all layers are hybrid."""
  for layer in layers:
    if not isinstance(layer, HybridBatchNormalization):
      raise ValueError(
          'HBN trains HybridBatchNormalization layers, but the layer'
          f' {layer.name!r} of the model {model.keras_model.name!r} is a'
          f' {type(layer).__name__}. Replace all such layers by'
          " tff_bn.convert_batch_norm(keras_model, to='hybrid') in the"
          ' keras_model_fn of the model.'
      )


def _moved(
    rate: float, layer: int, old: Statistics, new: Moments
) -> Statistics:
  """Moves the running statistics by a rate to the moments of N values."""
  del layer
  variance = new.variance * (new.count / tf.maximum(new.count - 1, 1))
  # With rate 1, this is exactly `new`; `old + rate (new - old)` is not.
  mean, variance = (
      (1 - rate) * before + rate * after
      for before, after in zip(old, (new.mean, variance))
  )
  return mean, variance


class _HbnWork(LocalTrainingWork):
  """Local training after a pass that computes the moments of the inputs."""

  # `statistics_rate` moves them, not a momentum. Evaluation uses other ones.
  _moves = Moves.NEVER

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
  ):
    super().__init__(model, config, weights, correction)
    keras_weights = model.keras_model.weights
    moving_means = [keras_weights[mean] for mean, _ in weights.statistics]
    self._round_pass, self._evaluation_pass = (
        StatisticsPass(
            model,
            moving_means,
            jit_compile=config.jit_compile,
            normalize=normalize,
        )
        for normalize in (fused_batch_norm.training, fused_batch_norm.by_batch)
    )

  def _moments(
      self,
      statistics_pass: StatisticsPass,
      values: Sequence[tf.Tensor],
      dataset: client_batches.Data,
      round_num: tf.Tensor,
  ) -> list[Moments]:
    """Computes the moments of the inputs of all layers."""
    seed = None
    if statistics_pass.is_random:
      seed = self._training.seed_of(dataset, round_num)
    return statistics_pass.run(values, dataset, seed)

  def evaluation_moments(
      self,
      values: Sequence[tf.Tensor],
      dataset: client_batches.Data,
      round_num: tf.Tensor,
  ) -> list[Moments]:
    """Computes the moments of each layer's inputs for `evaluation_state`."""
    return self._moments(self._evaluation_pass, values, dataset, round_num)

  def collect(
      self,
      values: Sequence[tf.Tensor],
      dataset: client_batches.Data,
      round_num: tf.Tensor,
  ) -> list[Moments]:
    """Returns the moments of the inputs of each layer; see the base class."""
    batches = self._training.config.batches(dataset)
    return self._moments(self._round_pass, values, batches, round_num)

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """Returns the moments of the inputs; a dropped client's count is NaN."""
    dropped = tf.math.is_nan(weight)
    return [
        _counted(
            seen,
            tf.logical_not(dropped),
            default=(after[mean], after[variance]),
        )
        for (mean, variance), seen in zip(
            self._weights.statistics, result.collected, strict=True
        )
    ]


def _counted(
    seen: Moments, is_sound: tf.Tensor, default: Statistics
) -> Moments:
  """Returns a client's moments, which are ignored if they are not sound.

  `default` are the mean and variance of a client without values. If `is_sound`
  is false, the count becomes NaN.
  """
  found = tf.logical_and(is_sound, seen.count > 0)
  nan = tf.constant(np.nan, seen.count.dtype)
  mean, variance = (
      tf.where(found, value, other)
      for value, other in zip((seen.mean, seen.variance), default)
  )
  return Moments(tf.where(is_sound, seen.count, nan), mean, variance)


def _build_evaluation_state(
    factory: moments_factories.MomentsFactory,
    sums: Optional[summed_update.RoundSums],
    work: ClientWork,
    weights: SharedWeights,
    state_type: tff.FederatedType,
    client_type: tff.Type,
) -> tff.Computation:
  """Builds the computation of fresh statistics for evaluation."""
  assert isinstance(work, _HbnWork)

  @tff.tensorflow.computation(
      work.state_type, weights.weights_type(), client_type, work.data_type
  )
  def client_moments(state, shared, client_state, dataset):
    values = weights.merged_tensors(shared, client_state)
    found = work.evaluation_moments(values, dataset, state['round_num'])
    is_sound = numerics.all_finite(found)
    return [
        _counted(seen, is_sound, default=(values[mean], values[variance]))
        for (mean, variance), seen in zip(
            weights.statistics, found, strict=True
        )
    ]

  aggregate, moments_type = _aggregation(
      factory, sums, weights, client_moments.type_signature.result
  )

  @tff.tensorflow.computation(state_type.member, moments_type)
  def with_statistics(state, moments):
    before = state.global_model_weights
    after = weights.with_statistics(
        before, moments, functools.partial(_moved, 1.0)
    )
    return _LearningAlgorithmState(
        numerics.where(numerics.all_finite(after), after, before),
        state.distributor,
        state.client_work,
        state.aggregator,
        state.finalizer,
    )

  @tff.federated_computation(
      state_type,
      tff.FederatedType(client_type, tff.CLIENTS),
      tff.FederatedType(work.data_type, tff.CLIENTS),
  )
  def evaluation_state(state, client_states, data):
    moments = tff.federated_map(
        client_moments,
        (
            tff.federated_broadcast(state.client_work),
            tff.federated_broadcast(state.global_model_weights),
            client_states,
            data,
        ),
    )
    return tff.federated_map(
        with_statistics, (state, aggregate(state, moments))
    )

  return evaluation_state


def _aggregation(
    factory: moments_factories.MomentsFactory,
    sums: Optional[summed_update.RoundSums],
    weights: SharedWeights,
    moments_type: tff.Type,
) -> tuple[Callable[[tff.Value, tff.Value], tff.Value], tff.Type]:
  """Builds the aggregation of moments for evaluation.

  Returns:
    A function for TFF code of the server's state and the clients' moments, and
    the type of its result.
  """
  if sums is None:
    process = factory.create(moments_type)
    return (
        lambda state, moments: process.next(
            state.aggregator['statistics'], moments
        ).result,
        process.next.type_signature.result.result.member,
    )
  update_type = tff.to_type(collections.OrderedDict(statistics=moments_type))
  summed = summed_update.SummedUpdate(
      sums, factory, update_type, tff.TensorType(np.float32)
  )
  result_type = summed.next.type_signature.result.result.member

  @tff.tensorflow.computation(moments_type)
  def to_update(moments):
    return collections.OrderedDict(statistics=moments)

  @tff.tensorflow.computation(moments_type)
  def one(moments):
    del moments
    return tf.ones([], tf.float32)

  @tff.tensorflow.computation(weights.weights_type())
  def running_statistics(values):
    return weights.running_statistics(values)

  def aggregate(state, moments):
    output = summed.next(
        summed.initialize(),
        tff.federated_map(to_update, moments),
        tff.federated_map(one, moments),
        *(
            tff.federated_map(running_statistics, values)
            for values in (
                tff.federated_broadcast(state.global_model_weights),
                state.global_model_weights,
            )
        ),
    )
    return output.result['statistics']

  return aggregate, result_type['statistics']
