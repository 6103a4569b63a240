"""Local training: what one client does with a model and its data in a round."""

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow as tf

from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_step import LocalStep
from tff_bn.clients.local_step import dense_gradients
from tff_bn.clients.local_step import output_and_loss
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import numerics
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model.batch_norm_calls import TrainingCall
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.stateless_function import StatelessFunction
from tff_bn.keras_model.stateless_function import fingerprint


class LocalTraining(LocalStep):
  """Trains a model on one client's dataset, inside a TFF computation."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      *,
      batch_norm_call: TrainingCall = fused_batch_norm.training,
      collecting: Sequence[tf.Variable] = (),
      skipped_steps: int = 0,
      correction: Optional[BoundCorrection] = None,
  ):
    """Traces the training loop.

    Args:
      model: The model.
      config: How to train.
      batch_norm_call: What batch normalization layers do. Default: what Keras's
        do in training, faster.
      collecting: Variables outside of the model in which `batch_norm_call`
        collects something. They start each round with their present values.
      skipped_steps: How many of the steps are made elsewhere, before `train`.
      correction: What is done against the clients' drift. Default: nothing.
    """
    super().__init__(model, config, correction)
    correction = self.correction
    metrics = self.metrics
    keras_model = model.keras_model
    trainable = keras_model.trainable_weights
    dtype = trainable[0].dtype
    loss_fn = model.loss_fn()
    scales_loss = mixed_precision.computes_in_float16(keras_model)
    others = [*keras_model.non_trainable_weights, *collecting]

    def step(x, y, optimizer_state, loss_scale, num_steps):
      state_before = [tf.identity(v) for v in others] if scales_loss else []
      with tf.GradientTape() as tape:
        with correction.watching():
          output, loss = output_and_loss(keras_model, loss_fn, x, y)
        target, penalty = loss, correction.penalty(x)
        if penalty is not None:
          target += tf.cast(penalty, target.dtype)
        if scales_loss:
          target = loss_scale.scale_loss(target)
      gradients = dense_gradients(tape, target, trainable)
      if scales_loss:
        gradients = loss_scale.unscale(gradients)

      def update():
        new_state, weights = self.apply_gradients(
            optimizer_state,
            tuple(tf.convert_to_tensor(v) for v in trainable),
            gradients,
            num_steps,
        )
        for variable, weight in zip(trainable, weights):
          variable.assign(weight)
        for metric in metrics:
          metric.update_state(y, output)
        batch_size = tf.shape(tf.nest.flatten(y)[0], tf.int64)[0]
        loss_sum = tf.cast(loss, dtype) * tf.cast(batch_size, dtype)
        return new_state, batch_size, loss_sum, num_steps + 1

      def skip():
        # As if there had been no such batch: where float16 overflowed, running
        # statistics and the loss can be infinite, too.
        for variable, value in zip(others, state_before):
          variable.assign(value)
        return (
            optimizer_state,
            tf.zeros([], tf.int64),
            tf.zeros([], dtype),
            num_steps,
        )

      if not scales_loss:
        return *update(), loss_scale
      finite = numerics.all_finite([loss, *gradients])
      return *tf.cond(finite, update, skip), loss_scale.after_step(finite)

    if config.jit_compile:
      # Not the whole loop: XLA has no datasets.
      step = tf.function(step, jit_compile=True)

    def train(dataset, optimizer_state, num_steps):
      num_examples = tf.zeros([], tf.int64)
      loss_sum = tf.zeros([], dtype)
      loss_scale = mixed_precision.LossScale.initial() if scales_loss else ()
      dataset = dataset.repeat(config.local_epochs)
      if config.local_steps is not None:
        dataset = dataset.take(config.local_steps)
      if skipped_steps:
        dataset = dataset.skip(skipped_steps)
      # An iterator, since `for batch in dataset` becomes `Dataset.reduce`,
      # which instantiates its function anew at each call.
      for x, y in iter(dataset):
        # The kernels of convolutions cannot compute an empty batch.
        if tf.shape(tf.nest.flatten(y)[0])[0] > 0:
          optimizer_state, batch_size, batch_loss, num_steps, loss_scale = step(
              x, y, optimizer_state, loss_scale, num_steps
          )
          num_examples += batch_size
          loss_sum += batch_loss
      return (
          [tf.identity(v) for v in keras_model.weights],
          num_examples,
          loss_sum,
          [[tf.identity(v) for v in metric.variables] for metric in metrics],
          optimizer_state,
          num_steps,
          [tf.identity(v) for v in collecting],
          [tf.identity(v) for v in correction.collecting],
      )

    with batch_norm_calls.replaced(keras_model, batch_norm_call):
      self._train = StatelessFunction(
          train,
          [*keras_model.weights, *correction.variables],
          tf.data.DatasetSpec(model.input_spec),
          tf.nest.map_structure(
              tf.TensorSpec.from_tensor, self.initial_optimizer_state()
          ),
          tf.TensorSpec([], tf.int64),
      )

  def train(
      self,
      values: list[tf.Tensor],
      dataset: tf.data.Dataset,
      optimizer_state: Any,
      round_num: tf.Tensor,
      correction_values: Sequence[tf.Tensor] = (),
      num_steps: Any = 0,
  ) -> LocalResult:
    """Trains; to be called inside a `tff.tensorflow.computation`.

    Args:
      values: The values of all variables, in the order of `model.variables`.
      dataset: The client's dataset of batches. Empty batches are skipped.
      optimizer_state: See `initial_optimizer_state`.
      round_num: int32 scalar, the number of finished rounds.
      correction_values: The values of the correction's `variables`.
      num_steps: How many steps the optimizer has made before.

    Returns:
      The result.
    """
    seed = None
    if self._train.is_random:
      salt = dataset.take(1).reduce(
          tf.zeros([], tf.int64), lambda _, batch: fingerprint(batch)
      )
      seed = self._seed(salt, round_num)
    return LocalResult(
        *self._train(
            [*values, *correction_values],
            dataset,
            optimizer_state,
            tf.cast(num_steps, tf.int64),
            seed=seed,
        )
    )
