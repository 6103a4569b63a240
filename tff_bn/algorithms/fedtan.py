"""FedTAN: federated learning with the batch statistics of all clients.

Wang, Shi, Chang, Why Batch Normalization Damage Federated Learning on Non-IID
Data?, arXiv:2301.02982, section 5 and algorithms 1 to 3.

If the clients' data differ, so do their batches' means and variances, and the
gradients of the loss with respect to them; then the mean of the clients'
gradients is not the gradient of the loss on all data. In FedTAN, clients and
server exchange both, layer by layer, during the first local step of a round. Of
that step the mean gradient is that of centralized training on the union of the
clients' batches, exactly. The further local steps are ordinary ones.

Nothing but statistics, sums of gradients of scale and shift, and at the end the
model leaves a client.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import operator
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import moments as moments_lib
from tff_bn.algorithms import fed_prox
from tff_bn.clients import client_work
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_step import LocalStep
from tff_bn.clients.local_step import dense_gradients
from tff_bn.clients.local_step import output_and_loss
from tff_bn.clients.local_training import LocalTraining
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import numerics
from tff_bn.fedtan import stages
from tff_bn.fedtan import synchronized_batch_norm
from tff_bn.fedtan.synchronized_batch_norm import Answer
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes import phased_process
from tff_bn.processes import requirements
from tff_bn.processes.options import Options

SYNCHRONIZE = ('forward_and_backward', 'forward')
MOMENTS = ('two_pass', 'fused')


def build_fedtan(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    synchronize: str = 'forward_and_backward',
    moments: str = 'two_pass',
    **options: Unpack[Options],
) -> tff.learning.templates.LearningProcess:
  """Builds FedTAN for any functional or Sequential model.

  In a round, each client takes the first batch of its data. At each batch
  normalization layer of the forward pass, clients and server exchange the mean
  and the variance (equations 39 and 40), and clients normalize with those of
  all batches together. At each such layer of the backward pass they exchange
  the sums of the layer's gradients with respect to scale and shift, which
  determine those with respect to the statistics (equation 41). Then each client
  makes a step of its optimizer. The mean of the clients' gradients, weighted as
  the clients are, equals the gradient of the weighted mean loss on the union of
  the batches. Further steps are plain local ones, with the batch statistics of
  the client and the same optimizer. The server averages as in FedAvg.

  Layers that do not depend on each other, as in parallel branches, share an
  exchange. With D layers one after the other, a round has 3D + 1 exchanges with
  `moments='two_pass'` and 2D + 1 with `'fused'`; without one if no trainable
  variable comes before the first layer.

  Running statistics take the global mean and the biased global variance in the
  first step, as Keras's do of a batch.

  A client without data is left out of all exchanges. So is a client whose first
  batch has an input or a label that is not finite. A client whose statistics or
  gradients are not finite, or so large that sums over clients could overflow,
  is left out from that exchange on, and of the mean of the models.

  A dataset is read twice if there are several steps, and should give the same
  batches each time.

  Types: `initialize: ( -> S@SERVER)`, `next: (<S@SERVER, {B*}@CLIENTS> ->
  <state=S@SERVER, metrics=M@SERVER>)`.

  Args:
    model: The model: functional or Sequential, also with nested models, layers
      that are called several times, several inputs and outputs.
    client_optimizer: The optimizer of local training; it starts anew in each
      round.
    synchronize: `'forward_and_backward'`; or `'forward'`: the statistics are
      those of all clients, but each client takes its own gradient with respect
      to them ("FedAvg + Algorithm 2" in the paper).
    moments: `'two_pass'`, as in the paper: first the means are averaged, then
      the variances about their average, with the clients' weights. `'fused'`:
      one exchange for both, of (number of values, mean, variance), which the
      server combines by the law of total variance; exact also if the batches
      are not equally large or masked.
    **options: `server_optimizer`, `local_steps`, `local_epochs`,
      `client_weighting`, `client_weight_decay`,
      `client_learning_rate_schedule`, `model_aggregator`,
      `statistics_aggregator`, `seed`, `jit_compile`:
      see `tff_bn.algorithms.Options`.

  Returns:
    A `tff.learning.templates.LearningProcess`.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed; or the model has
      no batch normalization, is a subclass of `keras.Model` with its own
      `call`, has such a layer inside of a loop, a condition or a wrapper, has
      position encodings that are a client's own, or computes in float16. The
      message names the layer.
  """
  _check_choice('synchronize', synchronize, SYNCHRONIZE)
  _check_choice('moments', moments, MOMENTS)
  requirements.check_all_shared(
      'FedTAN',
      model,
      'in the first step of a round, the batch statistics and their gradients'
      ' are those of one model on the data of all clients',
  )
  synchronized_batch_norm.check_model(model.keras_model)
  correction = options.get('drift_correction')
  if not isinstance(correction, (fed_prox.FedProx, type(None))):
    raise ValueError(
        f"drift_correction={type(correction).__name__} can't be combined with"
        ' FedTAN, whose first step has the gradient of the mean loss of all'
        ' clients: other losses, gradients or weights of single clients would'
        ' undo that. Only FedProx can, whose term is 0 in the first step.'
    )
  return averaging.build_shared(
      model,
      client_optimizer,
      build_work=functools.partial(
          _FedTanWork,
          fused_moments=moments == 'fused',
          synchronize_backward=synchronize == 'forward_and_backward',
      ),
      **options,
  )


def build_fedtan_ii(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    sync_rounds: int,
    synchronize: str = 'forward_and_backward',
    moments: str = 'two_pass',
    **options: Unpack[Options],
) -> tff.learning.templates.LearningProcess:
  """Builds FedTAN-II: FedTAN, then FedAvg with fixed running statistics.

  Section 5.4 of the paper: after `sync_rounds` rounds of FedTAN, the running
  statistics stay as they are, and batch normalization layers use them instead
  of those of the batch, so a round has one exchange only.

  Args:
    model: See `build_fedtan`.
    client_optimizer: See `build_fedtan`.
    sync_rounds: The number of rounds of FedTAN, at least 1.
    synchronize: See `build_fedtan`.
    moments: See `build_fedtan`.
    **options: See `build_fedtan`.

  Returns:
    A `tff.learning.templates.LearningProcess`, whose `next` runs the one or the
    other computation, see `tff_bn.processes.phased_process`.

  Raises:
    TypeError: See `build_fedtan`.
    ValueError: See `build_fedtan`; or `sync_rounds` is less than 1.
  """
  requirements.check_positive_integer('sync_rounds', sync_rounds)
  fedtan = build_fedtan(
      model,
      client_optimizer,
      synchronize=synchronize,
      moments=moments,
      **options,
  )
  fixed = averaging.build_shared(
      model,
      client_optimizer,
      build_work=client_work.FixedStatisticsWork,
      **options,
  )
  return phased_process.build_phased_process(
      [(sync_rounds, fedtan), (None, fixed)]
  )


def _check_choice(name: str, value: Any, allowed: Sequence[str]):
  if value not in allowed:
    raise ValueError(
        f'{name}={value!r} must be one of {", ".join(map(repr, allowed))}.'
    )


class _FedTanWork(client_work.ClientWork):
  """A client's work: the synchronized step, then ordinary local training."""

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      client_weighting: str,
      correction: BoundCorrection,
      *,
      fused_moments: bool,
      synchronize_backward: bool,
  ):
    training = (
        LocalStep(model, config, correction)
        if config.local_steps == 1
        else LocalTraining(
            model, config, skipped_steps=1, correction=correction
        )
    )
    super().__init__(model, training, weights, client_weighting)
    self._model = model
    self._first_step = self._trace_first_step(
        fused_moments, synchronize_backward
    )

  def _trace_first_step(
      self, fused_moments: bool, synchronize_backward: bool
  ) -> stages.StagedFunction:
    keras_model = self._model.keras_model
    loss_fn = self._model.loss_fn()
    metrics = self._training.metrics

    def first_step(ask, x, y, num_examples):
      synchronized = synchronized_batch_norm.SynchronizedBatchNorm(
          keras_model,
          ask,
          self.client_weight(num_examples),
          fused_moments=fused_moments,
          synchronize_backward=synchronize_backward,
      )
      with (
          batch_norm_calls.replaced(keras_model, synchronized),
          tf.GradientTape() as tape,
      ):
        output, loss = output_and_loss(keras_model, loss_fn, x, y)
      gradients = dense_gradients(tape, loss, keras_model.trainable_weights)
      for metric in metrics:
        metric.update_state(y, output)
      return collections.OrderedDict(
          gradients=gradients,
          others=[tf.identity(v) for v in keras_model.non_trainable_weights],
          loss=loss,
          metric_sums=[
              [tf.identity(v) for v in metric.variables] for metric in metrics
          ],
          num_examples=num_examples,
          exchanged=tf.sqrt(synchronized.squared_norm),
      )

    return stages.StagedFunction(
        first_step,
        keras_model.weights,
        *self._model.input_spec,
        tf.TensorSpec([], tf.int64),
        jit_compile=self._training.config.jit_compile,
    )

  def build_client_update(self) -> client_work.ClientUpdate:
    """Builds what the clients do in a round, with all exchanges."""
    first_step = self._first_step
    weights_type = self._weights.weights_type()

    @tff.tensorflow.computation(self.state_type, weights_type, self.data_type)
    def start(state, weights, dataset):
      batch, num_examples = _first_batch(dataset, self._model.input_spec)
      takes_part = tf.logical_and(num_examples > 0, numerics.all_finite(batch))
      seed = None
      if first_step.is_random:
        # Not the seed of the further steps.
        seed = tf.bitwise.invert(self._training.seed(batch, state['round_num']))
      return _message(
          first_step.questions[0],
          *first_step.start(
              self._weights.merge(weights, {}), *batch, num_examples, seed=seed
          ),
          takes_part,
      )

    computations = [start]
    exchanges = []
    last = first_step.num_stages - 1
    targets = [first_step.targets_of(number) for number in range(last)]
    for number in range(1, last + 1):
      sources = first_step.sources_of(number)
      exchanges.append(
          _Exchange(computations[-1].type_signature.result['sent'])
      )
      carried_types = [
          _unpack(targets[source], computations[source].type_signature.result)[
              number
          ]
          for source in sources
      ]
      answers_type = exchanges[-1].answers_type
      build = self._build_stage if number < last else self._build_last_stage
      computations.append(build(number, sources, answers_type, carried_types))

    def update_clients(state, weights, data):
      result = tff.federated_map(start, (state, weights, data))
      carried = []
      for number in range(1, last + 1):
        carried.append(_unpack(targets[number - 1], result, _select))
        arguments = [
            exchanges[number - 1](result['sent']),
            result['takes_part'],
            *(carried[s][number] for s in first_step.sources_of(number)),
        ]
        if number == last:
          arguments += [state, weights, data]
        result = tff.federated_map(
            computations[number], tff.federated_zip(arguments)
        )
      return result

    return update_clients

  def _build_stage(
      self,
      number: int,
      sources: Sequence[int],
      answers_type: tff.Type,
      carried_types: Sequence[tff.Type],
  ) -> tff.Computation:
    first_step = self._first_step

    @tff.tensorflow.computation([answers_type, np.bool_, *carried_types])
    def stage(arguments):
      answers, takes_part, *carried = arguments
      return _message(
          first_step.questions[number],
          *first_step.proceed(
              number,
              _answers(first_step.questions[number - 1], answers),
              dict(zip(sources, carried)),
          ),
          takes_part,
      )

    return stage

  def _build_last_stage(
      self,
      number: int,
      sources: Sequence[int],
      answers_type: tff.Type,
      carried_types: Sequence[tff.Type],
  ) -> tff.Computation:
    first_step = self._first_step

    @tff.tensorflow.computation(
        [
            answers_type,
            np.bool_,
            *carried_types,
            self.state_type,
            self._weights.weights_type(),
            self.data_type,
        ]
    )
    def finish(arguments):
      answers, takes_part, *carried, state, weights, dataset = arguments
      result, _ = first_step.proceed(
          number,
          _answers(first_step.questions[number - 1], answers),
          dict(zip(sources, carried)),
      )
      return self._result_and_report(
          self._finish(result, takes_part, state, weights, dataset)
      )

    return finish

  def _finish(
      self,
      first: Mapping[str, Any],
      takes_part: tf.Tensor,
      state: Any,
      weights: ModelWeights,
      dataset: tf.data.Dataset,
  ) -> Mapping[str, Any]:
    """Makes the first step with the gradient, and the other steps."""
    before = self._weights.merge(weights, {})
    model, training = self._model, self._training
    start = self._start_optimizer(state)
    old = model.to_model_weights(before)
    started = self.correction.start(before, state['correction'], {})
    optimizer_state, trainable = training.apply_gradients(
        start,
        tuple(old.trainable),
        first['gradients'],
        tf.zeros([], tf.int64),
    )
    found = first['num_examples'] > 0
    values = numerics.where(
        found,
        model.from_model_weights((trainable, first['others'])),
        before,
    )
    loss_sum = first['loss'] * tf.cast(
        first['num_examples'], first['loss'].dtype
    )
    loss_sum = tf.cast(loss_sum, trainable[0].dtype)
    result = LocalResult(
        values,
        first['num_examples'],
        numerics.where_or_zero(found, loss_sum),
        numerics.where_or_zero(found, first['metric_sums']),
        optimizer_state,
        tf.ones([], tf.int64),
    )
    if training.config.local_steps != 1:
      rest = training.train(
          values,
          dataset,
          optimizer_state,
          state['round_num'],
          started,
          result.num_steps,
      )
      result = LocalResult(
          rest.values,
          *tf.nest.map_structure(
              tf.add,
              (result.num_examples, result.loss_sum, result.metric_sums),
              (rest.num_examples, rest.loss_sum, rest.metric_sums),
          ),
          rest.optimizer_state,
          rest.num_steps,
      )
    # A client without data has no first step, so nothing can be wrong with it.
    sound = tf.logical_or(takes_part, tf.logical_not(found))
    return self.report(
        state, {}, before, started, start, result, sound, first['exchanged']
    )


def _first_batch(dataset: tf.data.Dataset, spec: Any) -> tuple[Any, tf.Tensor]:
  """The first batch and its number of examples.

  Args:
    dataset: A client's dataset.
    spec: The type of its batches.

  Returns:
    The batch and its size, an int64 scalar. If there is no batch, or the first
    one is empty, the batch is one example of zeros, because the kernels of
    convolutions cannot compute an empty batch, and the size is 0.
  """
  example = tf.nest.map_structure(
      lambda s: tf.zeros([dimension or 1 for dimension in s.shape], s.dtype),
      spec,
  )
  # As a default, because only an iterator could ask whether there is a batch.
  batches = tf.data.Dataset.zip(
      (dataset.take(1), tf.data.Dataset.from_tensors(True))
  ).concatenate(tf.data.Dataset.from_tensors((example, False)))
  batch, found = batches.take(1).get_single_element()
  size = tf.shape(tf.nest.flatten(batch[1])[0], tf.int64)[0]
  size = tf.where(found, size, tf.zeros_like(size))
  batch = tf.cond(size > 0, lambda: batch, lambda: example)
  for tensor, tensor_spec in zip(
      tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True
  ):
    tensor.set_shape(tensor_spec.shape)
  return batch, size


# A client may keep something for each of many later stages. If it was one list,
# all of it would occur in the type of each selection from it; so it is a tree.
_BRANCHES = 8


def _branches(targets: Sequence[int]) -> list[Sequence[int]]:
  size = -(-len(targets) // _BRANCHES)
  return [targets[i : i + size] for i in range(0, len(targets), size)]


def _pack(
    targets: Sequence[int], carried: Mapping[int, Any]
) -> collections.OrderedDict[str, Any]:
  """Makes a tree of what is carried over to each stage."""
  return collections.OrderedDict(
      (
          f'until_{branch[-1]}',
          carried[branch[0]] if len(branch) == 1 else _pack(branch, carried),
      )
      for branch in _branches(targets)
  )


def _unpack(
    targets: Sequence[int],
    tree: Any,
    select: Callable[[Any, str], Any] = operator.getitem,
) -> dict[int, Any]:
  """The inverse of `_pack`.

  Args:
    targets: The stages.
    tree: The tree, or its type.
    select: Selects a branch of the tree.

  Returns:
    What is carried over to each stage, or its type.
  """
  carried = {}
  for branch in _branches(targets):
    key = f'until_{branch[-1]}'
    if len(branch) == 1:
      carried[branch[0]] = tree[key]
    else:
      carried.update(_unpack(branch, select(tree, key), select))
  return carried


def _select(tree: tff.Value, key: str) -> tff.Value:
  """Selects as `tree[key]`, but only once, however often it is used."""

  @tff.federated_computation(tree.type_signature.member)
  def select(member):
    return member[key]

  return tff.federated_map(select, tree)


def _message(
    questions: Sequence[stages.Question],
    asked: Sequence[stages.Asked],
    carried: Mapping[int, Sequence[tf.Tensor]],
    took_part: tf.Tensor,
) -> collections.OrderedDict[str, Any]:
  """What a client's stage returns.

  Args:
    questions: The questions at the end of the stage.
    asked: What the client asks.
    carried: What stays with it for each later stage.
    took_part: Whether it took part in the exchange before, or may take part in
      the first one; a bool scalar.

  Returns:
    What it sends, zeros if it does not take part; whether it takes part; and
    what stays with it.
  """
  takes_part = tf.reduce_all([took_part, *(one.sound for one in asked)])
  values = numerics.where_or_zero(takes_part, [one.value for one in asked])
  return collections.OrderedDict(
      sent=_by_kind(questions, values),
      takes_part=takes_part,
      **_pack(sorted(carried), carried),
  )


def _by_kind(
    questions: Sequence[stages.Question], values: Sequence[Any]
) -> collections.OrderedDict[str, list[Any]]:
  sent = collections.OrderedDict()
  for question, value in zip(questions, values, strict=True):
    sent.setdefault(question.kind.name, []).append(value)
  return sent


def _answers(
    questions: Sequence[stages.Question], answers: Mapping[str, Sequence[Any]]
) -> list[Any]:
  """The answers in the order of the questions."""
  iterators = {kind: iter(answers[kind]) for kind in answers}
  return [next(iterators[question.kind.name]) for question in questions]


class _Exchange:
  """From what the clients send to what all of them get."""

  def __init__(self, sent_type: tff.Type):
    self._pool = None
    self.answers_type = sent_type
    for kind, part_type in tff.structure.iter_elements(sent_type):
      if kind == Answer.POOLED_MOMENTS.name:
        self._pool = moments_lib.PooledMomentsFactory().create(part_type)

  def __call__(self, sent: tff.Value) -> tff.Value:
    """In a `tff.federated_computation`: from CLIENTS to CLIENTS."""
    answers = collections.OrderedDict()
    for kind, _ in tff.structure.iter_elements(self.answers_type):
      if kind == Answer.POOLED_MOMENTS.name:
        pooled = self._pool.next(self._pool.initialize(), sent[kind])
        answers[kind] = pooled.result
      else:
        answers[kind] = tff.federated_sum(sent[kind])
    return tff.federated_broadcast(tff.federated_zip(answers))
