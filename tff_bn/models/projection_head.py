"""MOON's projection head.

Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021, section 3.3.
"""

import keras

from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import keras_graph
from tff_bn.keras_model import layer_features


def add_projection_head(model: keras.Model, units: int) -> keras.Model:
  """Copies a model and puts a projection head before its last layer.

  The head is a dense layer with as many units as there are features, ReLU, and
  a dense layer with `units` units. Its output is the input of the last layer,
  and so by default the features that MOON contrasts.

  The copy keeps names and the weights of all layers but the last one, which
  gets new ones for its new input.

  Args:
    model: A functional or `Sequential` Keras model, whose last layer with
      weights has an input of the shape `[batch, features]`.
    units: The number of projected features.

  Returns:
    The new functional model.

  Raises:
    ValueError: If the model is not functional, has no hidden layer, or its last
      layer has another kind of input.
  """
  if not keras_copy.is_functional(model) or not keras_copy.is_connected(model):
    raise ValueError(
        f'the model {model.name!r} is not a functional model with inputs. Build'
        ' it as keras.Model(inputs, outputs).'
    )
  last = layer_features.layer_after_features(model, 'projection head')
  copy = _CopyWithHead(last, units)
  new_model = copy.layer(model)
  copy.set_state(model)
  return new_model


class _CopyWithHead(keras_copy.PlainCopy):
  """Copies layers and puts a projection head before one of them."""

  def __init__(self, last: keras.Layer, units: int):
    super().__init__()
    self._last = last
    self._units = units
    self._is_added = False

  def _new_functional(self, model: keras.Model) -> keras.Model:
    tensors = keras_copy.new_inputs(model)
    for call in keras_graph.calls(model):
      arguments = tensors
      if call.layer is self._last:
        features = call.inputs[0]
        arguments = {id(features): self._project(tensors[id(features)])}
      outputs = call.repeat(self.layer(call.layer), arguments)
      for old, new in zip(call.outputs, outputs, strict=True):
        tensors[id(old)] = new
    return keras.Model(*keras_copy.new_ends(model, tensors), name=model.name)

  def _project(self, features: keras.KerasTensor) -> keras.KerasTensor:
    if len(features.shape) != 2:
      raise ValueError(
          f'the input of the last layer {self._last.name!r} has the shape'
          f' {features.shape[1:]} for each sample; a projection head needs a'
          ' vector of features.'
      )
    if self._is_added:
      raise ValueError(
          f'the last layer {self._last.name!r} is called several times; a'
          ' projection head needs one call.'
      )
    self._is_added = True
    layers = keras.layers
    x = layers.Dense(features.shape[1], name='projection_hidden')(features)
    x = layers.ReLU(name='projection_relu')(x)
    return layers.Dense(self._units, name='projection')(x)

  def set_state(self, layer: keras.Layer) -> None:
    """See the base class; the last layer keeps its new weights."""
    if layer is not self._last:
      super().set_state(layer)
