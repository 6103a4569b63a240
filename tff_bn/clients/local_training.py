"""Local training: a client's optimizer steps in a round."""

import collections
from collections.abc import Collection, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients import client_work
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_step import LocalStep
from tff_bn.clients.local_step import dense_gradients
from tff_bn.clients.local_step import output_and_loss
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import client_batches
from tff_bn.common import numerics
from tff_bn.common.stand_ins import StandIns
from tff_bn.keras_model import batch as batch_lib
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model.batch_norm_calls import TrainingCall
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.dataset_function import DatasetFunction
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers.batch_moments import Moments


class _Step(NamedTuple):
  """The result of one step, apart from the assigned variables."""

  optimizer_state: Any
  num_steps: tf.Tensor
  batch_size: tf.Tensor
  weight_sum: tf.Tensor
  loss_sum: tf.Tensor
  # Whether the step was not made, but can be with a smaller scale of the loss.
  needs_smaller_scale: tf.Tensor


class _Sums(NamedTuple):
  """What local training computes so far, apart from the assigned variables.

  `num_examples`, `weight_sum` and `loss_sum` are those of `LocalResult`, and
  `batch_num` is the number of batches that were not empty.
  """

  optimizer_state: Any
  num_steps: tf.Tensor
  num_examples: tf.Tensor
  weight_sum: tf.Tensor
  loss_sum: tf.Tensor
  loss_scale: Any
  batch_num: tf.Tensor


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
      untrained: Collection[int] = (),
  ):
    """Traces the training loop.

    Args:
      model: The model.
      config: The settings of local training.
      batch_norm_call: Computes a batch normalization layer in training.
        Default: a faster equivalent of Keras's.
      collecting: Variables outside the model that `batch_norm_call` assigns.
        They start each round with their present values.
      skipped_steps: The number of batches at the front to leave out, because
        their steps are made elsewhere.
      correction: The correction of the clients' drift. Default: none.
      untrained: The positions in `model.variables` of trainable variables that
        the steps do not change, as if they had no gradient.
    """
    super().__init__(model, config, correction)
    positions = model.to_model_weights(range(len(model.variables)))
    self._is_trained = [p not in untrained for p in positions.trainable]
    self._model = model
    self._keras_model = model.keras_model
    self._constraints = model.constraints
    self._collecting = collecting
    self._skipped_steps = skipped_steps
    self._unit_shuffle = None
    if config.shuffle_times:
      # Ordinary training needs none of the code that finds units.
      from tff_bn.clients import unit_shuffle

      self._unit_shuffle = unit_shuffle.UnitShuffle(
          model, config.shuffle_times, config.shuffle_probability
      )
    self._scales_loss = mixed_precision.computes_in_float16(model.keras_model)
    self._make_step = (
        # XLA compiles the step only, because it cannot read datasets.
        tf.function(self._step, autograph=False, jit_compile=True)
        if config.jit_compile
        else self._step
    )
    self._train_batch = (
        self._scaled_step if self._scales_loss else self._make_step
    )
    self._train = DatasetFunction(
        self._loop,
        [
            *model.keras_model.weights,
            *([] if correction is None else correction.variables),
        ],
        model.input_spec,
        [
            tf.nest.map_structure(
                tf.TensorSpec.from_tensor, self.initial_optimizer_state()
            ),
            tf.TensorSpec([], tf.int64),
            *([tf.TensorSpec([2], tf.int64)] if self._unit_shuffle else []),
        ],
        model.keras_model,
        batch_norm_call,
    )

  @property
  def is_compilable(self) -> bool:
    """Whether XLA can compile the whole loop.

    It has no operation for the seeds of random layers, and a loss that is
    scaled is computed again where it overflows.
    """
    return not (
        self._train.is_random or self._unit_shuffle or self._scales_loss
    )

  def _step(self, element, optimizer_state, loss_scale, num_steps):
    """Makes one step, unless float16 overflows."""
    batch = self._model.training_batch(element)
    keras_model, scales_loss = self._keras_model, self._scales_loss
    trainable = keras_model.trainable_weights
    dtype = trainable[0].dtype
    others = [*keras_model.non_trainable_weights, *self._collecting]
    state_before = [tf.identity(v) for v in others] if scales_loss else []
    correction = self.correction
    with tf.GradientTape() as tape:
      with correction.watching() if correction else contextlib.nullcontext():
        output, loss = output_and_loss(self._model, batch)
      target = loss
      penalty = correction.penalty(batch.x) if correction else None
      if penalty is not None:
        target += tf.cast(penalty, target.dtype)
      if scales_loss:
        target = loss_scale.scale_loss(target)
    gradients = dense_gradients(tape, target, trainable)
    gradients = tuple(
        g if is_trained else tf.zeros_like(g)
        for g, is_trained in zip(gradients, self._is_trained, strict=True)
    )
    if scales_loss:
      gradients = loss_scale.unscale(gradients)

    def update():
      new_state, weights = self.apply_gradients(
          optimizer_state,
          tuple(tf.convert_to_tensor(v) for v in trainable),
          gradients,
          num_steps,
      )
      for variable, weight, is_trained in zip(
          trainable, weights, self._is_trained, strict=True
      ):
        if is_trained:
          variable.assign(weight)
      self._constraints.assign(self._is_trained)
      for metric in self.metrics:
        metric.update_state(batch.y, output, batch.sample_weight)
      batch_size = batch_lib.num_examples(element)
      return _Step(
          optimizer_state=new_state,
          num_steps=num_steps + 1,
          batch_size=batch_size,
          weight_sum=self.weight_sum(batch),
          loss_sum=tf.cast(loss, dtype) * tf.cast(batch_size, dtype),
          needs_smaller_scale=tf.constant(False),
      )

    def skip():
      # Where float16 overflows, running statistics and the loss can be
      # infinite, too, so the batch is ignored completely.
      for variable, value in zip(others, state_before):
        variable.assign(value)
      step = self._no_step(optimizer_state, num_steps)
      return step._replace(
          needs_smaller_scale=tf.math.is_finite(loss) & loss_scale.can_shrink
      )

    if not scales_loss:
      return update(), loss_scale
    finite = numerics.all_finite([loss, *gradients])
    return tf.cond(finite, update, skip), loss_scale.after_step(finite)

  def _no_step(self, optimizer_state, num_steps):
    """Returns the result of a batch that changes nothing."""
    return _Step(
        optimizer_state=optimizer_state,
        num_steps=num_steps,
        batch_size=tf.zeros([], tf.int64),
        weight_sum=tf.zeros([]),
        loss_sum=tf.zeros([], self._keras_model.trainable_weights[0].dtype),
        needs_smaller_scale=tf.constant(False),
    )

  def _scaled_step(self, element, optimizer_state, loss_scale, num_steps):
    """Makes one step, with a scale of the loss at which gradients are finite.

    Each round starts with the largest scale, and may have a single batch. So,
    other than in Keras, a batch whose scaled gradients overflow is computed
    again.
    """

    def attempt(step, scale):
      del step  # It changed nothing.
      return self._make_step(element, optimizer_state, scale, num_steps)

    first = self._no_step(optimizer_state, num_steps)
    step, scale = tf.while_loop(
        lambda step, scale: step.needs_smaller_scale,
        attempt,
        (first._replace(needs_smaller_scale=tf.constant(True)), loss_scale),
    )
    # Without a scale that helps, the batch says nothing about the next ones.
    is_made = step.num_steps > num_steps
    return step, tf.nest.map_structure(
        lambda found, other: tf.where(is_made, found, other),
        scale,
        loss_scale.after_step(tf.constant(False)),
    )

  def _loop(self, dataset, optimizer_state, num_steps, shuffle_seed=None):
    """Makes the steps of a round."""
    keras_model = self._keras_model
    dataset = self.config.batches(dataset)
    if self._skipped_steps:
      dataset = dataset.skip(self._skipped_steps)
    if self._unit_shuffle is not None:
      num_batches = _num_batches(dataset)

    def train_batch(sums, element):
      step, loss_scale = self._train_batch(
          element, sums.optimizer_state, sums.loss_scale, sums.num_steps
      )
      optimizer_state = step.optimizer_state
      if self._unit_shuffle is not None:
        optimizer_state = self._unit_shuffle.after_step(
            optimizer_state, shuffle_seed, sums.batch_num, num_batches
        )
      return _Sums(
          optimizer_state=optimizer_state,
          num_steps=step.num_steps,
          num_examples=sums.num_examples + step.batch_size,
          weight_sum=sums.weight_sum + step.weight_sum,
          loss_sum=sums.loss_sum + step.loss_sum,
          loss_scale=loss_scale,
          batch_num=sums.batch_num + 1,
      )

    sums = client_batches.fold(
        dataset,
        _Sums(
            optimizer_state=optimizer_state,
            num_steps=num_steps,
            num_examples=tf.zeros([], tf.int64),
            weight_sum=tf.zeros([]),
            loss_sum=tf.zeros([], keras_model.trainable_weights[0].dtype),
            loss_scale=(
                mixed_precision.LossScale.initial() if self._scales_loss else ()
            ),
            batch_num=tf.zeros([], tf.int64),
        ),
        # The kernels of convolutions cannot compute an empty batch.
        lambda sums, element: tf.cond(
            batch_lib.num_examples(element) > 0,
            lambda: train_batch(sums, element),
            lambda: sums,
        ),
    )
    return LocalResult(
        values=[tf.identity(v) for v in keras_model.weights],
        num_examples=sums.num_examples,
        weight_sum=sums.weight_sum,
        loss_sum=sums.loss_sum,
        metric_sums=[
            [tf.identity(v) for v in metric.variables]
            for metric in self.metrics
        ],
        optimizer_state=sums.optimizer_state,
        num_steps=sums.num_steps,
        collected=[tf.identity(v) for v in self._collecting],
        corrected=(
            [tf.identity(v) for v in self.correction.collecting]
            if self.correction
            else ()
        ),
    )

  def train(
      self,
      values: list[tf.Tensor],
      dataset: client_batches.Data,
      optimizer_state: Any,
      round_num: tf.Tensor,
      correction_values: Sequence[tf.Tensor] = (),
      num_steps: Any = 0,
  ) -> LocalResult:
    """Trains a client, inside a `tff.tensorflow.computation`.

    Args:
      values: The values of all variables, in the order of `model.variables`.
      dataset: The client's dataset of batches. Empty batches are skipped.
      optimizer_state: The optimizer's state.
      round_num: int32 scalar, the number of finished rounds.
      correction_values: The values of the correction's `variables`.
      num_steps: The number of steps that the optimizer has made before.
    """
    seed = None
    if self._train.is_random or self._unit_shuffle is not None:
      seed = self.seed_of(dataset, round_num)
    return self._train(
        [*values, *correction_values],
        dataset,
        optimizer_state,
        tf.cast(num_steps, tf.int64),
        *([seed] if self._unit_shuffle else []),
        seed=seed,
    )


def _num_batches(dataset: client_batches.Data) -> tf.Tensor:
  """Counts the batches that are not empty, an int64 scalar."""
  return dataset.reduce(
      tf.zeros([], tf.int64),
      lambda count, element: count
      + tf.cast(batch_lib.num_examples(element) > 0, tf.int64),
  )


class LocalTrainingWork(client_work.ClientWork):
  """Ordinary local training."""

  _training: LocalTraining

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
      *,
      batch_norm_call: TrainingCall = fused_batch_norm.training,
      collecting: Sequence[tf.Variable] = (),
      untrained: Collection[int] = (),
  ):
    """Traces local training; see `LocalTraining` for the arguments."""
    training = LocalTraining(
        model,
        config,
        batch_norm_call=batch_norm_call,
        collecting=collecting,
        correction=correction,
        untrained={*untrained, *weights.constants},
    )
    super().__init__(model, training, weights)

  def initial_optimizer_state(self) -> Any:
    """Returns a new state of the optimizer, a structure of tensors."""
    return self._training.initial_optimizer_state()

  def run(
      self,
      state: Mapping[str, Any],
      shared: ModelWeights,
      client_state: Mapping[str, Any],
      dataset: client_batches.Data,
      optimizer_state: Optional[Any] = None,
      num_steps: Any = 0,
  ) -> collections.OrderedDict[str, Any]:
    """Trains one client and returns its `report`.

    For use in a `tff.tensorflow.computation`; see `start` for the arguments and
    `LocalTraining.train` for `num_steps`.
    """
    start = self.start(state, shared, client_state, optimizer_state)
    collected = self.collect(start.values, dataset, state['round_num'])
    result = self._train(start, dataset, num_steps)
    if collected is not None:
      result = result._replace(collected=collected)
    return self._report(start, dataset, result)

  def _train(
      self,
      start: client_work.RoundStart,
      dataset: client_batches.Data,
      num_steps: Any,
  ) -> LocalResult:
    """Trains the model; see `LocalTraining.train` for the arguments."""
    return self._training.train(
        start.values,
        dataset,
        start.optimizer_state,
        start.work_state['round_num'],
        start.correction,
        num_steps,
    )

  def _report(
      self,
      start: client_work.RoundStart,
      dataset: client_batches.Data,
      result: LocalResult,
  ) -> collections.OrderedDict[str, Any]:
    """Returns the `report` of a result; subclasses may train on the dataset."""
    del dataset
    return self.report(start, result)

  def collect(
      self,
      values: Sequence[tf.Tensor],
      dataset: client_batches.Data,
      round_num: tf.Tensor,
  ) -> Optional[Any]:
    """Computes what the client reports besides its training, before it trains.

    See `LocalTraining.train` for the arguments. The returned value replaces
    `LocalResult.collected`. With `None`, the result keeps what the training
    collected.
    """
    del values, dataset, round_num
    return None

  def build_client_update(
      self, client_type: Optional[tff.StructType]
  ) -> client_work.ClientUpdate:
    """See the base class."""
    types = [self.sent_type, self._weights.weights_type()]
    if client_type is not None:
      types.append(client_type)

    def client_update(arguments, dataset):
      state, shared, *client_states = arguments
      (client_state,) = client_states or [{}]
      return client_work.for_round(
          self.run(state, shared, client_state, dataset)
      )

    form = self._build_form(client_update, types)
    stand_ins = StandIns()
    computation = stand_ins.of(form.computation)
    return client_work.ClientUpdate(
        lambda _, *arguments: client_work.ClientsRound(
            tff.federated_map(computation, arguments)
        ),
        computation.type_signature.result,
        [form],
        stand_ins,
    )


class FixedStatisticsWork(LocalTrainingWork):
  """Local training that normalizes with fixed running statistics."""

  _moves = client_work.Moves.NEVER

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
  ):
    """See the base class."""
    super().__init__(
        model,
        config,
        weights,
        correction,
        batch_norm_call=fused_batch_norm.inference,
    )

  def statistics(
      self,
      after: Sequence[tf.Tensor],
      weight: tf.Tensor,
      result: LocalResult,
  ) -> list[Moments]:
    """Returns statistics of weight 0, so not even rounding changes them."""
    return super().statistics(after, tf.zeros_like(weight), result)
