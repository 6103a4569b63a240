"""The features that a layer of a Keras model computes."""

from collections.abc import Iterator
import contextlib
from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.keras_model import keras_graph
from tff_bn.layers import discovery


class LayerFeatures:
  """Keeps what a layer computes while its model is called.

  Unlike a model that ends at the layer, this works with nested and subclassed
  models, too, and computes the model only once for the features and the output.

  Attributes:
    value: The features at the last call, a tensor. If the layer was called
      several times, those of its last call.
  """

  def __init__(
      self,
      model: keras.Model,
      name: Optional[str] = None,
      *,
      argument: str = 'feature_layer',
  ):
    """Finds the layer.

    Args:
      model: The model.
      name: The name of the layer whose output is wanted; nested models and
        wrappers are searched. Default: the last hidden one, whose output is the
        input of the last layer with weights.
      argument: What the user's argument for `name` is called, for messages.

    Raises:
      ValueError: If there is no such layer, or several.
    """
    self._argument = argument
    self.value: Optional[tf.Tensor] = None
    self._model = model
    if name is None:
      self._layer, self._takes_input = _last_hidden(model, argument), True
    else:
      self._layer = _layer_by_name(model, name, argument)
      self._takes_input = False

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """While the context lasts, a call of the model sets `value`.

    Yields:
      Nothing.

    Raises:
      ValueError: If the model was called, but not this layer.
    """
    self.value = None
    layer = self._layer
    original = layer.call

    def call(inputs: Any, *args: Any, **kwargs: Any):
      outputs = original(inputs, *args, **kwargs)
      self.value = inputs if self._takes_input else outputs
      return outputs

    # Keras looks the method up in the object; its own `__setattr__` would track
    # the function.
    replaced = layer.__dict__.get('call')
    object.__setattr__(layer, 'call', call)
    try:
      yield
    finally:
      if replaced is None:
        object.__delattr__(layer, 'call')
      else:
        object.__setattr__(layer, 'call', replaced)
    if not tf.is_tensor(self.value):
      raise ValueError(
          f'{self._argument}: the layer {layer.name!r} of the model'
          f' {self._model.name!r} has no features that are one tensor in a call'
          f' of the model, but {type(self.value).__name__}.'
      )


def _layer_by_name(
    model: keras.Model, name: str, argument: str
) -> keras.layers.Layer:
  found = [
      layer
      for layer in discovery.all_layers(model)
      if layer.name == name and layer is not model
  ]
  if len(found) == 1:
    return found[0]
  raise ValueError(
      f'{argument}={name!r} is the name of {len(found)} layers of the model'
      f' {model.name!r}; it must be that of one. Its layers, some of which may'
      f' have others in them, are {", ".join(x.name for x in model.layers)}.'
  )


def _last_hidden(model: keras.Model, argument: str) -> keras.layers.Layer:
  """The last layer with weights; its input is the last hidden one's output."""
  layer = _output_layer(model, argument)
  if {id(v) for v in model.weights} == {id(v) for v in layer.weights}:
    raise ValueError(
        f'{argument}: the model {model.name!r} has no hidden layer, only'
        f' {layer.name!r} has weights.'
    )
  return layer


def _output_layer(model: keras.Model, argument: str) -> keras.layers.Layer:
  advice = (
      f'Give {argument}, the name of the layer whose output the features are.'
  )
  outputs = getattr(model, 'outputs', None)
  if not outputs:
    raise ValueError(
        f'{argument}: the model {model.name!r} is neither functional nor'
        f' Sequential, so its last hidden layer is unknown. {advice}'
    )
  while True:
    if len(outputs) != 1:
      raise ValueError(
          f'{argument}: the model {model.name!r} has no one last hidden'
          f' layer: its output is made of {len(outputs)} tensors. {advice}'
      )
    call = keras_graph.producer(outputs[0])
    layer = call.layer
    if isinstance(layer, keras.Model) and layer.weights:
      return _output_layer(layer, argument)
    # Operations that are no layers have no weights.
    if getattr(layer, 'weights', None) or not call.inputs:
      return layer
    outputs = call.inputs
