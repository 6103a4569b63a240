"""What layers of a model compute for many examples."""

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
# Activations that are layers of their own class.
_ACTIVATIONS = (
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.PReLU,
    keras.layers.ELU,
)


def hidden_layers(model: keras.Model) -> list[str]:
  """Finds the layers that compute the activations of hidden units.

  These are activation layers, and layers with an activation of their own, that
  another layer with weights comes after; in a model without any such, its
  dense and convolutional layers but for the last one. Functions of `keras.ops`
  are not layers, so a model that applies its activations in this way has none.

  Args:
    model: A functional or `Sequential` Keras model; nested ones are searched.

  Returns:
    The layers' names, in the order in which they are first called.

  Raises:
    ValueError: If the model is no functional one, or has no hidden layer.
  """
  if not keras_copy.is_functional(model) or not getattr(model, 'outputs', None):
    raise ValueError(
        f'The model {model.name!r} is no functional model that is connected to'
        ' an input, so its hidden layers can not be found; name them.'
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
  """Cuts examples into parts that a model can take at once.

  Args:
    x: The examples, an array or a tensor.

  Yields:
    Slices of `x` that cover it.

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
  """Calls a model in inference mode.

  Args:
    model: The model.
    layer_names: The names of layers; nested models are searched.
    x: A batch of examples.

  Returns:
    What the layers compute, of a layer that is called several times in the last
    call; and the model's outputs.

  Raises:
    ValueError: If there is no such layer or several, or it does not compute one
      tensor in a call of the model.
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
  """Brings what a layer computes into a matrix.

  Args:
    values: The values, `[examples, ...]`.
    axis: The axis of the units.
    layer_name: The layer, for messages.

  Returns:
    The values, `[units, examples * positions]`.

  Raises:
    ValueError: If there is no such axis, or it is the one of the examples.
  """
  rank = values.ndim
  if not -rank <= axis < rank or axis % rank == 0:
    raise ValueError(
        f'axis={axis} is no axis of units of layer_name={layer_name!r}, whose'
        f' outputs have the shape {values.shape}; the first is the examples.'
    )
  return np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
