"""The Keras metrics of a model.

Some metrics create their variables when they first see data, such as
`keras.metrics.F1Score`, which has a vector of sums over the examples, one sum
for each class. Here all metrics get their variables before they are traced.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import math
import re
from typing import Any, Optional, TypeAlias

import keras
from keras.src.trainers import compile_utils
from keras.src.utils import naming
import numpy as np
import tensorflow as tf

from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model import objective
from tff_bn.keras_model import outputs as outputs_lib
from tff_bn.keras_model.batch import Batch

# What Keras's `compile` takes as a metric.
MetricLike: TypeAlias = str | keras.metrics.Metric | Callable[..., Any]
# The metrics of all outputs: of a single one a list; of several ones a list or
# dictionary of lists.
MetricLists: TypeAlias = Sequence[Any] | Mapping[str, Any]
# The shape of each result, by its name.
Shapes = collections.OrderedDict[str, tuple[int, ...]]

# For a larger example, such as text with a probability for each word of a large
# vocabulary, it would take long to compute a metric only to check it.
_MAX_NUMBERS = 2**22
_RESERVED = frozenset({'loss', 'num_examples'})


def output_spec(model: keras.Model, x_spec: Any) -> Any:
  """Returns the spec of a model's output for a batch, as metrics get it.

  The output of a model that computes in 16 bits is float32.
  """
  if keras_copy.is_functional(model) and all(
      None not in output.shape[1:] for output in model.outputs
  ):
    # A `Sequential` model's `output` is the output of its first call.
    is_sequential = isinstance(model, keras.Sequential)
    outputs = model.outputs[0] if is_sequential else model.output
  else:

    def call(x):
      # Inside of a scope, a layer's name may begin with an underscore.
      with tf.name_scope('model'):
        return model(x, training=False)

    with keras.StatelessScope():
      traced = tf.function(call, autograph=False).get_concrete_function(x_spec)
    outputs = traced.structured_outputs
  return keras.tree.map_structure(
      lambda output: tf.TensorSpec(
          output.shape, mixed_precision.loss_dtype(output.dtype)
      ),
      outputs,
  )


class OutputMetric:
  """A Keras metric of one output of a model.

  Attributes:
    metric: The metric.
    output: The output.
    is_weighted: Whether it uses the weights of the examples.
    argument: The argument of the model that it comes from, for errors.
  """

  def __init__(
      self,
      metric: keras.metrics.Metric,
      output: outputs_lib.Output,
      is_weighted: bool,
      argument: str,
  ):
    self.metric = metric
    self.output = output
    self.is_weighted = is_weighted
    self.argument = argument

  @property
  def description(self) -> str:
    """The metric in words, for errors."""
    place = f' of {self.output.description}' if self.output.name else ''
    return (
        f'{self.argument}: the metric {self.metric.name!r}'
        f' ({type(self.metric).__name__}){place}'
    )

  @property
  def name(self) -> str:
    """The name of its result."""
    return '_'.join(filter(None, (self.output.name, self.metric.name)))

  @property
  def variables(self) -> Sequence[keras.Variable]:
    """The metric's variables, sums over the examples."""
    return self.metric.variables

  def reset_state(self) -> None:
    """Starts the sums afresh."""
    self.metric.reset_state()

  @property
  def result(self) -> Callable[[], Any]:
    """The function that computes the metric from the sums."""
    # AutoGraph converts only the function itself that is traced.
    return self.metric.result

  def update_state(
      self, y: Any, outputs: Any, sample_weight: Optional[Any] = None
  ) -> None:
    """Adds a batch: its labels, the model's outputs, the examples' weights."""
    weight = sample_weight if self.is_weighted else None
    self.update_part(
        self.output.of(y),
        self.output.of(outputs),
        **objective.weight_of(self.output, weight),
    )

  def update_part(self, y: Any, output: Any, **weight: Any) -> None:
    """Adds a batch, given what belongs to this output."""
    self.metric.update_state(y, output, **weight)


class OutputLoss(OutputMetric):
  """The mean loss of one of several outputs, as Keras's `fit` reports it."""

  def __init__(self, output: outputs_lib.Output, loss: keras.losses.Loss):
    super().__init__(keras.metrics.Mean('loss'), output, True, 'loss_fn')
    self._loss = loss

  def update_part(self, y: Any, output: Any, **weight: Any) -> None:
    """See the base class."""
    size = tf.shape(tf.nest.flatten(y)[0])[0]
    loss = objective.compute(self._loss, y, output, **weight)
    self.metric.update_state(loss, size)


Metrics: TypeAlias = collections.OrderedDict[str, OutputMetric]


def build(
    metrics: MetricLists,
    weighted_metrics: MetricLists,
    losses: objective.Objective,
    outputs: Sequence[outputs_lib.Output],
    specs: Batch,
) -> Metrics:
  """Creates the variables of metrics, and resets their states.

  Args:
    metrics: The metrics that ignore the weights of the examples.
    weighted_metrics: The metrics that use them.
    losses: The losses of the outputs.
    outputs: The outputs of the model.
    specs: The specs of a batch.

  Returns:
    The metrics by their names. Several outputs have their losses first, and
    their names before the names of their metrics. Where Keras has numbered an
    unnamed metric, such as `mean_io_u_7`, it is numbered among the metrics of
    its output instead, so that equal lists of metrics have equal names. A
    weighted metric with the name of another one is called `weighted_NAME`.

  Raises:
    ValueError: If a metric cannot be computed from such labels and outputs, or
      two metrics have the same name.
  """
  found: list[OutputMetric] = []
  if len(outputs) > 1:
    found += [OutputLoss(output, loss) for output, loss in losses.parts]
  found += _of_outputs('metrics_fn', metrics, False, outputs, specs)
  found += _of_outputs(
      'weighted_metrics_fn', weighted_metrics, True, outputs, specs
  )
  named = _named(found)
  for metric in named.values():
    try:
      _create_variables(metric, specs)
    # Metrics raise errors of many kinds.
    except Exception as error:
      raise ValueError(
          f'{metric.description} cannot be computed from labels of'
          f' {outputs_lib.describe(metric.output.of(specs.y))} and outputs of'
          f' {outputs_lib.describe(metric.output.spec)}: {error}'
      ) from error
    metric.reset_state()
  return named


def _of_outputs(
    argument: str,
    metrics: MetricLists,
    are_weighted: bool,
    outputs: Sequence[outputs_lib.Output],
    specs: Batch,
) -> Iterator[OutputMetric]:
  """Yields the metrics of an argument with the outputs that they belong to."""
  if len(outputs) > 1:
    lists = outputs_lib.assign(argument, metrics, outputs) if metrics else []
  else:
    lists = [_flatten(metrics)]
  for output, listed in zip(outputs, lists):
    for metric in _flatten(listed):
      try:
        labels = output.of(specs.y)
      except KeyError as error:
        raise ValueError(
            f'{argument} has a metric of {output.description}, but y has no'
            ' labels for it.'
        ) from error
      try:
        metric = compile_utils.get_metric(metric, labels, output.spec)
      except ValueError as error:
        raise ValueError(
            f'{argument} has an unknown metric of {output.description}: {error}'
        ) from error
      yield OutputMetric(metric, output, are_weighted, argument)


def _flatten(metrics: Any) -> list[Any]:
  """Returns the metrics in a list, a dictionary, or lists of lists."""
  if metrics is None:
    return []
  if isinstance(metrics, Mapping):
    metrics = list(metrics.values())
  if not isinstance(metrics, (list, tuple)):
    return [metrics]
  return [metric for part in metrics for metric in _flatten(part)]


def _create_variables(metric: OutputMetric, specs: Batch) -> None:
  # As in Keras's `fit`: without data, and without changing a variable.
  with keras.StatelessScope():
    tf.function(metric.update_part, autograph=False).get_concrete_function(
        metric.output.of(specs.y), metric.output.spec, **_weight(metric, specs)
    )


def _weight(metric: OutputMetric, specs: Batch) -> dict[str, Any]:
  """Returns the spec of the argument `sample_weight` of a metric."""
  if not metric.is_weighted:
    return {}
  return objective.weight_of(metric.output, specs.sample_weight)


def _named(metrics: Sequence[OutputMetric]) -> Metrics:
  """Returns metrics by their names, see `build`."""
  for is_weighted in (False, True):
    _check_names([m.name for m in metrics if m.is_weighted is is_weighted])
  named: Metrics = collections.OrderedDict()
  counts = collections.Counter[tuple[str, str]]()
  for metric in metrics:
    own = metric.metric.name
    class_name = naming.to_snake_case(type(metric.metric).__name__)
    if re.fullmatch(rf'{class_name}(_\d+)?', own):
      key = metric.output.name, class_name
      count = counts[key]
      own = f'{class_name}_{count}' if count else class_name
      counts[key] += 1
    parts = [metric.output.name, own]
    if metric.is_weighted and '_'.join(filter(None, parts)) in named:
      parts.insert(1, 'weighted')
    named['_'.join(filter(None, parts))] = metric
  if len(named) < len(metrics):
    _check_names([metric.name for metric in metrics])
  return named


def check(metrics: Metrics, specs: Batch) -> Shapes:
  """Checks the metrics from `build`, and uses them up.

  Returns:
    The shapes of their results. As in Keras, a metric whose result is a
    dictionary has several results, with the dictionary's names.

  Raises:
    ValueError: If the names of results are not unique or are reserved, a result
      has no fixed shape, or the states of clients cannot be added up.
  """
  shapes: list[tuple[str, tuple[int, ...]]] = []
  for name, metric in metrics.items():
    shapes.extend(_result_shapes(name, metric))
    _check_state(metric, specs)
  _check_names([name for one in shapes for name in entry_names(*one)])
  return collections.OrderedDict(shapes)


def _check_names(names: Sequence[str]) -> None:
  if _RESERVED & set(names) or len(set(names)) < len(names):
    raise ValueError(
        f'metrics_fn returns metrics named {names}; the names must be unique'
        f' and differ from {" and ".join(map(repr, sorted(_RESERVED)))}.'
    )


def named_results(
    metric_name: str, result: Any
) -> collections.OrderedDict[str, Any]:
  """Returns the results of a metric, from its `result`, by their names."""
  if isinstance(result, Mapping):
    return collections.OrderedDict(result)
  return collections.OrderedDict({metric_name: result})


def entry_names(name: str, shape: Iterable[int]) -> list[str]:
  """Returns the names of the numbers in a result of this shape.

  They are the name of a scalar; `NAME_0`, `NAME_1`, … for a vector; `NAME_0_0`,
  … for a matrix.
  """
  return ['_'.join([name, *map(str, index)]) for index in np.ndindex(*shape)]


def entries(results: Mapping[str, Any]) -> collections.OrderedDict[str, Any]:
  """Returns the numbers in results by their names, see `entry_names`."""
  numbers: collections.OrderedDict[str, Any] = collections.OrderedDict()
  for name, result in results.items():
    shape = np.shape(result)
    numbers.update(
        zip(entry_names(name, shape), np.ravel(result) if shape else [result])
    )
  return numbers


def _result_shapes(
    metric_name: str,
    metric: OutputMetric,
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Yields the names and the shapes of a metric's results."""
  try:
    traced = tf.function(metric.result).get_concrete_function()
  except Exception as error:
    raise ValueError(
        f'{metric.description} has a result that cannot be computed in a graph:'
        f' {error}'
    ) from error
  results = named_results(metric_name, traced.structured_outputs)
  for name, result in results.items():
    if not result.shape.is_fully_defined():
      raise ValueError(
          f'{metric.description} has the result {name!r} of shape'
          f' {result.shape}; its shape must not depend on the data.'
      )
    yield name, tuple(result.shape)


def _check_state(metric: OutputMetric, specs: Batch) -> None:
  """Checks that a metric's variables are sums over the examples.

  The server adds the variables of the clients. A maximum, a moving average or a
  flag would become wrong without notice.
  """
  error = ValueError(
      f'{metric.description} has variables that are not sums over the examples,'
      " such as a maximum or a flag, so the clients' variables cannot be added"
      ' up. Use a metric whose variables are sums that start from 0, as those'
      " of Keras's metrics are."
  )
  dtypes = [tf.as_dtype(variable.dtype) for variable in metric.variables]
  if not all(dtype.is_floating or dtype.is_integer for dtype in dtypes):
    raise error
  if any(np.any(value) for value in _state(metric)):
    raise error
  parts = (metric.output.of(specs.y), metric.output.spec)
  weight = _weight(metric, specs)
  sizes = [
      math.prod(size or 1 for size in spec.shape)
      for spec in tf.nest.flatten((*parts, weight))
  ]
  if max(sizes) > _MAX_NUMBERS:
    return
  rng = np.random.default_rng(0)
  batches = [
      tuple(_sample(part, size, rng) for part in (*parts, weight))
      for size in (2, 3)
  ]
  try:
    separate = [_state_after(metric, [batch]) for batch in batches]
    together = _state_after(metric, batches)
  except Exception:
    return  # The metric takes other values only: nothing is known.
  for one, other, both in zip(*separate, together, strict=True):
    if not np.allclose(one + other, both, rtol=0.05, equal_nan=True):
      raise error


def _state(metric: OutputMetric) -> list[np.ndarray]:
  return [v.numpy().astype(np.float64) for v in metric.variables]


def _state_after(
    metric: OutputMetric, batches: Sequence[tuple[Any, ...]]
) -> list[np.ndarray]:
  """Returns the values of a metric's variables after some batches."""
  metric.reset_state()
  for y, output, weight in batches:
    metric.update_part(y, output, **weight)
  return _state(metric)


def _sample(specs: Any, batch_size: int, rng: np.random.Generator) -> Any:
  """Returns random floats, and zeros of other dtypes, such as the class 0."""

  def sample(spec):
    shape = [
        size or (1 if axis else batch_size)
        for axis, size in enumerate(spec.shape)
    ]
    if spec.dtype.is_floating:
      return tf.constant(rng.uniform(size=shape), spec.dtype)
    return tf.zeros(shape, spec.dtype)

  return tf.nest.map_structure(sample, specs)
