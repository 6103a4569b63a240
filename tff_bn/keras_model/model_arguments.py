"""Checks of the arguments of `BatchNormModel`."""

import inspect
from typing import Any

import keras
import tensorflow as tf

from tff_bn.common import checks


def check_model_fn(keras_model_fn: Any) -> None:
  """Raises a `TypeError` if `keras_model_fn` is not a function."""
  if isinstance(keras_model_fn, keras.Model):
    raise TypeError(
        'keras_model_fn must be a function that returns a new model at each'
        f' call, but is the model {keras_model_fn.name!r} itself; use lambda:'
        ' tff_bn.copy_model(model), which copies it with its weights.'
    )
  _check_function(
      'keras_model_fn', keras_model_fn, 'a new keras.Model at each call'
  )


def check_loss_fn(loss_fn: Any) -> None:
  """Raises a `TypeError` if `loss_fn` does not return a Keras loss."""
  if isinstance(loss_fn, keras.losses.Loss):
    name = type(loss_fn).__name__
    raise TypeError(
        f'loss_fn must be a function that returns a Keras loss, but is a {name}'
        f' itself; use lambda: keras.losses.{name}(...).'
    )
  _check_function('loss_fn', loss_fn, 'a keras.losses.Loss')
  checks.check_type(
      'loss_fn',
      loss_fn(),
      keras.losses.Loss,
      'return a keras.losses.Loss, such as'
      ' keras.losses.SparseCategoricalCrossentropy(from_logits=True)',
  )


def check_metrics_fn(metrics_fn: Any) -> None:
  """Checks that `metrics_fn` returns Keras metrics with different names.

  Args:
    metrics_fn: The argument.

  Raises:
    TypeError: If it is no function, or does not return a list of metrics.
    ValueError: If two metrics have the same name, or one has a reserved name.
  """
  if isinstance(metrics_fn, (list, tuple, keras.metrics.Metric)):
    raise TypeError(
        'metrics_fn must be a function that returns a list of new Keras'
        f' metrics, but is a {type(metrics_fn).__name__} itself; use lambda:'
        " [keras.metrics.SparseCategoricalAccuracy('accuracy')]."
    )
  _check_function('metrics_fn', metrics_fn, 'a list of keras.metrics.Metric')
  metrics = metrics_fn()
  checks.check_type(
      'metrics_fn',
      metrics,
      (list, tuple),
      'return a list of keras.metrics.Metric',
  )
  for metric in metrics:
    checks.check_type(
        'metrics_fn',
        metric,
        keras.metrics.Metric,
        'return a list of keras.metrics.Metric, such as'
        " [keras.metrics.SparseCategoricalAccuracy('accuracy')]",
    )
  names = [metric.name for metric in metrics]
  if {'loss', 'num_examples'} & set(names) or len(set(names)) < len(names):
    raise ValueError(
        f'metrics_fn returns metrics named {names}; the names must be unique'
        " and differ from 'loss' and 'num_examples'."
    )


def _check_function(name: str, value: Any, returned: str) -> None:
  expected = (
      f'{name} must be a function without arguments that returns {returned}'
  )
  if not callable(value):
    raise TypeError(f'{expected}, but is a {type(value).__name__}.')
  try:
    inspect.signature(value).bind()
  except TypeError as error:
    raise TypeError(
        f'{expected}, but a call without arguments is impossible: {error}.'
    ) from error
  except ValueError:
    pass  # Some functions in C have no signature.


def check_input_spec(input_spec: Any) -> tuple[Any, Any]:
  """Checks that a spec is of a batched dataset of pairs, and returns it.

  Args:
    input_spec: The argument.

  Returns:
    The specs of x and y.

  Raises:
    TypeError: If it consists of other things than specs.
    ValueError: If it is not a pair, or a part of it has no batch axis.
  """
  if isinstance(input_spec, tf.data.Dataset):
    raise TypeError(
        'input_spec must be the element_spec of a dataset, but is a'
        f' {type(input_spec).__name__}; use dataset.element_spec.'
    )
  if not isinstance(input_spec, (tuple, list)) or len(input_spec) != 2:
    raise ValueError(
        'input_spec must be the element_spec of a batched dataset of (x, y)'
        f' pairs, but is {input_spec!r}.'
    )
  for spec in tf.nest.flatten(input_spec):
    checks.check_type(
        'input_spec',
        spec,
        tf.TypeSpec,
        'consist of tf.TensorSpecs, as dataset.element_spec does',
    )
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank == 0:
      raise ValueError(_not_batched(spec))
  x, y = input_spec
  return x, y


def _not_batched(spec: tf.TensorSpec) -> str:
  return (
      f'input_spec has a tensor of shape {spec.shape}, without an axis for the'
      ' examples of a batch: the dataset is not batched. Use'
      ' dataset.batch(batch_size).element_spec.'
  )


def check_fits(input_spec: tuple[Any, Any], model: keras.Model) -> None:
  """Raises a `ValueError` if a model can't take `x`.

  Args:
    input_spec: The specs of x and y.
    model: The model. Only functional models have known inputs.
  """
  spec = input_spec[0]
  inputs = getattr(model, 'inputs', None) or []
  given = len(tf.nest.flatten(spec))
  if given < len(inputs):
    raise ValueError(
        f'input_spec has x of {given} tensors, but the model {model.name!r} has'
        f' {len(inputs)} inputs.'
    )
  if len(inputs) != 1 or not isinstance(spec, tf.TensorSpec):
    return
  if spec.shape.rank is None:
    return
  expected = tf.TensorShape(inputs[0].shape)
  shape = spec.shape.as_list()
  # Keras adds or removes a last axis of size 1.
  shapes = [shape, [*shape, 1]]
  if shape[-1:] == [1]:
    shapes.append(shape[:-1])
  if any(expected.is_compatible_with(s) for s in shapes):
    return
  if expected[1:].is_compatible_with(shape):
    raise ValueError(_not_batched(spec))
  raise ValueError(
      f'input_spec has x of shape {spec.shape}, but the input of the model'
      f' {model.name!r} has the shape {expected}.'
  )
