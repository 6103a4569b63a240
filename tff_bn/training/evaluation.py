"""Evaluates models, and re-estimates and merges their BN statistics."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import operator
from typing import Any, Optional

import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import batch_arrays
from tff_bn.common import client_batches
from tff_bn.common import cores
from tff_bn.common import element_types
from tff_bn.common import joined_tensors
from tff_bn.keras_model import batch as batch_lib
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model import model_metrics
from tff_bn.keras_model.batch import Batch
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import Role
from tff_bn.layers import batch_moments
from tff_bn.layers import discovery
from tff_bn.layers.batch_renormalization import BatchRenormalization
from tff_bn.layers.hybrid_batch_normalization import HybridBatchNormalization

# `loss`, the metrics by name, and `num_examples`.
Metrics = collections.OrderedDict[str, Any]
# Called with a client's id, and the labels and the outputs of each batch.
Visitor = Callable[[str, Iterable[tuple[Any, Any]]], None]

# With fewer batches, starting the threads takes longer than they save.
_MIN_CONCURRENT_BATCHES = 8
# To evaluate several models in one call saves some milliseconds for each. The
# function takes half a second to trace, so the first models are evaluated one
# by one.
_MIN_EVALUATED = 100
# The size of the weights and the data of one call.
_MAX_BYTES = 2**24


def _num_concurrent() -> int:
  """Returns the number of batches to compute at a time."""
  # A dataset's functions run on the CPU.
  if tf.config.get_visible_devices('GPU'):
    return 1
  return cores.num_concurrent()


class Evaluator:
  """Evaluates weights on datasets, in inference mode.

  The Keras model is built and traced once and then used for all weights.
  """

  def __init__(self, model: BatchNormModel):
    """Builds and traces the model.

    Args:
      model: The model, whose loss averages over the batch, as Keras's losses do
        by default.
    """
    self._model = model
    self._keras_model = model.to_keras()
    self._metrics = model.new_metrics()
    self._num_evaluated = 0
    weights_spec = [
        tf.TensorSpec(v.shape, v.dtype) for v in self._keras_model.weights
    ]
    # The outputs of the model when it was traced.
    self._structure: Any = None
    self._predict = tf.function(self._predictions, autograph=False)
    self._num_concurrent = _num_concurrent()
    self._evaluate, self._evaluate_concurrently = (
        tf.function(
            functools.partial(self._evaluate_all, num_concurrent=number),
            autograph=False,
            input_signature=[
                weights_spec,
                tf.data.DatasetSpec(model.input_spec),
            ],
        )
        for number in (1, self._num_concurrent)
    )

  def _evaluate_all(
      self,
      values: list[tf.Tensor],
      dataset: client_batches.Data,
      num_concurrent: int,
  ) -> tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]:
    """Returns the sum of the losses, the number of examples and the metrics."""
    self._begin(values)
    is_predicted = num_concurrent > 1
    if is_predicted:
      dataset = self._predicted(dataset, num_concurrent)

    def add(sums, element):
      loss, size, _ = self._add_batch(element, is_predicted=is_predicted)
      return sums[0] + loss, sums[1] + size

    sums = client_batches.fold(dataset, _no_examples(), add)
    return *sums, self._results()

  def _begin(self, values: Sequence[tf.Tensor]) -> None:
    """Gives the Keras model its weights, and starts the metrics afresh."""
    for variable, value in zip(self._keras_model.weights, values):
      variable.assign(value)
    for metric in self._metrics.values():
      metric.reset_state()

  def _predicted(
      self, dataset: tf.data.Dataset, num_concurrent: int
  ) -> tf.data.Dataset:
    """Puts predictions in the place of samples, several batches at a time."""
    # The outputs as a tuple, because datasets convert lists to tensors.
    return dataset.map(
        lambda x, *others: (self._predict(x), *others),
        num_parallel_calls=num_concurrent,
        deterministic=True,
    )

  def _add_batch(
      self, element: Any, *, is_predicted: bool
  ) -> tuple[tf.Tensor, tf.Tensor, Sequence[tf.Tensor]]:
    """Adds a batch to the metrics.

    Args:
      element: The batch.
      is_predicted: Whether it has predictions in the place of samples.

    Returns:
      The loss times the number of examples, this number, and the predictions.
    """
    batch = Batch(*element)
    predictions = batch.x if is_predicted else self._predict(batch.x)
    loss = self._update(batch, self._outputs(predictions))
    # The last batch may be smaller, so batches are weighted by their size.
    size = batch_lib.num_examples(element)
    loss_sum = tf.cast(loss, tf.float64) * tf.cast(size, tf.float64)
    return loss_sum, size, predictions

  def _results(self) -> dict[str, tf.Tensor]:
    """Returns the metrics of all batches."""
    results: dict[str, tf.Tensor] = {}
    for name, metric in self._metrics.items():
      # A function, because some metrics have conditions in Python.
      result = tf.function(metric.result)()
      results.update(model_metrics.named_results(name, result))
    return results

  @functools.cached_property
  def _evaluate_several(self) -> Any:
    """Evaluates several models, each with its own data, in one call."""
    return self._several(keeps_outputs=False)

  @functools.cached_property
  def _evaluate_several_and_keep_outputs(self) -> Any:
    """Does the same, and returns the models' outputs too."""
    return self._several(keeps_outputs=True)

  def _several(self, *, keeps_outputs: bool) -> Any:
    """Returns the function `_evaluate_stacked`."""
    values = [
        tf.TensorSpec([None, *v.shape], v.dtype)
        for v in self._keras_model.weights
    ]
    spec = client_batches.ClientBatches.spec(self._model.input_spec, False)
    vector = tf.TensorSpec([None], tf.int64)
    return tf.function(
        functools.partial(self._evaluate_stacked, keeps_outputs=keeps_outputs),
        autograph=False,
        input_signature=[values, spec.samples, spec.bounds, vector, vector],
    )

  def _evaluate_stacked(
      self,
      values: list[tf.Tensor],
      samples: Any,
      bounds: tf.Tensor,
      firsts: tf.Tensor,
      sizes: tf.Tensor,
      *,
      keeps_outputs: bool,
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Evaluates models.

    Args:
      values: The models' weights, stacked. A single model is for all data.
      samples: See `ClientBatches`.
      bounds: See `ClientBatches`.
      firsts: The number of each model's first batch.
      sizes: Each model's number of batches.
      keeps_outputs: Whether to return the outputs.

    Returns:
      The results of `_evaluate_all`, flat and stacked, and the outputs for all
      samples, flat.
    """
    count = tf.size(firsts)
    num_models = tf.shape(values[0])[0]
    results = [
        tf.TensorArray(dtype, count, element_shape=shape)
        for dtype, shape in self._result_specs
    ]
    kept = [
        tf.TensorArray(
            spec.dtype,
            tf.size(bounds) - 1,
            element_shape=spec.shape,
            infer_shape=False,
        )
        for spec in (self._output_specs if keeps_outputs else ())
    ]

    def evaluate(number, results, kept):
      self._begin(
          [tf.gather(v, tf.minimum(number, num_models - 1)) for v in values]
      )

      def add(state, element):
        loss_sum, num_examples, place, kept = state
        loss, size, outputs = self._add_batch(element, is_predicted=False)
        kept = [array.write(place, o) for array, o in zip(kept, outputs)]
        return loss_sum + loss, num_examples + size, place + 1, kept

      data = client_batches.ClientBatches.of_client(
          samples, bounds, firsts[number], sizes[number]
      )
      place = tf.cast(firsts[number], tf.int32)
      *sums, _, kept = client_batches.fold(
          data, (*_no_examples(), place, kept), add
      )
      found = tf.nest.flatten((*sums, self._results()))
      results = [
          array.write(number, result)
          for array, result in zip(results, found, strict=True)
      ]
      return number + 1, results, kept

    _, results, kept = tf.while_loop(
        lambda number, *_: number < count,
        evaluate,
        (0, results, kept),
        parallel_iterations=1,
    )
    return [r.stack() for r in results], [outputs.concat() for outputs in kept]

  @functools.cached_property
  def _result_specs(self) -> list[tuple[tf.DType, tf.TensorShape]]:
    outputs = self._evaluate.get_concrete_function().structured_outputs
    return [(o.dtype, o.shape) for o in tf.nest.flatten(outputs)]

  @functools.cached_property
  def _prediction_specs(self) -> tuple[tf.TensorSpec, ...]:
    """The types of what `_predict` returns for a batch."""
    traced = self._predict.get_concrete_function(self._model.input_spec[0])
    return tuple(
        tf.TensorSpec(o.shape, o.dtype) for o in traced.structured_outputs
    )

  @property
  def _output_specs(self) -> tuple[tf.TensorSpec, ...]:
    """The types of the model's outputs for a batch, without masks."""
    specs = self._prediction_specs
    return specs[: len(tf.nest.flatten(self._structure))]

  @functools.cached_property
  def _begin_with(self) -> Any:
    """The function `_begin`."""
    return tf.function(
        self._begin,
        autograph=False,
        input_signature=[
            [tf.TensorSpec(v.shape, v.dtype) for v in self._keras_model.weights]
        ],
    )

  @functools.cached_property
  def _add_samples(self) -> Any:
    """The function `_add_batch` for a batch of samples."""
    return tf.function(
        functools.partial(self._add_batch, is_predicted=False),
        autograph=False,
        input_signature=[self._model.input_spec],
    )

  @functools.cached_property
  def _add_predictions(self) -> Any:
    """The function `_add_batch` for a batch of `_predicted`."""
    return tf.function(
        functools.partial(self._add_batch, is_predicted=True),
        autograph=False,
        input_signature=[(self._prediction_specs, *self._model.input_spec[1:])],
    )

  @functools.cached_property
  def _read_results(self) -> Any:
    """The function `_results`."""
    return tf.function(self._results, autograph=False)

  def _predictions(self, x: Any) -> tuple[tf.Tensor, ...]:
    """Returns the model's outputs, then their masks, see `_outputs`."""
    self._structure = mixed_precision.to_float32(
        self._keras_model(x, training=False)
    )
    flat = tf.nest.flatten(self._structure)
    masks = [getattr(output, '_keras_mask', None) for output in flat]
    return (*flat, *(mask for mask in masks if mask is not None))

  def _outputs(self, predictions: Sequence[tf.Tensor]) -> Any:
    """Returns outputs in the model's structure, with their masks."""
    traced = tf.nest.flatten(self._structure)
    flat = predictions[: len(traced)]
    masks = iter(predictions[len(traced) :])
    for output, like in zip(flat, traced, strict=True):
      if getattr(like, '_keras_mask', None) is not None:
        # Keras's losses and metrics read the mask of an output from here.
        output._keras_mask = next(masks)
    return tf.nest.pack_sequence_as(self._structure, flat)

  def _update(self, batch: Batch, predictions: Any) -> tf.Tensor:
    """Updates the metrics and returns the loss."""
    for metric in self._metrics.values():
      metric.update_state(batch.y, predictions, batch.sample_weight)
    return self._model.batch_loss(batch.y, predictions, batch.sample_weight)

  @property
  def metric_names(self) -> tuple[str, ...]:
    """The names of the metrics' numbers, without `loss` and `num_examples`.

    These are the names in `numbers`: a vector has a name for each entry.
    """
    return tuple(
        name
        for result in self._model.metric_shapes.items()
        for name in model_metrics.entry_names(*result)
    )

  def evaluate(
      self, weights: ModelWeights, dataset: tf.data.Dataset
  ) -> Metrics:
    """Evaluates weights on a dataset.

    Args:
      weights: The weights.
      dataset: Batches of the type of the model's input_spec. The weights of
        examples count as in Keras's `evaluate`.

    Returns:
      `loss`, the mean over the examples (a float); the metrics by name (floats,
      and arrays for metrics with vectors as results); `num_examples` (an int).
      Without examples the loss and the metrics are NaN.

    Raises:
      TypeError: If the batches do not have the type of the model's input_spec.
    """
    return self._evaluate_tensors(self._tensors(weights), dataset)

  def evaluate_and_read(
      self,
      weights: ModelWeights,
      dataset: tf.data.Dataset,
      read: Callable[[Iterable[tuple[Any, Any]]], None],
  ) -> Metrics:
    """Evaluates weights on a dataset, and shows the model's outputs.

    Args:
      weights: The weights.
      dataset: See `evaluate`.
      read: Called with the labels of each batch, and the model's outputs for
        it in inference mode, as NumPy arrays. They are computed when they are
        read, one batch after another.

    Returns:
      The result of `evaluate`, from the same outputs.
    """
    return self._read_tensors(self._tensors(weights), dataset, read)

  def _read_tensors(
      self,
      tensors: list[tf.Tensor],
      dataset: tf.data.Dataset,
      read: Callable[[Iterable[tuple[Any, Any]]], None],
  ) -> Metrics:
    self._check(dataset)
    add = self._add_samples
    if self._is_concurrent(dataset):
      add = self._add_predictions
      dataset = self._predicted(dataset, self._num_concurrent)
    self._begin_with(tensors)
    loss_sum, num_examples = 0.0, 0

    def batches():
      nonlocal loss_sum, num_examples
      for element in dataset:
        loss, size, predictions = add(element)
        loss_sum += float(loss)
        num_examples += int(size)
        yield tf.nest.map_structure(
            lambda t: t.numpy(),
            (Batch(*element).y, self._outputs(predictions)),
        )

    unread = batches()
    read(unread)
    for _ in unread:  # All batches count, even if nobody wants their outputs.
      pass
    return self._to_metrics(loss_sum, num_examples, self._read_results())

  def _values(self, weights: ModelWeights) -> list[np.ndarray]:
    return [np.asarray(v) for v in self._model.from_model_weights(weights)]

  def _tensors(self, weights: ModelWeights) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(value) for value in self._values(weights)]

  def _check(self, dataset: tf.data.Dataset) -> None:
    """Raises a `TypeError` if batches have another type than the model's."""
    if dataset.element_spec != self._model.input_spec:
      element_types.check_elements(
          'dataset',
          dataset.element_spec,
          tff.to_type(tff.types.tensorflow_to_type(self._model.input_spec)),
      )

  def _is_concurrent(self, dataset: tf.data.Dataset) -> bool:
    """Whether several batches are computed at a time."""
    # Otherwise the same function would be traced twice.
    return (
        self._num_concurrent > 1
        and dataset.cardinality().numpy() >= _MIN_CONCURRENT_BATCHES
    )

  def _evaluate_tensors(
      self, tensors: list[tf.Tensor], dataset: tf.data.Dataset
  ) -> Metrics:
    self._check(dataset)
    is_concurrent = self._is_concurrent(dataset)
    evaluate = self._evaluate_concurrently if is_concurrent else self._evaluate
    return self._to_metrics(*evaluate(tensors, dataset))

  def _to_metrics(
      self, loss_sum: Any, count: Any, metrics: Mapping[str, Any]
  ) -> Metrics:
    """Turns the result of `_evaluate_all` into the result of `evaluate`."""
    num_examples = int(count)
    result: Metrics = collections.OrderedDict(
        loss=float(loss_sum) / num_examples if num_examples else float('nan')
    )
    for name, shape in self._model.metric_shapes.items():
      value = metrics[name] if num_examples else np.full(shape, np.nan)
      result[name] = _float_or_array(value)
    result['num_examples'] = num_examples
    return result

  def evaluate_clients(
      self,
      weights: Mapping[str, ModelWeights],
      dataset_fn: Callable[[str], tf.data.Dataset],
  ) -> Optional[Metrics]:
    """Evaluates each client's weights, and averages over the clients.

    Args:
      weights: The weights that each client uses, by client id.
      dataset_fn: Returns the data on which a client's weights are evaluated.

    Returns:
      See `mean_over_clients`.
    """
    return mean_over_clients(self.evaluate_each_client(weights, dataset_fn))

  def evaluate_each_client(
      self,
      weights: Mapping[str, ModelWeights],
      dataset_fn: Callable[[str], tf.data.Dataset],
  ) -> dict[str, Metrics]:
    """Evaluates each client's weights.

    Args:
      weights: The weights that each client uses, by client id.
      dataset_fn: Returns the data on which a client's weights are evaluated.

    Returns:
      The result of `evaluate` for each client.
    """
    return dict(self.evaluate_each(weights.items(), dataset_fn))

  def evaluate_each(
      self,
      weights: Iterable[tuple[str, ModelWeights]],
      dataset_fn: Callable[[str], batch_arrays.Source],
      visit: Optional[Visitor] = None,
  ) -> Iterator[tuple[str, Metrics]]:
    """Evaluates the weights of clients, however many there are.

    Args:
      weights: The id and the weights of each client. If they are made when they
        are read, only the weights for one call are in memory at a time.
      dataset_fn: Returns the data on which a client's weights are evaluated.
      visit: Called for each client before its result is yielded, with the
        outputs of the same forward pass, see `evaluate_and_read`.

    Yields:
      The id of each client and the result of `evaluate`, in the same order.
    """
    waiting = _Waiting()
    previous: Any = None
    tensors: Optional[list[tf.Tensor]] = None
    for client_id, client_weights in weights:
      # Clients may share their weights, whose conversion takes longer than
      # evaluating a small model.
      if client_weights is not previous:
        previous, tensors = client_weights, None
        values = self._values(client_weights)
      dataset = dataset_fn(client_id)
      arrays = self._small_arrays(dataset, visit is not None)
      if arrays is None or waiting.num_bytes > _MAX_BYTES:
        yield from self._evaluate_waiting(waiting, visit)
        waiting = _Waiting()
      if arrays is not None:
        waiting.add(client_id, values, arrays)
        if visit is not None:
          waiting.num_bytes += int(arrays.sizes.sum()) * self._output_bytes
        continue
      if isinstance(dataset, batch_arrays.LazyDataset):
        dataset = dataset.build()
      if tensors is None:
        tensors = [tf.convert_to_tensor(value) for value in values]
      if visit is None:
        yield client_id, self._evaluate_tensors(tensors, dataset)
      else:
        read = functools.partial(visit, client_id)
        yield client_id, self._read_tensors(tensors, dataset, read)
    yield from self._evaluate_waiting(waiting, visit)

  @functools.cached_property
  def _output_bytes(self) -> int:
    """The size of the model's outputs for an example."""
    return sum(
        spec.shape[1:].num_elements() * spec.dtype.size
        for spec in self._output_specs
    )

  def _small_arrays(
      self, dataset: batch_arrays.Source, keeps_outputs: bool
  ) -> Optional[batch_arrays.BatchArrays]:
    """Returns a dataset's batches if it is evaluated together with others."""
    self._num_evaluated += 1
    if self._num_evaluated <= _MIN_EVALUATED:
      return None
    if dataset.element_spec != self._model.input_spec:
      return None
    # Outputs of several sizes, such as of series, do not fit into one array.
    if keeps_outputs and not all(
        spec.shape[1:].is_fully_defined() for spec in self._output_specs
    ):
      return None
    arrays = batch_arrays.of_dataset(dataset)
    if arrays is None or len(arrays.sizes) >= _MIN_CONCURRENT_BATCHES:
      return None
    return arrays

  def _evaluate_waiting(
      self, waiting: '_Waiting', visit: Optional[Visitor]
  ) -> Iterator[tuple[str, Metrics]]:
    """Evaluates models in one call; yields their results by client id."""
    if not waiting.client_ids:
      return
    call = (
        self._evaluate_several
        if visit is None
        else self._evaluate_several_and_keep_outputs
    )
    arguments = waiting.arguments(self._model.input_spec)
    flat, kept = tf.nest.map_structure(lambda t: t.numpy(), call(*arguments))
    structure = self._evaluate.get_concrete_function().structured_outputs
    _, samples, bounds, firsts, sizes = arguments
    labels = Batch(*samples).y
    for n, client_id in enumerate(waiting.client_ids):
      if visit is not None:
        rows = slice(bounds[firsts[n]], bounds[firsts[n] + sizes[n]])
        outputs = tf.nest.pack_sequence_as(
            self._structure, [array[rows] for array in kept]
        )
        own = tf.nest.map_structure(operator.itemgetter(rows), labels)
        visit(client_id, [(own, outputs)])
      yield client_id, self._to_metrics(
          *tf.nest.pack_sequence_as(structure, [a[n] for a in flat])
      )


class _Waiting:
  """Models and their data that are evaluated in one call.

  Attributes:
    client_ids: The clients.
    num_bytes: The size of the weights and the data.
  """

  def __init__(self) -> None:
    self.client_ids: list[str] = []
    self.num_bytes = 0
    self._weights: list[list[np.ndarray]] = []
    self._data: list[batch_arrays.BatchArrays] = []

  def add(
      self,
      client_id: str,
      weights: list[np.ndarray],
      arrays: batch_arrays.BatchArrays,
  ) -> None:
    """Adds a client's model and data."""
    samples = arrays.load()
    if not self._weights or weights is not self._weights[-1]:
      self.num_bytes += sum(w.nbytes for w in weights)
    self.num_bytes += sum(array.nbytes for array in samples)
    self.client_ids.append(client_id)
    self._weights.append(weights)
    self._data.append(arrays._replace(load=lambda: samples))

  def arguments(self, input_spec: Any) -> list[Any]:
    """Returns the arguments of `Evaluator._evaluate_stacked`."""
    weights = self._weights
    if all(w is weights[0] for w in weights):
      weights = weights[:1]
    samples, *places = batch_arrays.join(self._data)
    # In the order of `tf.nest.flatten`.
    leaves = [
        samples[place]
        for place in np.argsort(batch_arrays.leaf_order(input_spec))
    ]
    return [
        [joined_tensors.stacked(values) for values in zip(*weights)],
        tf.nest.pack_sequence_as(input_spec, leaves),
        *places,
    ]


def _no_examples() -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the sum of the losses and the number of examples of no batch."""
  return tf.zeros([], tf.float64), tf.zeros([], tf.int64)


def _float_or_array(value: Any) -> Any:
  array = np.asarray(value)
  return array if array.ndim else float(array)


def numbers(metrics: Metrics) -> Metrics:
  """Returns the result of an evaluation with a name for each number.

  Args:
    metrics: The result of `Evaluator.evaluate`. The entries of a vector `NAME`
      are called `NAME_0`, `NAME_1`, ….
  """
  return model_metrics.entries(metrics)


def mean_over_clients(results: Mapping[str, Metrics]) -> Optional[Metrics]:
  """Averages the results of clients.

  Args:
    results: The results of `Evaluator.evaluate` by client id.

  Returns:
    The same entries. The loss and the metrics are unweighted means over the
    clients that have data, and `num_examples` is the sum. A client for which a
    metric is NaN, because it is undefined, does not count in its mean. `None`
    if no client has data.
  """
  with_data = [result for result in results.values() if result['num_examples']]
  if not with_data:
    return None
  means: Metrics = collections.OrderedDict(
      (
          name,
          _float_or_array(_mean([result[name] for result in with_data], name)),
      )
      for name in with_data[0]
      if name != 'num_examples'
  )
  means['num_examples'] = sum(result['num_examples'] for result in with_data)
  return means


def _mean(values: Sequence[Any], name: str) -> np.ndarray:
  """Returns the mean of defined numbers; any NaN counts in the loss."""
  if name == 'loss':
    return np.mean(values, axis=0)
  is_defined = ~np.isnan(values)
  # If nothing is defined, 0 / 0.
  with np.errstate(invalid='ignore'):
    return np.sum(np.where(is_defined, values, 0), axis=0) / np.sum(
        is_defined, axis=0
    )


def reestimate_batch_norm_statistics(
    model: BatchNormModel, weights: ModelWeights, dataset: tf.data.Dataset
) -> ModelWeights:
  """Computes the running statistics of all BN layers again, from data.

  FedBN (appendix G) does so for a client that took no part in training: start
  from `merge_client_weights` and use the client's own data, without labels.

  In one forward pass over the data, every BN layer normalizes with the
  statistics of the batch, and every other layer is in inference mode (without
  dropout). A layer's running mean and variance become the mean and the *biased*
  variance of its inputs over all batches, pooled in float64 by the law of total
  variance. The old running statistics have no influence. As in training, the
  statistics of a batch depend on its size, so use batches as large as there.

  BN layers with `trainable=False` keep and use their statistics, as in Keras.

  Args:
    model: The model.
    weights: Its weights.
    dataset: Batches `(x, ...)`; labels are not used.

  Returns:
    The weights with new running statistics.

  Raises:
    ValueError: If the dataset is empty.
  """
  keras_model = model.to_keras(weights)
  # The moments of the batches up to now, in float64.
  pooled: dict[keras.layers.Layer, batch_moments.Moments] = {}

  def call(
      layer: keras.layers.Layer, inputs: tf.Tensor, mask: Optional[tf.Tensor]
  ) -> tf.Tensor:
    values = np.moveaxis(inputs.numpy().astype(np.float64), layer.axis, -1)
    if mask is None:
      values = values.reshape([-1, values.shape[-1]])
    else:
      values = values[mask.numpy()]
    moments = batch_moments.Moments(
        np.float64(len(values)), values.mean(axis=0), values.var(axis=0)
    )
    if layer in pooled:
      moments = batch_moments.merge_moments(pooled[layer], moments)
    pooled[layer] = moments
    if layer.renorm or isinstance(
        layer, (BatchRenormalization, HybridBatchNormalization)
    ):
      return fused_batch_norm.by_batch(layer, inputs, mask)
    return type(layer).call(layer, inputs, training=True, mask=mask)

  with batch_norm_calls.replaced(keras_model, call, in_inference=True):
    for x, *_ in dataset:
      keras_model(x, training=False)
  for layer in discovery.batch_norm_layers(keras_model):
    if not layer.trainable:
      continue
    if layer not in pooled:
      raise ValueError(
          'Batch normalization statistics can only be computed from data, but'
          ' the dataset is empty.'
      )
    _, mean, variance = map(np.asarray, pooled[layer])
    layer.moving_mean.assign(mean)
    layer.moving_variance.assign(variance)
    if layer.renorm:
      # In training, Keras derives the moving variance from it.
      layer.moving_stddev.assign(np.sqrt(variance + layer.epsilon))
  return model.from_keras(keras_model)


def merge_client_weights(
    model: BatchNormModel, weights: Iterable[ModelWeights]
) -> ModelWeights:
  """Merges the clients' models into one.

  Shared variables are equal at all clients and keep their values. Local
  variables are averaged without weights, except for these:

  *   Running variances are pooled by the law of total variance: the mean of the
      clients' variances plus the variance of their means.
  *   The phases of personal position encodings get their initial values,
      because a mean of phases has no meaning.
  *   Integers are the first client's.

  FedBN (appendix G) starts from this model for a client that took no part in
  training.

  Args:
    model: The model.
    weights: The clients' weights, at least one. Only one client's weights are
      in memory at a time.

  Returns:
    The merged weights.

  Raises:
    ValueError: If there is no client.
  """
  first: Sequence[Any] = ()
  # By a variable's position: its mean and biased variance over the clients, in
  # float64. Variables that all clients share as one array are left out.
  moments: dict[int, tuple[np.ndarray, np.ndarray]] = {}
  count = 0
  for count, client_weights in enumerate(weights, start=1):
    values = model.from_model_weights(client_weights)
    first = first or values
    for position, value in enumerate(values):
      if value is first[position] and position not in moments:
        continue
      mean, variance = moments.get(position) or (
          np.asarray(first[position]).astype(np.float64),
          np.zeros(np.shape(value)),
      )
      difference = np.asarray(value).astype(np.float64) - mean
      # As in `batch_moments.merge_moments`.
      share = 1 / count
      moments[position] = (
          mean + share * difference,
          (1 - share) * (variance + share * np.square(difference)),
      )
  if not count:
    raise ValueError('weights is empty; at least one client is needed.')
  between = {
      info.batch_norm: moments[position][1]
      for position, info in enumerate(model.variables)
      if info.role is Role.MOVING_MEAN and position in moments
  }
  merged = []
  initial = model.from_model_weights(model.initial_weights)
  for position, info in enumerate(model.variables):
    value = np.asarray(first[position])
    if info.role is Role.PERSONAL_PHASE:
      value = initial[position]
    elif info.dtype.is_floating:
      mean, _ = moments.get(position, (value.astype(np.float64), None))
      if info.role is Role.MOVING_VARIANCE:
        mean = mean + between.get(info.batch_norm, 0.0)
      value = mean.astype(value.dtype)
    merged.append(value)
  return model.to_model_weights(merged)


def with_phases(
    model: BatchNormModel, weights: ModelWeights, own: ModelWeights
) -> ModelWeights:
  """Gives a model the phases of a client's personal position encodings.

  Args:
    model: The model.
    weights: The weights of the model.
    own: Weights with the client's phases.

  Returns:
    The weights with the client's phases.
  """
  return model.to_model_weights(
      [
          own_value if info.role is Role.PERSONAL_PHASE else value
          for info, value, own_value in zip(
              model.variables,
              model.from_model_weights(weights),
              model.from_model_weights(own),
          )
      ]
  )
