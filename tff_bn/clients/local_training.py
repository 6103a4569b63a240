"""Local training: what one client does with a model and its data in a round."""

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Optional

import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.common import numerics
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model.batch_norm_calls import TrainingCall
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.stateless_function import StatelessFunction
from tff_bn.keras_model.stateless_function import fingerprint

_LEARNING_RATE = tff.learning.optimizers.LEARNING_RATE_KEY


@dataclasses.dataclass(frozen=True)
class LocalTrainingConfig:
  """How a client trains.

  Attributes:
    client_optimizer: The optimizer. It starts anew in each round.
    local_steps: How many batches to take from the front of the client's
      dataset, after it was repeated `local_epochs` times. `None`: all.
    local_epochs: How many times to go through the client's dataset.
    client_weight_decay: λ of the coupled L2 decay: λ times the variable is
      added to the gradient of every trainable variable.
    client_learning_rate_schedule: Maps the number of finished rounds (an int32
      scalar tensor) to the learning rate. `None`: the optimizer's own.
    client_warmup_steps: Over how many of its first steps the optimizer's
      learning rate rises linearly: in step n, counted from 1, it is multiplied
      by min(1, n / client_warmup_steps). As the optimizer, it starts anew in
      each round. 0: no warm-up.
    client_gradient_clip_norm: The largest global norm of a batch's gradient; a
      longer one is scaled down to it, before weight decay. `None`: any.
    seed: Determines dropout and other random layers, together with the round
      and the client's first batch.
    jit_compile: Whether XLA compiles the step. Results then differ in the last
      bits. TFF's native runtime has no XLA compiler and ignores it.
  """

  client_optimizer: tff.learning.optimizers.Optimizer
  local_steps: Optional[int] = None
  local_epochs: int = 1
  client_weight_decay: float = 0.0
  client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]] = None
  client_warmup_steps: int = 0
  client_gradient_clip_norm: Optional[float] = None
  seed: int = 0
  jit_compile: bool = False

  def __post_init__(self):
    if not isinstance(self.client_optimizer, tff.learning.optimizers.Optimizer):
      raise TypeError(
          'client_optimizer must be a tff.learning.optimizers.Optimizer, such'
          ' as tff.learning.optimizers.build_sgdm(0.1), but is a'
          f' {type(self.client_optimizer).__name__}.'
      )
    for name, minimum in (
        ('local_steps', 1),
        ('local_epochs', 1),
        ('client_warmup_steps', 0),
    ):
      value = getattr(self, name)
      if name == 'local_steps' and value is None:
        continue
      if not isinstance(value, (int, np.integer)) or value < minimum:
        raise ValueError(
            f'{name}={value} must be a whole number, at least {minimum}.'
        )
    if not self.client_weight_decay >= 0:
      raise ValueError(
          f'client_weight_decay={self.client_weight_decay} must be at least 0.'
      )
    clip_norm = self.client_gradient_clip_norm
    if clip_norm is not None and not clip_norm > 0:
      raise ValueError(
          f'client_gradient_clip_norm={clip_norm} must be greater than 0.'
      )
    for name in ('client_learning_rate_schedule', 'client_warmup_steps'):
      if getattr(self, name) and _LEARNING_RATE not in default_hyperparameters(
          self.client_optimizer
      ):
        raise ValueError(
            f'{name} needs a client_optimizer with the hyperparameter'
            f' {_LEARNING_RATE!r}; this'
            f' {type(self.client_optimizer).__name__} has'
            f' {list(default_hyperparameters(self.client_optimizer))}.'
        )


def warmup_factor(step: tf.Tensor, warmup_steps: int, dtype: Any) -> tf.Tensor:
  """The factor of the learning rate in an optimizer's first steps.

  Args:
    step: An integer scalar, how many steps were made before.
    warmup_steps: Over how many steps it rises to 1.
    dtype: The factor's dtype.

  Returns:
    min(1, (step + 1) / warmup_steps), a scalar.
  """
  # As integers, because float32 has no large ones.
  made = tf.minimum(step + 1, warmup_steps)
  return tf.cast(made, dtype) / tf.constant(warmup_steps, dtype)


def default_hyperparameters(
    optimizer: tff.learning.optimizers.Optimizer,
) -> Any:
  """The hyperparameters that an optimizer starts with, by name."""
  spec = tf.TensorSpec([], tf.float32)
  return optimizer.get_hparams(optimizer.initialize(spec))


def hyperparameter_dtype(
    optimizer: tff.learning.optimizers.Optimizer, specs: Any
) -> tf.DType:
  """Finds the dtype that an optimizer's hyperparameters must have.

  TFF's optimizers keep hyperparameters as Python floats. As part of a state
  these become float32 tensors, which do not go with float64 weights in some
  optimizers (SGD with momentum), while others (Yogi) work with float32 only.

  Args:
    optimizer: The optimizer.
    specs: The `tf.TensorSpec`s of the weights.

  Returns:
    The weights' dtype if possible, else float32.
  """
  dtype = next((spec.dtype for spec in tf.nest.flatten(specs)), tf.float32)
  if dtype == tf.float32:
    return dtype

  def step(weights):
    state = initialize_optimizer(optimizer, specs, dtype)
    return optimizer.next(state, weights, weights)

  try:
    tf.function(step).get_concrete_function(specs)
  except TypeError:
    return tf.float32
  return dtype


def check_hyperparameters(
    name: str, optimizer: tff.learning.optimizers.Optimizer, dtype: tf.DType
) -> None:
  """Checks that an optimizer's hyperparameters are finite.

  Args:
    name: The name of the argument that the optimizer was.
    optimizer: The optimizer.
    dtype: The hyperparameters' dtype, see `hyperparameter_dtype`.

  Raises:
    ValueError: If one is not, as 1e300 in float32.
  """
  for hparam, value in default_hyperparameters(optimizer).items():
    with np.errstate(over='ignore'):
      converted = np.asarray(value).astype(dtype.as_numpy_dtype)
    if not np.all(np.isfinite(converted)):
      raise ValueError(
          f'{name} has {hparam}={value}, which is not finite in {dtype.name}.'
      )


def initialize_optimizer(
    optimizer: tff.learning.optimizers.Optimizer, specs: Any, dtype: tf.DType
) -> Any:
  """Initializes an optimizer, with all hyperparameters as tensors.

  Args:
    optimizer: The optimizer.
    specs: The `tf.TensorSpec`s of the weights.
    dtype: The hyperparameters' dtype, see `hyperparameter_dtype`.

  Returns:
    The optimizer's state, all tensors.
  """
  return tf.nest.map_structure(
      lambda x: x if tf.is_tensor(x) else tf.constant(x, dtype),
      optimizer.initialize(specs),
  )


@dataclasses.dataclass(frozen=True)
class LocalResult:
  """What local training returns, all tensors.

  Attributes:
    values: The new values, in the order of `model.variables`.
    num_examples: int64 scalar, how many examples were trained on. An example
      counts once for each epoch.
    loss_sum: float scalar, sum over the examples of their batch's loss.
    metric_sums: The accumulators of each Keras metric.
    optimizer_state: The optimizer's last state.
    num_steps: int64 scalar, how many steps it has made since its first one.
    collected: The last values of `collecting`, see `LocalTraining`.
    corrected: The last values of the correction's `collecting`.
  """

  values: list[tf.Tensor]
  num_examples: tf.Tensor
  loss_sum: tf.Tensor
  metric_sums: list[list[tf.Tensor]]
  optimizer_state: Any
  num_steps: tf.Tensor
  collected: Sequence[tf.Tensor] = ()
  corrected: Sequence[tf.Tensor] = ()


def output_and_loss(
    keras_model: keras.Model,
    loss_fn: Callable[[Any, Any], tf.Tensor],
    x: Any,
    y: Any,
) -> tuple[Any, tf.Tensor]:
  """Computes a model in training mode and its loss.

  Args:
    keras_model: The model.
    loss_fn: The loss, the mean over the batch.
    x: The model's input.
    y: The labels.

  Returns:
    The output, in float32 if it has 16 bits; and the loss with the losses of
    the model's layers (regularization).

  Raises:
    ValueError: If `loss_fn` does not average.
  """
  output = mixed_precision.to_float32(keras_model(x, training=True))
  loss = loss_fn(y, output)
  for regularization in keras_model.losses:
    loss += tf.cast(regularization, loss.dtype)
  if loss.shape.rank != 0:
    raise ValueError(
        f'loss_fn returns a loss of shape {loss.shape} for a batch; it must'
        ' average over the batch (reduction="auto").'
    )
  return output, loss


def _clipped(
    gradients: tuple[tf.Tensor, ...], clip_norm: float
) -> tuple[tf.Tensor, ...]:
  """Scales gradients down to a global norm."""
  norm = tf.linalg.global_norm(gradients)
  # Unlike with `tf.clip_by_global_norm`, short ones stay the same to the bit.
  factor = tf.minimum(tf.ones([], norm.dtype), clip_norm / norm)
  # One whose norm overflows must not become 0 silently.
  factor = tf.where(tf.math.is_finite(norm), factor, norm - norm)
  return tuple(g * factor for g in gradients)


def dense_gradients(
    tape: tf.GradientTape,
    loss: tf.Tensor,
    variables: Sequence[keras.Variable],
) -> tuple[tf.Tensor, ...]:
  """The gradients as tensors; 0 if the loss does not depend on a variable."""
  gradients = tape.gradient(
      loss,
      # TensorFlow cannot make zeros for a variable of Keras.
      [v.value for v in variables],
      unconnected_gradients=tf.UnconnectedGradients.ZERO,
  )
  return tuple(tf.convert_to_tensor(g) for g in gradients)


class LocalStep:
  """The optimizer, the metrics and the random seeds of local training.

  Attributes:
    config: How to train.
    correction: What is done against the clients' drift.
    metrics: The Keras metrics.
  """

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      correction: Optional[BoundCorrection] = None,
  ):
    """Initializes the step.

    Args:
      model: The model.
      config: How to train.
      correction: What is done against the clients' drift. Default: nothing.
    """
    self.config = config
    self.correction = BoundCorrection() if correction is None else correction
    trainable = model.keras_model.trainable_weights
    self._specs = tuple(tf.TensorSpec(v.shape, v.dtype) for v in trainable)
    self._hparams_dtype = hyperparameter_dtype(
        config.client_optimizer, self._specs
    )
    check_hyperparameters(
        'client_optimizer', config.client_optimizer, self._hparams_dtype
    )
    self.metrics = list(model.metrics_fn())
    for metric in self.metrics:
      # Some metrics make their accumulators at the first update.
      metric.reset_state()
    self._metric_names = [metric.name for metric in self.metrics]
    self._metric_results = [
        StatelessFunction(metric.result, metric.variables)
        for metric in self.metrics
    ]

  @property
  def default_hparams(self) -> collections.OrderedDict[str, Any]:
    """The client optimizer's hyperparameters."""
    return collections.OrderedDict(
        (name, np.asarray(value, self._hparams_dtype.as_numpy_dtype))
        for name, value in default_hyperparameters(
            self.config.client_optimizer
        ).items()
    )

  def initial_optimizer_state(self) -> Any:
    """A new state of the optimizer, a structure of tensors."""
    return initialize_optimizer(
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
      self, optimizer_state: Any, round_num: tf.Tensor
  ) -> Any:
    """Returns the optimizer's state with the schedule's learning rate.

    Args:
      optimizer_state: The optimizer's state.
      round_num: int32 scalar, the number of finished rounds.

    Returns:
      The state, changed only if there is a schedule.
    """
    schedule = self.config.client_learning_rate_schedule
    if schedule is None:
      return optimizer_state
    hparams = self.config.client_optimizer.get_hparams(optimizer_state)
    hparams = collections.OrderedDict(hparams)
    hparams[_LEARNING_RATE] = schedule(round_num)
    return self.set_hparams(optimizer_state, hparams)

  def apply_gradients(
      self,
      optimizer_state: Any,
      weights: tuple[tf.Tensor, ...],
      gradients: tuple[tf.Tensor, ...],
      num_steps: tf.Tensor,
  ) -> tuple[Any, tuple[tf.Tensor, ...]]:
    """Makes one step of the optimizer.

    Args:
      optimizer_state: The optimizer's state.
      weights: The trainable weights.
      gradients: Their gradients, neither clipped nor with weight decay.
      num_steps: int64 scalar, how many steps the optimizer has made before.

    Returns:
      The new state and the new weights.
    """
    config = self.config
    optimizer = config.client_optimizer
    if config.client_gradient_clip_norm is not None:
      gradients = _clipped(gradients, config.client_gradient_clip_norm)
    decay = config.client_weight_decay
    if decay:
      gradients = tuple(
          g + tf.constant(decay, g.dtype) * w
          for g, w in zip(gradients, weights)
      )
    hparams = collections.OrderedDict(optimizer.get_hparams(optimizer_state))
    if config.client_warmup_steps:
      factor = warmup_factor(
          num_steps, config.client_warmup_steps, self._hparams_dtype
      )
      step_hparams = collections.OrderedDict(hparams)
      step_hparams[_LEARNING_RATE] = factor * hparams[_LEARNING_RATE]
    else:
      step_hparams = hparams
    gradients = self.correction.correct(
        gradients, step_hparams.get(_LEARNING_RATE)
    )
    if step_hparams is hparams:
      return optimizer.next(optimizer_state, weights, gradients)
    new_state, new_weights = optimizer.next(
        self.set_hparams(optimizer_state, step_hparams), weights, gradients
    )
    return self.set_hparams(new_state, hparams), new_weights

  def seed(self, batch: Any, round_num: tf.Tensor) -> tf.Tensor:
    """Makes the seed of a client's random layers.

    Args:
      batch: The client's first batch, by which clients differ.
      round_num: int32 scalar, the number of finished rounds.

    Returns:
      An int64 vector of 2 elements.
    """
    return self._seed(fingerprint(batch), round_num)

  def _seed(self, salt: tf.Tensor, round_num: tf.Tensor) -> tf.Tensor:
    return tf.stack(
        [
            tf.constant(self.config.seed, tf.int64) * 1_000_003
            + tf.cast(round_num, tf.int64),
            salt,
        ]
    )

  def finalize_metrics(
      self,
      loss_sum: tf.Tensor,
      metric_sums: list[list[tf.Tensor]],
      num_examples: tf.Tensor,
  ) -> collections.OrderedDict[str, tf.Tensor]:
    """Turns sums over clients into metrics.

    Args:
      loss_sum: Sum of the clients' `loss_sum`.
      metric_sums: Sums of the clients' accumulators.
      num_examples: Sum of the clients' `num_examples`.

    Returns:
      `loss` (mean over the examples; NaN if there are none), one entry for each
      Keras metric, and `num_examples`.
    """
    result = collections.OrderedDict(
        loss=loss_sum / tf.cast(num_examples, loss_sum.dtype)
    )
    for name, fn, sums in zip(
        self._metric_names, self._metric_results, metric_sums
    ):
      result[name] = fn(sums)
    result['num_examples'] = num_examples
    return result


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
