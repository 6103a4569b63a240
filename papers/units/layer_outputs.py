"""Computes the outputs of a model's layers, batch by batch."""

from collections.abc import Iterable, Iterator
import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import keras_graph
from tff_bn.keras_model import layer_features

_BATCH_SIZE = 128
# Activation functions that are classes of layers.
_ACTIVATIONS = (
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.PReLU,
    keras.layers.ELU,
)


def hidden_layers(model: keras.Model) -> list[str]:
  """Finds the layers that compute the activations of hidden units.

  These are activation layers, and layers with an `activation` argument, that
  are followed by a layer with weights. If the model has none of these, they are
  its dense and convolutional layers except the last one. Activation functions
  of `keras.ops` are not layers and don't count.

  Args:
    model: A functional or `Sequential` Keras model; nested ones are searched.

  Returns:
    The layers' names in the order of their first calls.

  Raises:
    ValueError: If the model is not functional, or has no hidden layer.
  """
  if not keras_copy.is_functional(model) or not getattr(model, 'outputs', None):
    raise ValueError(
        f'The model {model.name!r} is not a functional model with inputs, so'
        ' its hidden layers cannot be found; name them.'
    )
  layers = list(dict.fromkeys(_called_layers(model)))
  last = max((i for i, x in enumerate(layers) if x.weights), default=0)
  hidden = layers[:last]
  names = [layer.name for layer in hidden if _is_activation(layer)]
  if not names:
    names = [layer.name for layer in hidden if hasattr(layer, 'kernel')]
  if not names:
    raise ValueError(f'The model {model.name!r} has no hidden layer.')
  return names


def _called_layers(model: keras.Model) -> Iterator[keras.Layer]:
  for call in keras_graph.calls(model):
    if keras_copy.is_functional(call.layer):
      yield from _called_layers(call.layer)
    elif isinstance(call.layer, keras.Layer):
      yield call.layer


def _is_activation(layer: keras.Layer) -> bool:
  activation = getattr(layer, 'activation', None)
  return isinstance(layer, _ACTIVATIONS) or (
      activation not in (None, keras.activations.linear)
  )


def batches(x: Any) -> Iterator[slice]:
  """Splits examples into batches.

  Args:
    x: The examples, an array or a tensor `[examples, ...]`.

  Yields:
    The slice of each batch in `x`.

  Raises:
    ValueError: If there are no examples.
  """
  if not len(x):
    raise ValueError('x has no examples.')
  for start in range(0, len(x), _BATCH_SIZE):
    yield slice(start, start + _BATCH_SIZE)


def call(
    model: keras.Model, layer_names: Iterable[str], x: Any
) -> tuple[list[tf.Tensor], Any]:
  """Calls a model in inference mode and returns the outputs of its layers.

  Args:
    model: The model.
    layer_names: The names of layers; nested models are searched.
    x: A batch of examples, `[examples, ...]`.

  Returns:
    The output of each layer, and the model's outputs. If the model calls a
    layer several times, the last call counts.

  Raises:
    ValueError: If there is no such layer or several, or its output is not one
      tensor.
  """
  features = [
      layer_features.LayerFeatures(model, name, argument='layer_name')
      for name in layer_names
  ]
  with contextlib.ExitStack() as stack:
    for feature in features:
      stack.enter_context(feature.watched())
    outputs = model(x, training=False)
  return [feature.value for feature in features], outputs


def units_first(values: np.ndarray, axis: int, layer_name: str) -> np.ndarray:
  """Reshapes the output of a layer into a matrix with a row for each unit.

  Args:
    values: The output, `[examples, ...]`.
    axis: The axis of the units.
    layer_name: The layer's name, for messages.

  Returns:
    The values, `[units, examples * positions]`.

  Raises:
    ValueError: If the axis does not exist, or is the axis of the examples.
  """
  rank = values.ndim
  if not -rank <= axis < rank or axis % rank == 0:
    raise ValueError(
        f'axis={axis} is not an axis of units of layer_name={layer_name!r},'
        f' whose outputs have the shape {values.shape}; the first axis has the'
        ' examples.'
    )
  return np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
