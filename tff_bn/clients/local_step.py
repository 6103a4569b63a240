"""One step of a client's optimizer, with its metrics and random seeds."""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import keras
import numpy as np
import tensorflow as tf

from tff_bn.catalog import local_training
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import client_batches
from tff_bn.common import numerics
from tff_bn.common import optimizers
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model import model_metrics
from tff_bn.keras_model.batch import Batch
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.stateless_function import StatelessFunction
from tff_bn.keras_model.stateless_function import fingerprint


def warmup_factor(step: tf.Tensor, warmup_steps: int, dtype: Any) -> tf.Tensor:
  """Computes the factor of the learning rate in an optimizer's first steps.

  Returns min(1, (step + 1) / warmup_steps), a scalar, after `step` steps.
  """
  # Integer arithmetic, because float32 cannot represent large step numbers.
  made = tf.minimum(step + 1, warmup_steps)
  return tf.cast(made, dtype) / tf.constant(warmup_steps, dtype)


class LocalResult(NamedTuple):
  """The result of local training, all tensors.

  Attributes:
    values: The new values, in the order of `model.variables`.
    num_examples: int64 scalar, the number of examples trained on. An example
      counts once for each epoch.
    weight_sum: float32 scalar, the sum of the examples' weights, if it is the
      client's weight; otherwise 0.
    loss_sum: float scalar, the sum over the examples of their batch's loss.
    metric_sums: The accumulators of each Keras metric.
    optimizer_state: The optimizer's last state.
    num_steps: int64 scalar, the number of steps since the optimizer's start.
    collected: The last values of `collecting`, see `LocalTraining`.
    corrected: The last values of the correction's `collecting`.
  """

  values: list[tf.Tensor]
  num_examples: tf.Tensor
  weight_sum: tf.Tensor
  loss_sum: tf.Tensor
  metric_sums: list[list[tf.Tensor]]
  optimizer_state: Any
  num_steps: tf.Tensor
  collected: Sequence[tf.Tensor] = ()
  corrected: Sequence[tf.Tensor] = ()


def output_and_loss(
    model: BatchNormModel, batch: Batch
) -> tuple[Any, tf.Tensor]:
  """Computes a model's output in training mode and its loss.

  The output is in float32 if the model computes in 16 bits. The loss, a scalar,
  includes the losses of the model's layers (regularization).
  """
  keras_model = model.keras_model
  output = mixed_precision.to_float32(keras_model(batch.x, training=True))
  loss = model.batch_loss(batch.y, output, batch.sample_weight)
  for regularization in keras_model.losses:
    # As in Keras, layers may add a loss with an axis.
    loss += tf.reduce_sum(tf.cast(regularization, loss.dtype))
  return output, loss


def dense_gradients(
    tape: tf.GradientTape,
    loss: tf.Tensor,
    variables: Sequence[keras.Variable],
) -> tuple[tf.Tensor, ...]:
  """Returns gradients as tensors; 0 for variables that the loss ignores."""
  gradients = tape.gradient(
      loss,
      # TensorFlow cannot make zeros for a Keras variable.
      [v.value for v in variables],
      unconnected_gradients=tf.UnconnectedGradients.ZERO,
  )
  return tuple(tf.convert_to_tensor(g) for g in gradients)


class LocalStep:
  """The optimizer, the metrics and the random seeds of local training."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      correction: Optional[BoundCorrection] = None,
  ):
    self.config = config
    self.correction = correction
    self.sums_weights = config.client_weighting == local_training.SAMPLE_WEIGHTS
    if self.sums_weights and not model.has_sample_weights:
      raise ValueError(
          f'client_weighting={config.client_weighting} needs a weight for each'
          ' example: batches (x, y, sample_weight) in which sample_weight is a'
          ' single tensor, or class_weight.'
      )
    trainable = model.keras_model.trainable_weights
    self._specs = tuple(tf.TensorSpec(v.shape, v.dtype) for v in trainable)
    self._hparams_dtype = optimizers.hyperparameter_dtype(
        config.client_optimizer, self._specs
    )
    optimizers.check_hyperparameters(
        'client_optimizer', config.client_optimizer, self._hparams_dtype
    )
    metrics = model.new_metrics()
    self.metrics = list(metrics.values())
    self._metric_results = {
        name: StatelessFunction(metric.result, metric.variables)
        for name, metric in metrics.items()
    }

  @property
  def is_compilable(self) -> bool:
    """Whether XLA can compile all that a client computes with it."""
    return True

  @property
  def default_hparams(self) -> collections.OrderedDict[str, Any]:
    """The client optimizer's hyperparameters, by name."""
    return collections.OrderedDict(
        (name, np.asarray(value, self._hparams_dtype.as_numpy_dtype))
        for name, value in optimizers.default_hyperparameters(
            self.config.client_optimizer
        ).items()
    )

  def initial_optimizer_state(self) -> Any:
    """Returns a new state of the optimizer, a structure of tensors."""
    return optimizers.initialize_optimizer(
        self.config.client_optimizer, self._specs, self._hparams_dtype
    )

  def set_hparams(self, optimizer_state: Any, hparams: Any) -> Any:
    """Returns the optimizer's state with other hyperparameters."""
    hparams = tf.nest.map_structure(
        lambda h: tf.cast(h, self._hparams_dtype)
        if tf.is_tensor(h)
        else tf.constant(h, self._hparams_dtype),
        hparams,
    )
    return self.config.client_optimizer.set_hparams(optimizer_state, hparams)

  def set_learning_rate(
      self, optimizer_state: Any, hparams: Any, round_num: tf.Tensor
  ) -> Any:
    """Returns the optimizer's state with the learning rate of a round.

    Args:
      optimizer_state: The optimizer's state.
      hparams: The optimizer's hyperparameters at the start of training.
      round_num: int32 scalar, the number of finished rounds.
    """
    config = self.config
    if not (
        config.client_learning_rate_schedule or config.client_warmup_rounds
    ):
      return optimizer_state
    current = config.client_optimizer.get_hparams(optimizer_state)
    current = collections.OrderedDict(current)
    current[optimizers.LEARNING_RATE] = self._round_learning_rate(
        hparams, round_num
    )
    return self.set_hparams(optimizer_state, current)

  def first_learning_rate(
      self, hparams: Any, round_num: tf.Tensor
  ) -> Optional[tf.Tensor]:
    """Returns the learning rate of the first step of a round.

    See `set_learning_rate`. `None` if the optimizer has no learning rate.
    """
    if optimizers.LEARNING_RATE not in hparams:
      return None
    return self._step_learning_rate(
        self._round_learning_rate(hparams, round_num), tf.zeros([], tf.int64)
    )

  def _round_learning_rate(
      self, hparams: Any, round_num: tf.Tensor
  ) -> tf.Tensor:
    """Returns the learning rate of a round's steps after their warm-up."""
    schedule = self.config.client_learning_rate_schedule
    if schedule is None:
      rate = hparams[optimizers.LEARNING_RATE]
    else:
      rate = schedule(round_num)
    rate = tf.cast(rate, self._hparams_dtype)
    if self.config.client_warmup_rounds:
      rate *= warmup_factor(
          round_num, self.config.client_warmup_rounds, self._hparams_dtype
      )
    return rate

  def _step_learning_rate(
      self, rate: tf.Tensor, num_steps: tf.Tensor
  ) -> tf.Tensor:
    """Returns a step's learning rate: in a round's warm-up less than `rate`."""
    if not self.config.client_warmup_steps:
      return rate
    return rate * warmup_factor(
        num_steps, self.config.client_warmup_steps, self._hparams_dtype
    )

  def apply_gradients(
      self,
      optimizer_state: Any,
      weights: tuple[tf.Tensor, ...],
      gradients: tuple[tf.Tensor, ...],
      num_steps: tf.Tensor,
  ) -> tuple[Any, tuple[tf.Tensor, ...]]:
    """Makes one step of the optimizer; returns its new state and new weights.

    `gradients` are not yet clipped and have no weight decay. `num_steps` is the
    number of steps made before, an int64 scalar.
    """
    config = self.config
    optimizer = config.client_optimizer
    if config.client_gradient_clip_norm is not None:
      gradients = numerics.clip_by_global_norm(
          gradients, config.client_gradient_clip_norm
      )
    decay = config.client_weight_decay
    if decay:
      gradients = tuple(
          g + tf.constant(decay, g.dtype) * w
          for g, w in zip(gradients, weights)
      )
    hparams = collections.OrderedDict(optimizer.get_hparams(optimizer_state))
    step_hparams = collections.OrderedDict(hparams)
    if config.client_warmup_steps:
      step_hparams[optimizers.LEARNING_RATE] = self._step_learning_rate(
          hparams[optimizers.LEARNING_RATE], num_steps
      )
      optimizer_state = self.set_hparams(optimizer_state, step_hparams)
    if self.correction is not None:
      gradients = self.correction.correct(
          gradients, step_hparams.get(optimizers.LEARNING_RATE)
      )
    new_state, new_weights = optimizer.next(optimizer_state, weights, gradients)
    if config.client_warmup_steps:
      new_state = self.set_hparams(new_state, hparams)
    return new_state, new_weights

  def seed(self, salt: tf.Tensor, round_num: tf.Tensor) -> tf.Tensor:
    """Computes the seed of a client's random layers in a round.

    Args:
      salt: int64 scalar, the `fingerprint` of the client's first batch; it
        makes the seeds of clients differ.
      round_num: int32 scalar, the number of finished rounds.

    Returns:
      An int64 vector of 2 elements.
    """
    return tf.stack(
        [
            tf.constant(self.config.seed, tf.int64) * 1_000_003
            + tf.cast(round_num, tf.int64),
            salt,
        ]
    )

  def seed_of(
      self, dataset: client_batches.Data, round_num: tf.Tensor
  ) -> tf.Tensor:
    """Computes the `seed` of a client's dataset, which can be empty."""
    salt = dataset.take(1).reduce(
        tf.zeros([], tf.int64), lambda _, batch: fingerprint(batch)
    )
    return self.seed(salt, round_num)

  def weight_sum(self, batch: Batch) -> tf.Tensor:
    """Returns a batch's part of `LocalResult.weight_sum`."""
    if not self.sums_weights:
      return tf.zeros([])
    return tf.reduce_sum(tf.cast(batch.sample_weight, tf.float32))

  def finalize_metrics(
      self,
      loss_sum: tf.Tensor,
      metric_sums: list[list[tf.Tensor]],
      num_examples: tf.Tensor,
  ) -> collections.OrderedDict[str, tf.Tensor]:
    """Turns sums over clients of `LocalResult`'s entries into metrics.

    Returns `loss` (the mean over the examples; NaN without examples), one entry
    for each result of the Keras metrics, and `num_examples`.
    """
    result = collections.OrderedDict(
        loss=loss_sum / tf.cast(num_examples, loss_sum.dtype)
    )
    for (name, fn), sums in zip(
        self._metric_results.items(), metric_sums, strict=True
    ):
      result.update(model_metrics.named_results(name, fn(sums)))
    result['num_examples'] = num_examples
    return result
