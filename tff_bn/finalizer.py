"""The server's step: an optimizer for weights, assignment for statistics."""

import collections
import functools
from typing import Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.local_training import hyperparameter_dtype
from tff_bn.local_training import initialize_optimizer
from tff_bn.shared_weights import RunningVariance
from tff_bn.shared_weights import SharedWeights


def build_finalizer(
    weights: SharedWeights,
    update_type: tff.Type,
    server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None,
    running_variance: Optional[RunningVariance] = None,
) -> tff.learning.templates.FinalizerProcess:
  """Builds the finalizer of an averaging algorithm.

  The aggregated difference of the trainable variables is the server
  optimizer's gradient (Reddi et al., FedOpt, ICLR 2021, algorithm 1). Running
  statistics are assigned instead: a server optimizer could make a variance
  negative. Without any client, all stays as it is; an optimizer with momentum
  would else go on.

  Args:
    weights: The shared weights.
    update_type: The type of the aggregated update, see
      `tff_bn.aggregators.ModelUpdateFactory`.
    server_optimizer: The server optimizer. Default: SGD with learning rate 1,
      which makes the aggregate the new model.
    running_variance: What the running variances become. Default: the aggregated
      ones.

  Returns:
    A `tff.learning.templates.FinalizerProcess`.

  Raises:
    TypeError: If `server_optimizer` is no `tff.learning.optimizers.Optimizer`.
  """
  if server_optimizer is None:
    server_optimizer = tff.learning.optimizers.build_sgdm(1.0)
  if not isinstance(server_optimizer, tff.learning.optimizers.Optimizer):
    raise TypeError(
        'server_optimizer must be a tff.learning.optimizers.Optimizer, such as'
        ' tff.learning.optimizers.build_adam(0.01), but is a'
        f' {type(server_optimizer).__name__}.'
    )
  weights_type = weights.weights_type()
  specs = weights.trainable_specs()
  dtype = hyperparameter_dtype(server_optimizer, specs)

  @tff.tensorflow.computation
  def initial_state():
    return initialize_optimizer(server_optimizer, specs, dtype)

  state_type = initial_state.type_signature.result

  @tff.federated_computation
  def initialize():
    return tff.federated_eval(initial_state, tff.SERVER)

  @tff.tensorflow.computation(state_type, weights_type, update_type)
  def step(state, weights_before, update):
    trainable = weights_before.trainable
    if 'trainable' in update:
      state, trainable = tf.nest.map_structure(
          functools.partial(tf.where, update['num_participants'] > 0),
          server_optimizer.next(state, trainable, update['trainable']),
          (state, trainable),
      )
    return state, weights.apply(
        weights_before, trainable, update, running_variance
    )

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
        tff.federated_value(collections.OrderedDict(), tff.SERVER),
    )

  @tff.tensorflow.computation(state_type)
  def get_hparams(state):
    return server_optimizer.get_hparams(state)

  @tff.tensorflow.computation(state_type, get_hparams.type_signature.result)
  def set_hparams(state, hparams):
    return server_optimizer.set_hparams(state, hparams)

  return tff.learning.templates.FinalizerProcess(
      initialize,
      next_fn,
      get_hparams_fn=get_hparams,
      set_hparams_fn=set_hparams,
  )
