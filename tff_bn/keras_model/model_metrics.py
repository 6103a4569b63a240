"""The Keras metrics of a model.

Some metrics create their variables when they first see data, such as
`keras.metrics.F1Score`, which has a vector of sums over the examples, one sum
for each class. Here all metrics get their variables before they are traced.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import math
import re
from typing import Any

import keras
from keras.src.utils import naming
import numpy as np
import tensorflow as tf

from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import mixed_precision

Metrics = collections.OrderedDict[str, keras.metrics.Metric]
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


def build(
    metrics: Iterable[keras.metrics.Metric], y_spec: Any, output_spec: Any
) -> Metrics:
  """Creates the variables of metrics, and resets their states.

  Returns:
    The metrics by their names. Where Keras has numbered an unnamed metric, such
    as `mean_io_u_7`, it is numbered among the given ones instead, so that equal
    lists of metrics have equal names.

  Raises:
    ValueError: If a metric cannot be computed from such labels and outputs, or
      two metrics have the same name.
  """
  named = _named(list(metrics))
  for metric in named.values():
    try:
      # As in Keras's `fit`: without data, and without changing a variable.
      with keras.StatelessScope():
        tf.function(_update_fn(metric), autograph=False).get_concrete_function(
            y_spec, output_spec
        )
    # Metrics raise errors of many kinds.
    except Exception as error:
      raise ValueError(
          f'{_describe(metric)} cannot be computed from labels of'
          f' {_describe_specs(y_spec)} and outputs of'
          f' {_describe_specs(output_spec)}: {error}'
      ) from error
    metric.reset_state()
  return named


def _named(metrics: Sequence[keras.metrics.Metric]) -> Metrics:
  """Returns metrics by their names, see `build`."""
  _check_names([metric.name for metric in metrics])
  named: Metrics = collections.OrderedDict()
  counts = collections.Counter[str]()
  for metric in metrics:
    name = metric.name
    class_name = naming.to_snake_case(type(metric).__name__)
    if re.fullmatch(rf'{class_name}(_\d+)?', name):
      count = counts[class_name]
      name = f'{class_name}_{count}' if count else class_name
      counts[class_name] += 1
    named[name] = metric
  return named


def check(metrics: Metrics, y_spec: Any, output_spec: Any) -> Shapes:
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
    _check_state(metric, y_spec, output_spec)
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


def _update_fn(metric: keras.metrics.Metric) -> Any:
  def update(y, output):
    metric.update_state(y, output)

  return update


def _describe(metric: keras.metrics.Metric) -> str:
  return f'metrics_fn: the metric {metric.name!r} ({type(metric).__name__})'


def _describe_specs(specs: Any) -> str:
  return ', '.join(
      f'shape {spec.shape} and dtype {spec.dtype.name}'
      for spec in tf.nest.flatten(specs)
  )


def _result_shapes(
    metric_name: str,
    metric: keras.metrics.Metric,
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Yields the names and the shapes of a metric's results."""
  try:
    traced = tf.function(metric.result).get_concrete_function()
  except Exception as error:
    raise ValueError(
        f'{_describe(metric)} has a result that cannot be computed in a graph:'
        f' {error}'
    ) from error
  results = named_results(metric_name, traced.structured_outputs)
  for name, result in results.items():
    if not result.shape.is_fully_defined():
      raise ValueError(
          f'{_describe(metric)} has the result {name!r} of shape'
          f' {result.shape}; its shape must not depend on the data.'
      )
    yield name, tuple(result.shape)


def _check_state(
    metric: keras.metrics.Metric, y_spec: Any, output_spec: Any
) -> None:
  """Checks that a metric's variables are sums over the examples.

  The server adds the variables of the clients. A maximum, a moving average or a
  flag would become wrong without notice.
  """
  error = ValueError(
      f'{_describe(metric)} has variables that are not sums over the examples,'
      " such as a maximum or a flag, so the clients' variables cannot be added"
      ' up. Use a metric whose variables are sums that start from 0, as those'
      " of Keras's metrics are."
  )
  dtypes = [tf.as_dtype(variable.dtype) for variable in metric.variables]
  if not all(dtype.is_floating or dtype.is_integer for dtype in dtypes):
    raise error
  if any(np.any(value) for value in _state(metric)):
    raise error
  sizes = [
      math.prod(size or 1 for size in spec.shape)
      for spec in tf.nest.flatten((y_spec, output_spec))
  ]
  if max(sizes) > _MAX_NUMBERS:
    return
  rng = np.random.default_rng(0)
  batches = [
      (_sample(y_spec, size, rng), _sample(output_spec, size, rng))
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


def _state(metric: keras.metrics.Metric) -> list[np.ndarray]:
  return [v.numpy().astype(np.float64) for v in metric.variables]


def _state_after(
    metric: keras.metrics.Metric, batches: Sequence[tuple[Any, Any]]
) -> list[np.ndarray]:
  """Returns the values of a metric's variables after some batches."""
  metric.reset_state()
  for y, output in batches:
    metric.update_state(y, output)
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
