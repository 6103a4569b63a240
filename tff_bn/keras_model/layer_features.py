"""The features of a layer in a Keras model."""

from collections.abc import Iterator
import contextlib
from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import keras_graph
from tff_bn.layers import discovery


class LayerFeatures:
  """Records the output of one layer during calls of its model.

  Unlike a model that ends at the layer, this works with nested and subclassed
  models, too, and computes the model only once for the features and the output.

  Attributes:
    value: The features of the layer's last call, a tensor.
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
      model: The model. Nested models and wrappers are searched.
      name: The name of the layer, which must be unique. Default: the last
        hidden layer, whose output is the input of the last layer with weights.
      argument: The name of the user's argument, for error messages.
    """
    self._argument = argument
    self.value: Optional[tf.Tensor] = None
    self._model = model
    self._takes_input = name is None
    if name is None:
      advice = (
          f' Set {argument} to the name of the layer that computes the'
          ' features.'
      )
      self._layer = layer_after_features(model, argument, advice)
    else:
      self._layer = _layer_by_name(model, name, argument)

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """Makes calls of the model set `value` while the context lasts.

    If no call of the layer gives a single tensor, it raises a `ValueError`.
    """
    self.value = None
    layer = self._layer
    original = layer.call

    def call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
      outputs = original(inputs, *args, **kwargs)
      self.value = inputs if self._takes_input else outputs
      return outputs

    with batch_norm_calls.replaced_call(layer, call):
      yield
    if not tf.is_tensor(self.value):
      raise ValueError(
          f'{self._argument}: a call of the model {self._model.name!r} must'
          f' give one tensor as the features of the layer {layer.name!r}, but'
          f' gave {type(self.value).__name__}.'
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
      f'{argument}={name!r} is the name of {len(found)} layers in the model'
      f' {model.name!r}; it must name exactly one. The layers at the top level'
      f' are {", ".join(x.name for x in model.layers)}.'
  )


def layer_after_features(
    model: keras.Model, argument: str, advice: str = ''
) -> keras.layers.Layer:
  """Finds the last layer with weights, which follows the last hidden layer.

  Nested models are searched. If there is no single such layer, or no hidden
  layer before it, it raises a `ValueError`.

  Args:
    model: The model.
    argument: What needs the layer, for error messages.
    advice: What to do if the layer is unknown: the end of error messages.
  """
  inner, outputs = model, getattr(model, 'outputs', None)
  while True:
    if not outputs:
      raise ValueError(
          f'{argument}: the model {inner.name!r} is neither functional nor'
          f' Sequential, so its last hidden layer is unknown.{advice}'
      )
    if len(outputs) != 1:
      raise ValueError(
          f'{argument}: the model {inner.name!r} has no single last hidden'
          f' layer: its output combines {len(outputs)} tensors.{advice}'
      )
    call = keras_graph.producer(outputs[0])
    layer = call.layer
    if isinstance(layer, keras.Model) and layer.weights:
      inner, outputs = layer, getattr(layer, 'outputs', None)
    # Operations other than layers have no weights.
    elif getattr(layer, 'weights', None) or not call.inputs:
      break
    else:
      outputs = call.inputs
  if {id(v) for v in model.weights} == {id(v) for v in layer.weights}:
    raise ValueError(
        f'{argument}: the model {model.name!r} has no hidden layer, only'
        f' {layer.name!r} has weights.'
    )
  return layer
