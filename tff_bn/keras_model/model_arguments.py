"""Checks of the arguments of `BatchNormModel`."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
import inspect
import random
from typing import Any

from absl import logging
import keras
import numpy as np
import tensorflow as tf

from tff_bn.common import checks
from tff_bn.common import element_types
from tff_bn.keras_model.batch import Batch
from tff_bn.layers import discovery

# How to train a copy of a model that exists, in messages.
_COPY_ADVICE = (
    'use lambda: tff_bn.copy_model(model), which copies it with its weights.'
)

# Code that converts a value to an ordinary tensor, by the class of its spec.
_TO_TENSOR = {
    tf.SparseTensorSpec: 'tf.sparse.to_dense({})',
    tf.RaggedTensorSpec: '{}.to_tensor()',
}
# What Keras's `fit` and `evaluate` call, and what our training replaces.
_TRAINING_METHODS = (
    'fit',
    'make_train_function',
    'train_on_batch',
    'train_step',
    'compute_loss',
    'compute_metrics',
    'test_step',
)
_COMPILED = ('optimizer', 'loss', 'loss_weights', 'metrics', 'weighted_metrics')


def check_model_fn(keras_model_fn: Any) -> None:
  """Raises a `TypeError` if `keras_model_fn` is not a function."""
  if isinstance(keras_model_fn, keras.Model):
    raise TypeError(
        'keras_model_fn must be a function that returns a new model at each'
        f' call, but is the model {keras_model_fn.name!r} itself;'
        f' {_COPY_ADVICE}'
    )
  _check_function(
      'keras_model_fn', keras_model_fn, 'a new keras.Model at each call'
  )


def check_training(model: keras.Model) -> None:
  """Raises a `ValueError` if a model overrides Keras's methods for training.

  If the model is compiled, a warning is logged.
  """
  own = [
      name
      for name in _TRAINING_METHODS
      if getattr(getattr(model, name), '__func__', None)
      is not getattr(keras.Model, name)
  ]
  if own:
    raise ValueError(
        f'The model {model.name!r} of keras_model_fn ({type(model).__name__})'
        f' has its own {", ".join(own)}, which federated training would ignore.'
        ' Remove the overridden methods, or wrap a functional model in'
        ' keras.Model(model.inputs, model.outputs). Put the loss into loss_fn,'
        ' or into self.add_loss in `call`, and the metrics into metrics_fn.'
    )
  if model.compiled:
    # A class with its own `compile` may lack it.
    config = getattr(model, '_compile_config', None)
    arguments = {} if config is None else config.config
    given = [
        f'{name} ({_describe(arguments[name])})'
        for name in _COMPILED
        if arguments.get(name) is not None
    ]
    logging.warning(
        'The model %r of keras_model_fn is compiled, but training ignores its'
        ' %s: loss_fn, metrics_fn and the client_optimizer of the builder'
        ' replace them. BatchNormModel.from_compiled takes the losses and'
        ' metrics of a compiled model.',
        model.name,
        ', '.join(given) or 'settings',
    )


def _describe(value: Any) -> str:
  """Names an argument of `compile`: a function, an object or several."""
  if isinstance(value, Mapping):
    return ', '.join(f'{key}: {_describe(item)}' for key, item in value.items())
  if isinstance(value, (list, tuple)):
    return ', '.join(map(_describe, value))
  if isinstance(value, (str, int, float)):
    return str(value)
  return getattr(value, '__name__', type(value).__name__)


def check_loss_fn(loss_fn: Any) -> None:
  """Raises a `TypeError` if `loss_fn` does not return Keras losses."""
  if isinstance(loss_fn, keras.losses.Loss):
    name = type(loss_fn).__name__
    raise TypeError(
        f'loss_fn must be a function that returns a Keras loss, but is a {name}'
        f' itself; use lambda: keras.losses.{name}(...).'
    )
  _check_function('loss_fn', loss_fn, 'a keras.losses.Loss')
  losses = loss_fn()
  for loss in _flatten(losses) if losses is not None else [None]:
    if not isinstance(loss, (str, keras.losses.Loss)) and not callable(loss):
      raise TypeError(
          'loss_fn must return a keras.losses.Loss, such as'
          ' keras.losses.SparseCategoricalCrossentropy(from_logits=True), or a'
          " list or dictionary of the outputs' losses, but returned"
          f' {_of_type(loss)}.'
      )


def check_metrics_fn(name: str, metrics_fn: Any) -> None:
  """Raises a `TypeError` if `metrics_fn` does not return Keras metrics.

  `name` is the name of the argument.
  """
  if isinstance(metrics_fn, (list, tuple, dict, keras.metrics.Metric)):
    raise TypeError(
        f'{name} must be a function that returns a list of new Keras metrics,'
        f' but is a {type(metrics_fn).__name__} itself; use lambda:'
        " [keras.metrics.SparseCategoricalAccuracy('accuracy')]."
    )
  _check_function(name, metrics_fn, 'a list of keras.metrics.Metric')
  metrics = metrics_fn()
  checks.check_type(
      name,
      metrics,
      (list, tuple, Mapping),
      'return a list of keras.metrics.Metric, or a list or dictionary of the'
      " outputs' metrics",
  )
  for metric in _flatten(metrics):
    if not isinstance(metric, (str, keras.metrics.Metric)) and not callable(
        metric
    ):
      raise TypeError(
          f'{name} must return a list of keras.metrics.Metric, such as'
          " [keras.metrics.SparseCategoricalAccuracy('accuracy')], but it"
          f' contains {_of_type(metric)}.'
      )


def _flatten(values: Any) -> list[Any]:
  """Returns the losses or metrics in nested lists; None is for outputs."""
  if isinstance(values, Mapping):
    values = list(values.values())
  if not isinstance(values, (list, tuple)):
    return [values]
  return [v for part in values if part is not None for v in _flatten(part)]


def _of_type(value: Any) -> str:
  return f'{value!r} of type {type(value).__name__}'


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


def check_input_spec(input_spec: Any) -> tuple[Any, ...]:
  """Returns the specs of `(x, y)` or `(x, y, sample_weight)`, as a tuple.

  It raises a `TypeError` for other things than specs of ordinary tensors, and a
  `ValueError` for other elements, without a batch axis or without a known rank.
  """
  if isinstance(input_spec, tf.data.Dataset):
    raise TypeError(
        'input_spec must be the element_spec of a dataset, but is a'
        f' {type(input_spec).__name__}; use dataset.element_spec.'
    )
  if not isinstance(input_spec, (tuple, list)) or len(input_spec) not in (2, 3):
    raise ValueError(
        'input_spec must be the element_spec of a batched dataset of (x, y)'
        f' pairs or of (x, y, sample_weight), but is {input_spec!r}.'
        + element_types.pairs_advice(input_spec)
    )
  names = Batch._fields[: len(input_spec)]
  for name, part in zip(names, input_spec):
    specs = tf.nest.flatten(part)
    if not specs:
      raise ValueError(f'input_spec has no tensor in {name}: {input_spec!r}.')
    for spec in specs:
      _check_tensor(name, spec, names if spec is part else ())
  return tuple(input_spec)


def _check_tensor(name: str, spec: Any, parts: Sequence[str]) -> None:
  """Checks the spec of a tensor in the part `name`.

  `parts` are the names of all parts if it is the only tensor of its part.
  """
  checks.check_type(
      'input_spec',
      spec,
      tf.TypeSpec,
      'consist of tf.TensorSpecs, as dataset.element_spec does',
  )
  if not isinstance(spec, tf.TensorSpec):
    by = 'dataset.map'
    convert = _TO_TENSOR.get(type(spec))
    if convert is not None and parts:
      converted = [convert.format(p) if p == name else p for p in parts]
      by += f'(lambda {", ".join(parts)}: ({", ".join(converted)}))'
    elif convert is not None:
      by = f'{convert.format("part")} in {by}'
    raise TypeError(
        f'input_spec must consist of tf.TensorSpecs, but {name} has a part of'
        f' type {type(spec).__name__}. Convert it to an ordinary tensor by'
        f' {by}.'
    )
  if spec.shape.rank is None:
    raise ValueError(
        f'input_spec has a tensor of unknown rank in {name}: {spec}. Give'
        ' tf.data.Dataset.from_generator an output_signature with shapes, and'
        ' call set_shape after tf.py_function or tf.numpy_function.'
    )
  if spec.shape.rank == 0:
    raise ValueError(_not_batched(spec))


def _not_batched(spec: tf.TensorSpec) -> str:
  return (
      f'input_spec has a tensor of shape {spec.shape}, without an axis for the'
      ' examples of a batch: the dataset is not batched. Use'
      ' dataset.batch(batch_size).element_spec.'
  )


def check_fits(input_spec: tuple[Any, ...], model: keras.Model) -> None:
  """Raises a `ValueError` if a model with known inputs can't take `x`."""
  spec = Batch(*input_spec).x
  inputs = getattr(model, 'inputs', None) or []
  given = len(tf.nest.flatten(spec))
  if given < len(inputs):
    raise ValueError(
        f'input_spec has x of {given} tensors, but the model {model.name!r} has'
        f' {len(inputs)} inputs.'
    )
  if len(inputs) != 1 or not isinstance(spec, tf.TensorSpec):
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


def call_model_fn(
    keras_model_fn: Callable[[], Any],
) -> tuple[Any, Set[int]]:
  """Calls `keras_model_fn` and records the variables that it creates.

  Returns:
    What it returns, and the `id`s of the new TensorFlow variables, one for each
    new variable of Keras.
  """
  created = set()

  def record(next_creator, **kwargs):
    variable = next_creator(**kwargs)
    created.add(id(variable))
    return variable

  with tf.variable_creator_scope(record):
    return keras_model_fn(), created


def check_new_variables(
    trained: Iterable[keras.Variable], created: Set[int], model: keras.Model
) -> None:
  """Raises a `ValueError` if a returned model has variables from before.

  This finds a model that existed before the call without a second call, which
  would take time and memory, and random numbers from the following programs.

  Args:
    trained: The variables that training changes. A model may share others, such
      as a frozen layer.
    created: The variables that `call_model_fn` recorded.
    model: The model.
  """
  old = [v.path for v in trained if id(v.value) not in created]
  if old:
    raise ValueError(
        'keras_model_fn must build a new model at each call, but returned the'
        f' model {model.name!r} with {len(old)} trained variables that existed'
        f' before the call, such as {old[0]!r}. For a loaded model,'
        f' {_COPY_ADVICE}'
    )


def check_new_layers(
    keras_model_fn: Callable[[], Any], model: keras.Model
) -> None:
  """Raises a `ValueError` if a function returns trained layers again.

  A model without variables needs a second call to find this. The given model
  comes from the first call and was built since.
  """
  # The call must not change the random numbers after it.
  python_state, numpy_state = random.getstate(), np.random.get_state()
  try:
    again = keras_model_fn()
  finally:
    random.setstate(python_state)
    np.random.set_state(numpy_state)
  first = {
      id(layer)
      for layer in discovery.all_layers(model)
      # Training changes variables of the layer.
      if layer.trainable_weights
      or any(norm.trainable for norm in discovery.batch_norm_layers(layer))
  }
  same = [x for x in discovery.all_layers(again) if id(x) in first]
  if same:
    kind = 'model' if isinstance(same[0], keras.Model) else 'layer'
    raise ValueError(
        'keras_model_fn must build a new model at each call, but returned the'
        f' {kind} {same[0].name!r} at two calls. For a loaded model,'
        f' {_COPY_ADVICE}'
    )
