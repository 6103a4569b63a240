"""Centralized training: one model on the union of the clients' data.

The reference that federated algorithms are measured against.
"""

import collections
from collections.abc import Callable
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients.client_work import ClientWork
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import finalizer
from tff_bn.processes import requirements

__all__ = ['build_centralized']


def build_centralized(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    local_steps: Optional[int] = None,
    local_epochs: int = 1,
    client_weight_decay: float = 0.0,
    client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]] = None,
    client_warmup_steps: int = 0,
    client_gradient_clip_norm: Optional[float] = None,
    drift_correction: None = None,
    seed: int = 0,
    jit_compile: bool = False,
) -> tff.learning.templates.LearningProcess:
  """Builds ordinary training, in the form of a federated process.

  `next` takes exactly one dataset: the union of the clients' data. Unlike in a
  federated algorithm, the optimizer's state lasts from round to round.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer.
    local_steps: How many batches to take from the front of the dataset in a
      round. Default: all.
    local_epochs: How many times to go through the dataset in a round, before
      `local_steps` cuts it off.
    client_weight_decay: λ of the coupled L2 decay.
    client_learning_rate_schedule: Maps the number of finished rounds (an int32
      scalar tensor) to the learning rate. Default: constant.
    client_warmup_steps: Over how many steps the learning rate rises linearly at
      the start of the training: in step n it is multiplied by
      min(1, n / client_warmup_steps).
    client_gradient_clip_norm: The largest global norm of a batch's gradient; a
      longer one is scaled down to it. Default: any.
    drift_correction: Must be `None`, see below.
    seed: Determines dropout and other random layers.
    jit_compile: Whether XLA compiles the steps.

  Returns:
    A `tff.learning.templates.LearningProcess`.

  Raises:
    TypeError: If the optimizer has the wrong type.
    ValueError: If an argument has a value that is not allowed; or there is a
      `drift_correction`: one model does not drift apart; or the model has
      position encodings that are a client's own.
  """
  requirements.check_all_shared(
      'centralized training', model, 'it trains one model on all data'
  )
  if drift_correction is not None:
    raise ValueError(
        f"drift_correction={type(drift_correction).__name__} can't be combined"
        ' with centralized training: there is one model, so there are no'
        ' clients that drift apart.'
    )
  training = LocalTraining(
      model,
      LocalTrainingConfig(
          client_optimizer,
          local_steps=local_steps,
          local_epochs=local_epochs,
          client_weight_decay=client_weight_decay,
          client_learning_rate_schedule=client_learning_rate_schedule,
          client_warmup_steps=client_warmup_steps,
          client_gradient_clip_norm=client_gradient_clip_norm,
          seed=seed,
          jit_compile=jit_compile,
      ),
  )
  weights = SharedWeights(model, FEDAVG)
  work = ClientWork(model, training, weights, 'num_examples')
  initial = model.from_model_weights(model.initial_weights)

  @tff.tensorflow.computation
  def initial_state():
    return tff.learning.templates.LearningAlgorithmState(
        global_model_weights=weights.shared([tf.constant(v) for v in initial]),
        distributor=(),
        client_work=collections.OrderedDict(
            work.initial_state(),
            optimizer=training.initial_optimizer_state(),
            num_steps=tf.zeros([], tf.int64),
        ),
        aggregator=(),
        finalizer=finalizer.initial_round_counts(),
    )

  state_type = initial_state.type_signature.result

  @tff.federated_computation
  def initialize():
    return tff.federated_eval(initial_state, tff.SERVER)

  @tff.tensorflow.computation(state_type, work.data_type)
  def train(state, dataset):
    work_state = state.client_work
    result = work.run(
        work_state,
        state.global_model_weights,
        {},
        dataset,
        work_state['optimizer'],
        work_state['num_steps'],
    )
    return collections.OrderedDict(
        weights=weights.shared(result['values']),
        optimizer=result['optimizer_state'],
        num_steps=result['num_steps'],
        report=result['report'],
    )

  @tff.tensorflow.computation(state_type)
  def work_state(state):
    client_work = collections.OrderedDict(state.client_work)
    del client_work['optimizer'], client_work['num_steps']
    return client_work

  @tff.tensorflow.computation(state_type)
  def round_counts(state):
    return state.finalizer

  result_type = train.type_signature.result

  @tff.tensorflow.computation(
      work.state_type,
      state_type.finalizer,
      result_type['weights'],
      result_type['optimizer'],
      result_type['num_steps'],
      result_type['report']['clients'],
  )
  def finish(
      client_work, counts, new_weights, optimizer_state, num_steps, clients
  ):
    check = tf.debugging.assert_equal(
        clients['num_clients'],
        1,
        message=(
            'Centralized training takes exactly one dataset, the union of the'
            " clients' data."
        ),
    )
    with tf.control_dependencies([check]):
      client_work = tf.nest.map_structure(tf.identity, client_work)
    return tff.learning.templates.LearningAlgorithmState(
        global_model_weights=new_weights,
        distributor=(),
        client_work=collections.OrderedDict(
            client_work, optimizer=optimizer_state, num_steps=num_steps
        ),
        aggregator=(),
        # The client has already rejected a result that is not finite.
        finalizer=finalizer.count_round(
            counts,
            dict(
                num_dropped=clients['num_dropped_clients'],
                num_participants=clients['num_participants'],
            ),
            tf.constant(False),
        ),
    )

  @tff.federated_computation(
      initialize.type_signature.result,
      tff.FederatedType(work.data_type, tff.CLIENTS),
  )
  def next_fn(state, data):
    result = tff.federated_map(train, (tff.federated_broadcast(state), data))
    client_work, metrics = work.finish_round(
        tff.federated_map(work_state, state), result['report']
    )
    # There is one client, so the sum is its value, to the bit.
    new_state = tff.federated_map(
        finish,
        (
            client_work,
            tff.federated_map(round_counts, state),
            tff.federated_sum(result['weights']),
            tff.federated_sum(result['optimizer']),
            tff.federated_sum(result['num_steps']),
            tff.federated_sum(result['report']['clients']),
        ),
    )
    nothing = tff.federated_value(collections.OrderedDict(), tff.SERVER)
    metrics = tff.federated_zip(
        collections.OrderedDict(
            distributor=nothing,
            client_work=metrics,
            aggregator=nothing,
            finalizer=tff.federated_map(round_counts, new_state),
        )
    )
    return tff.learning.templates.LearningProcessOutput(new_state, metrics)

  @tff.tensorflow.computation(state_type)
  def get_model_weights(state):
    return state.global_model_weights

  @tff.tensorflow.computation(state_type, state_type.global_model_weights)
  def set_model_weights(state, model_weights):
    return tff.learning.templates.LearningAlgorithmState(
        global_model_weights=model_weights,
        distributor=(),
        client_work=state.client_work,
        aggregator=(),
        finalizer=state.finalizer,
    )

  return tff.learning.templates.LearningProcess(
      initialize, next_fn, get_model_weights, set_model_weights
  )
