"""The server's step: an optimizer for weights, assignment for statistics."""

import collections
from collections.abc import Mapping
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import checks
from tff_bn.common import numerics
from tff_bn.common import optimizers
from tff_bn.keras_model.shared_weights import MoveStatistics
from tff_bn.keras_model.shared_weights import SharedWeights


def initial_round_counts() -> collections.OrderedDict[str, tf.Tensor]:
  """Returns the initial counts of rounds, see `build_finalizer`."""
  return collections.OrderedDict(
      failed_rounds=tf.zeros([], tf.int32),
      rejected_rounds=tf.zeros([], tf.int32),
  )


def count_round(
    counts: Mapping[str, tf.Tensor],
    update: Mapping[str, Any],
    is_rejected: tf.Tensor,
) -> collections.OrderedDict[str, tf.Tensor]:
  """Returns the counts of rounds after a round, see `build_finalizer`.

  `update` has `num_participants`, the number of clients with weight, and
  `num_dropped`, the number of dropped clients.
  """
  nobody_left = tf.logical_and(
      update['num_dropped'] > 0,
      # Not `==`, which compares objects while TFF traces.
      tf.equal(update['num_participants'], 0),
  )
  failed = tf.logical_or(nobody_left, is_rejected)
  return collections.OrderedDict(
      failed_rounds=tf.where(failed, counts['failed_rounds'] + 1, 0),
      rejected_rounds=counts['rejected_rounds']
      + tf.cast(is_rejected, tf.int32),
  )


def build_finalizer(
    weights: SharedWeights,
    update_type: tff.Type,
    server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None,
    move_statistics: Optional[MoveStatistics] = None,
    clip_norm: Optional[float] = None,
) -> tff.learning.templates.FinalizerProcess:
  """Builds the finalizer of an averaging algorithm.

  The aggregated difference of the trainable variables is the server
  optimizer's gradient (Reddi et al., FedOpt, ICLR 2021, algorithm 1). Running
  statistics are assigned, because a server optimizer could make a variance
  negative. Nothing changes in a round without clients (otherwise an optimizer
  with momentum would continue) or if the new model, statistics or optimizer
  state is not finite.

  The process's state and its measurements have two counts:

  *   `failed_rounds`: the number of consecutive rounds, up to this one, that
      failed because clients were dropped and none was left, or because the
      result was not finite.
  *   `rejected_rounds`: the number of rounds so far with a result that was not
      finite.

  Args:
    weights: The shared weights.
    update_type: The type of the aggregated update, see
      `tff_bn.aggregators.ModelUpdateFactory`.
    server_optimizer: Default: SGD with learning rate 1, which makes the
      aggregate the new model.
    move_statistics: Computes the new running statistics, see
      `SharedWeights.apply`. Default: the aggregated ones.
    clip_norm: The largest global norm of the aggregated update of the trainable
      variables; a longer one is scaled down to it. Default: no clipping.
  """
  if server_optimizer is None:
    server_optimizer = tff.learning.optimizers.build_sgdm(1.0)
  checks.check_type(
      'server_optimizer',
      server_optimizer,
      tff.learning.optimizers.Optimizer,
      'be a tff.learning.optimizers.Optimizer, such as'
      ' tff.learning.optimizers.build_adam(0.01)',
  )
  weights_type = weights.weights_type()
  specs = weights.trainable_specs()
  dtype = optimizers.hyperparameter_dtype(server_optimizer, specs)
  optimizers.check_hyperparameters('server_optimizer', server_optimizer, dtype)

  @tff.tensorflow.computation
  def initial_state():
    return collections.OrderedDict(
        optimizer=optimizers.initialize_optimizer(
            server_optimizer, specs, dtype
        ),
        **initial_round_counts(),
    )

  state_type = initial_state.type_signature.result

  @tff.federated_computation
  def initialize():
    return tff.federated_eval(initial_state, tff.SERVER)

  @tff.tensorflow.computation(state_type, weights_type, update_type)
  def step(state, weights_before, update):
    before = (state['optimizer'], weights_before.trainable)
    after = before
    if 'trainable' in update:
      gradient = update['trainable']
      if clip_norm is not None:
        gradient = numerics.clip_by_global_norm(gradient, clip_norm)
      after = numerics.where(
          update['num_participants'] > 0,
          server_optimizer.next(*before, gradient),
          before,
      )
    optimizer_state, trainable = after
    weights_after = weights.apply(
        weights_before, trainable, update, move_statistics
    )
    is_finite = numerics.all_finite([optimizer_state, weights_after])
    new_state = collections.OrderedDict(
        optimizer=numerics.where(
            is_finite, optimizer_state, state['optimizer']
        ),
        **count_round(state, update, tf.logical_not(is_finite)),
    )
    return new_state, numerics.where(is_finite, weights_after, weights_before)

  @tff.federated_computation(
      initialize.type_signature.result,
      tff.FederatedType(weights_type, tff.SERVER),
      tff.FederatedType(update_type, tff.SERVER),
  )
  def next_fn(state, weights_before, update):
    state, weights_after = tff.federated_map(
        step, (state, weights_before, update)
    )
    return tff.templates.MeasuredProcessOutput(
        state,
        weights_after,
        tff.federated_zip(
            collections.OrderedDict(
                (name, state[name]) for name in initial_round_counts()
            )
        ),
    )

  @tff.tensorflow.computation(state_type)
  def get_hparams(state):
    return server_optimizer.get_hparams(state['optimizer'])

  @tff.tensorflow.computation(state_type, get_hparams.type_signature.result)
  def set_hparams(state, hparams):
    optimizer_state = server_optimizer.set_hparams(state['optimizer'], hparams)
    return collections.OrderedDict(state, optimizer=optimizer_state)

  return tff.learning.templates.FinalizerProcess(
      initialize,
      next_fn,
      get_hparams_fn=get_hparams,
      set_hparams_fn=set_hparams,
  )
