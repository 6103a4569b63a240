"""Centralized training: one model on the union of the clients' data.

The reference for measuring federated algorithms.
"""

import collections
from typing import Optional

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.catalog import algorithms
from tff_bn.clients.local_training import LocalTrainingWork
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.local_training_config import LocalTrainingOptions
from tff_bn.common import optimizers
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import checked_round
from tff_bn.processes import finalizer
from tff_bn.processes import options as options_lib
from tff_bn.processes import requirements
from tff_bn.processes import whole_models

__all__ = ['build_centralized']

_State = tff.learning.templates.LearningAlgorithmState


def build_centralized(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    momentum: Optional[float] = None,
    drift_correction: None = None,
    **options: Unpack[LocalTrainingOptions],
) -> tff.learning.templates.LearningProcess:
  """Builds ordinary training, in the form of a federated process.

  `next` takes exactly one dataset, the union of the clients' data. Unlike in a
  federated algorithm, the optimizer's state lasts from round to round, and
  `client_warmup_steps` counts from the start of the training.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer.
    momentum: μ of a momentum m ← μ m + (1-μ) g that replaces each gradient g,
      at least 0 and less than 1: the centralized counterpart of
      `build_dsgd(..., momentum=μ)`. Default `None`: the optimizer gets the
      gradients. `client_gradient_clip_norm` and `client_weight_decay` act on g.
    drift_correction: Must be `None`: a single model cannot drift apart.
    **options: `local_steps`, `local_epochs`, `client_weight_decay`,
      `client_learning_rate_schedule`, `client_warmup_rounds`,
      `client_warmup_steps`, `client_gradient_clip_norm`, `seed`, `jit_compile`:
      see `tff_bn.algorithms.Options`. There are no others.

  Returns:
    A `tff.learning.templates.LearningProcess`.

  Raises:
    TypeError: If the optimizer has the wrong type.
    ValueError: If an option has a value that is not allowed, `drift_correction`
      is given, or the model has personal position encodings.
  """
  requirements.check_all_shared(
      'centralized training', model, 'it trains one model on all data'
  )
  if drift_correction is not None:
    raise ValueError(
        f"drift_correction={type(drift_correction).__name__} can't be combined"
        f' with centralized training: {algorithms.ONE_MODEL}.'
    )
  if momentum is not None:
    algorithms.DSGD_MOMENTUM.check(momentum)
    client_optimizer = optimizers.AveragedGradients(client_optimizer, momentum)
  options_lib.check_names(LocalTrainingOptions, options)
  weights = SharedWeights(model, FEDAVG)
  work = LocalTrainingWork(
      model,
      LocalTrainingConfig(
          client_optimizer, client_weighting='num_examples', **options
      ),
      weights,
      None,
  )
  initial = model.from_model_weights(model.initial_weights)

  @tff.tensorflow.computation
  def initial_state():
    return _State(
        global_model_weights=tf.nest.map_structure(
            tf.constant, weights.shared(initial)
        ),
        distributor=(),
        client_work=collections.OrderedDict(
            work.initial_state(),
            optimizer=work.initial_optimizer_state(),
            num_steps=tf.zeros([], tf.int64),
        ),
        aggregator=(),
        finalizer=finalizer.initial_round_counts(),
    )

  state_type = initial_state.type_signature.result

  @tff.federated_computation
  def initialize():
    return tff.federated_eval(initial_state, tff.SERVER)

  return whole_models.build_process(
      model,
      weights,
      initialize,
      checked_round.check_arguments(
          _build_next(work, weights, state_type), work.moving_statistics
      ),
  )


def _build_next(
    work: LocalTrainingWork, weights: SharedWeights, state_type: tff.Type
) -> tff.Computation:
  """Builds the computation of a round."""

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
        weights=weights.shared(list(map(_as_number, result['values']))),
        optimizer=result['optimizer_state'],
        num_steps=result['num_steps'],
        report=result['report'],
    )

  @tff.tensorflow.computation(state_type)
  def work_state(state):
    client_work = collections.OrderedDict(state.client_work)
    del client_work['optimizer'], client_work['num_steps']
    return client_work

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
    return _State(
        global_model_weights=tf.nest.map_structure(
            tf.cast, new_weights, weights.shared_dtypes()
        ),
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
      tff.FederatedType(state_type, tff.SERVER),
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
            state.finalizer,
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
            finalizer=new_state.finalizer,
        )
    )
    return tff.learning.templates.LearningProcessOutput(new_state, metrics)

  return next_fn


def _as_number(value: tf.Tensor) -> tf.Tensor:
  """Returns a value that can be summed: booleans as integers."""
  return tf.cast(value, tf.uint8) if value.dtype == tf.bool else value
