"""A client's work in a round of FedTAN, stage by stage."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import model_update
from tff_bn.aggregators import summed_update
from tff_bn.clients import client_work
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_step import LocalStep
from tff_bn.clients.local_step import dense_gradients
from tff_bn.clients.local_step import output_and_loss
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import array_form
from tff_bn.common import client_batches
from tff_bn.common import numerics
from tff_bn.common.stand_ins import StandIns
from tff_bn.fedtan import exchange
from tff_bn.fedtan import robust_exchange
from tff_bn.fedtan import staged_function
from tff_bn.fedtan.synchronized_batch_norm import Answer
from tff_bn.fedtan.synchronized_batch_norm import SynchronizedBatchNorm
from tff_bn.keras_model import batch as batch_lib
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import stateless_function
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.shared_weights import SharedWeights


class _FirstStep(NamedTuple):
  """The result of the synchronized step, all tensors.

  `others` are the values after it of the variables that are neither trainable
  nor constant, `metric_sums` the accumulators of each Keras metric, and
  `exchanged` is the norm of the exchanged moments, a float32 scalar.
  """

  gradients: tuple[tf.Tensor, ...]
  others: list[tf.Tensor]
  loss: tf.Tensor
  metric_sums: list[list[tf.Tensor]]
  num_examples: tf.Tensor
  weight_sum: tf.Tensor
  exchanged: tf.Tensor


class FedTanWork(client_work.ClientWork):
  """The work of a client: a synchronized step, then ordinary local training."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
      *,
      fused_moments: bool,
      synchronize_backward: bool,
      moves_later: bool,
      sums: Optional[summed_update.RoundSums] = None,
      rule: Optional[model_update.ParticipatingFactory] = None,
  ):
    """Traces the first step and the ordinary ones.

    Args:
      model: The model.
      config: The settings of local training.
      weights: The shared weights.
      correction: The correction of the clients' drift.
      fused_moments: See `SynchronizedBatchNorm`.
      synchronize_backward: See `SynchronizedBatchNorm`.
      moves_later: Whether the ordinary steps move the running statistics.
      sums: The factory of the sums of the values that clients send in each
        exchange. Default: plain sums, and pooled moments.
      rule: A `tff_bn.aggregators.Rule` that combines these values, with
        `fused_moments`. Default: none.
    """
    self._sums = sums
    self._rule = rule
    training = (
        LocalStep(model, config, correction)
        if config.local_steps == 1
        else LocalTraining(
            model, config, skipped_steps=1, correction=correction
        )
    )
    super().__init__(model, training, weights)
    self._kept_later: frozenset[int] = frozenset()
    if not moves_later:
      self._moves = client_work.Moves.ONCE
      self._kept_later = frozenset(
          position for pair in weights.statistics for position in pair
      )
    positions = model.to_model_weights(range(len(model.variables)))
    self._trainable = positions.trainable
    self._others = [
        p for p in positions.non_trainable if p not in model.constants
    ]
    self._first_step = self._trace_first_step(
        fused_moments, synchronize_backward
    )

  @property
  def num_exchanges(self) -> int:  # type: ignore[override]
    """See the base class."""
    return self._first_step.num_stages - 1

  def _trace_first_step(
      self, fused_moments: bool, synchronize_backward: bool
  ) -> staged_function.StagedFunction[Answer]:
    keras_model = self._model.keras_model
    metrics = self._training.metrics

    def first_step(ask, element, num_examples):
      batch = self._model.training_batch(element)
      weight_sum = self._training.weight_sum(batch)
      synchronized = SynchronizedBatchNorm(
          keras_model,
          ask,
          self.client_weight(num_examples, weight_sum),
          fused_moments=fused_moments,
          synchronize_backward=synchronize_backward,
          sums=self._sums,
          equal_weights=self._rule is not None,
      )
      with (
          batch_norm_calls.replaced(keras_model, synchronized),
          tf.GradientTape() as tape,
      ):
        output, loss = output_and_loss(self._model, batch)
      gradients = dense_gradients(tape, loss, keras_model.trainable_weights)
      for metric in metrics:
        metric.update_state(batch.y, output, batch.sample_weight)
      return _FirstStep(
          gradients=gradients,
          others=[tf.identity(keras_model.weights[p]) for p in self._others],
          loss=loss,
          metric_sums=[
              [tf.identity(v) for v in metric.variables] for metric in metrics
          ],
          num_examples=num_examples,
          weight_sum=weight_sum,
          exchanged=tf.sqrt(synchronized.squared_norm),
      )

    return staged_function.StagedFunction(
        first_step,
        keras_model.weights,
        self._model.input_spec,
        tf.TensorSpec([], tf.int64),
        jit_compile=self._training.config.jit_compile,
    )

  def build_client_update(
      self, client_type: Optional[tff.StructType]
  ) -> client_work.ClientUpdate:
    """See the base class; clients can keep no state."""
    if client_type is not None:
      raise TypeError('The clients of FedTAN keep no state.')
    first_step = self._first_step
    weights_type = self._weights.weights_type()

    def start_client(arguments, dataset):
      state, weights = arguments
      batch, num_examples = _first_batch(dataset, self._model.input_spec)
      takes_part = tf.logical_and(num_examples > 0, numerics.all_finite(batch))
      seed = None
      if first_step.is_random:
        # Inverted, because the ordinary steps use the same seed.
        seed = tf.bitwise.invert(
            self._training.seed(
                stateless_function.fingerprint(batch), state['round_num']
            )
        )
      return exchange.message(
          first_step.questions[0],
          *first_step.start(
              self._weights.merged_tensors(weights, {}),
              batch,
              num_examples,
              seed=seed,
          ),
          takes_part,
      )

    start = self._build_form(start_client, [self.sent_type, weights_type])
    stand_ins = StandIns()
    computations = [stand_ins.of(start.computation)]
    last = first_step.num_stages - 1
    targets = [first_step.targets_of(number) for number in range(last)]
    for number in range(1, last + 1):
      answers_type = computations[-1].type_signature.result['sent']
      carried_types = [
          exchange.unpack(
              targets[source], computations[source].type_signature.result
          )[number]
          for source in first_step.sources_of(number)
      ]
      if number < last:
        computation = self._build_stage(number, answers_type, carried_types)
      else:
        end = self._build_last_stage(answers_type, carried_types)
        computation = end.computation
      computations.append(stand_ins.of(computation))

    exchanges = self._build_exchanges(
        [c.type_signature.result['sent'] for c in computations[:-1]]
    )

    def update_clients(exchange_states, state, weights, data):
      result = tff.federated_map(computations[0], (state, weights, data))
      carried = []
      outputs = []
      for number in range(1, last + 1):
        if exchanges:
          weight = []
          if exchanges[number - 1].is_weighted:
            weight = [result['takes_part']]
          outputs.append(
              exchanges[number - 1].next(
                  exchange_states[number - 1], result['sent'], *weight
              )
          )
          answers = outputs[-1].result
        else:
          answers = exchange.combine(result['sent'])
        carried.append(
            exchange.unpack(targets[number - 1], result, exchange.select)
        )
        arguments = [
            tff.federated_broadcast(answers),
            result['takes_part'],
            *(carried[s][number] for s in first_step.sources_of(number)),
        ]
        if number == last:
          arguments += [state, weights, data]
        result = tff.federated_map(
            computations[number], tff.federated_zip(arguments)
        )
      return client_work.ClientsRound(
          result,
          [output.state for output in outputs],
          [output.measurements for output in outputs],
      )

    return client_work.ClientUpdate(
        update_clients,
        computations[-1].type_signature.result,
        [start, end],
        stand_ins,
        exchanges,
    )

  @property
  def _is_compilable(self) -> bool:
    """See the base class."""
    return not self._first_step.is_random and super()._is_compilable

  def _build_exchanges(
      self, sent_types: Sequence[tff.Type]
  ) -> list[tff.templates.AggregationProcess]:
    """Builds the aggregators of the exchanges, if they need a state."""
    if self._rule is not None:
      factory = robust_exchange.RobustExchangeFactory(self._rule)
      weight_type = tff.TensorType(np.bool_)
      return [factory.create(sent, weight_type) for sent in sent_types]
    if self._sums is not None:
      factories = self._sums.exchange_factories(self.num_exchanges)
      return [
          summed_update.ExchangeFactory(factory).create(sent_type)
          for factory, sent_type in zip(factories, sent_types, strict=True)
      ]
    return []

  def _values_before(
      self, shared: ModelWeights, client_state: Mapping[str, Any]
  ) -> list[Any]:
    """See the base class; constants are tensors only for ordinary steps."""
    if isinstance(self._training, LocalTraining):
      return super()._values_before(shared, client_state)
    return self._weights.merge(shared, client_state)

  def _build_stage(
      self,
      number: int,
      answers_type: tff.Type,
      carried_types: Sequence[tff.Type],
  ) -> tff.Computation:
    """Builds a stage between the first and the last."""

    @tff.tensorflow.computation([answers_type, np.bool_, *carried_types])
    def stage(arguments):
      answers, takes_part, *carried = arguments
      output = self._proceed(number, answers, carried)
      return exchange.message(
          self._first_step.questions[number], *output, takes_part
      )

    return stage

  def _build_last_stage(
      self, answers_type: tff.Type, carried_types: Sequence[tff.Type]
  ) -> array_form.ArrayForm:
    """Builds the stage that ends the client's round."""
    last = self._first_step.num_stages - 1

    def stage(arguments, dataset):
      answers, takes_part, *carried, state, weights = arguments
      output = self._proceed(last, answers, carried)
      return client_work.for_round(
          self._finish(output.result, takes_part, state, weights, dataset)
      )

    return self._build_form(
        stage,
        [
            answers_type,
            np.bool_,
            *carried_types,
            self.sent_type,
            self._weights.weights_type(),
        ],
    )

  def _proceed(
      self, number: int, answers: Any, carried: Sequence[Any]
  ) -> staged_function.StageOutput:
    """Computes a stage after the first."""
    first_step = self._first_step
    return first_step.proceed(
        number,
        exchange.in_order(first_step.questions[number - 1], answers),
        dict(zip(first_step.sources_of(number), carried)),
    )

  def _finish(
      self,
      first: _FirstStep,
      takes_part: tf.Tensor,
      state: Any,
      weights: ModelWeights,
      dataset: client_batches.Data,
  ) -> Mapping[str, Any]:
    """Applies the gradient of the first step and makes the ordinary steps."""
    training = self._training
    start = self.start(state, weights, {})
    before = start.values
    optimizer_state, trainable = training.apply_gradients(
        start.optimizer_state,
        tuple(before[p] for p in self._trainable),
        first.gradients,
        tf.zeros([], tf.int64),
    )
    found = first.num_examples > 0
    values = list(before)
    for position, value in zip(
        [*self._trainable, *self._others],
        [*self._model.constraints.apply(trainable), *first.others],
        strict=True,
    ):
      values[position] = value
    values = self._weights.select(found, values, before)
    loss_sum = first.loss * tf.cast(first.num_examples, first.loss.dtype)
    loss_sum = tf.cast(loss_sum, trainable[0].dtype)
    num_examples, weight_sum = first.num_examples, first.weight_sum
    num_steps = tf.ones([], tf.int64)
    loss_sum = numerics.where_or_zero(found, loss_sum)
    weight_sum = numerics.where_or_zero(found, weight_sum)
    metric_sums = numerics.where_or_zero(found, first.metric_sums)
    if isinstance(training, LocalTraining):
      rest = training.train(
          values,
          dataset,
          optimizer_state,
          state['round_num'],
          start.correction,
          num_steps,
      )
      values = [
          kept if position in self._kept_later else trained
          for position, (kept, trained) in enumerate(
              zip(values, rest.values, strict=True)
          )
      ]
      optimizer_state = rest.optimizer_state
      num_steps = rest.num_steps
      num_examples, weight_sum, loss_sum, metric_sums = tf.nest.map_structure(
          tf.add,
          (num_examples, weight_sum, loss_sum, metric_sums),
          (
              rest.num_examples,
              rest.weight_sum,
              rest.loss_sum,
              rest.metric_sums,
          ),
      )
    result = LocalResult(
        values=values,
        num_examples=num_examples,
        weight_sum=weight_sum,
        loss_sum=loss_sum,
        metric_sums=metric_sums,
        optimizer_state=optimizer_state,
        num_steps=num_steps,
    )
    # A client without data has no first step that could fail.
    sound = tf.logical_or(takes_part, tf.logical_not(found))
    return self.report(start, result, sound=sound, exchanged=first.exchanged)


def _first_batch(
    dataset: client_batches.Data, spec: Any
) -> tuple[Any, tf.Tensor]:
  """Returns the first batch of a type, and its number of examples (int64).

  If there is no batch, or the first one is empty, the number is 0 and the batch
  is one example of zeros, because the kernels of convolutions cannot compute an
  empty batch.
  """
  if isinstance(dataset, client_batches.ClientBatches) and dataset.equal_sizes:
    batch = dataset.batch(dataset.start)
    return batch, batch_lib.num_examples(batch)
  example = tf.nest.map_structure(
      lambda s: tf.zeros([dimension or 1 for dimension in s.shape], s.dtype),
      spec,
  )
  if isinstance(dataset, client_batches.ClientBatches):
    found = dataset.size > 0
    batch = tf.cond(
        found, lambda: dataset.batch(dataset.start), lambda: example
    )
  else:
    # The default batch follows: only an iterator could tell if there are none.
    batches = tf.data.Dataset.zip(
        (dataset.take(1), tf.data.Dataset.from_tensors(True))
    ).concatenate(tf.data.Dataset.from_tensors((example, False)))
    batch, found = batches.take(1).get_single_element()
  size = batch_lib.num_examples(batch)
  size = tf.where(found, size, tf.zeros_like(size))
  batch = tf.cond(size > 0, lambda: batch, lambda: example)
  for tensor, tensor_spec in zip(
      tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True
  ):
    tensor.set_shape(tensor_spec.shape)
  return batch, size
