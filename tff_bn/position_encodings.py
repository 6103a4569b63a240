"""Puts position encodings into existing Keras models.

Li, Xu, Song, Li, Wang, Shao, Federated Learning with Position-Aware Neurons,
CVPR 2022.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import tensorflow as tf

from tff_bn import convert
from tff_bn import keras_graph
from tff_bn.layers import discovery
from tff_bn.layers.position_encoding import PositionEncoding

_layers = tf.keras.layers
# Layers whose outputs are units or channels with weights of their own.
_WITH_UNITS = (
    _layers.Dense,
    _layers.Conv1D,
    _layers.Conv2D,
    _layers.Conv3D,
    _layers.SeparableConv1D,
    _layers.SeparableConv2D,
    _layers.DepthwiseConv1D,
    _layers.DepthwiseConv2D,
)
_NORMALIZATIONS = (
    *discovery.BATCH_NORM_CLASSES,
    _layers.GroupNormalization,
    _layers.LayerNormalization,
    _layers.UnitNormalization,
)


def add_position_encodings(
    model: tf.keras.Model,
    mode: str = 'add',
    amplitude: Optional[float] = None,
    period: float = 1.0,
    offset: float = 0.0,
    personal_share: float = 0.0,
) -> tf.keras.Model:
  """Copies a model, with a position encoding in each hidden layer.

  A hidden layer is a dense or convolutional layer that another one comes after.
  Its encoding comes after its normalization, where it has one, and before its
  activation; of a layer with `activation=...`, the activation becomes a layer
  of its own. The branches of a residual block are encoded before they are
  added. Nested models are searched; a layer that is called several times has
  one encoding.

  Weights, names, `trainable` flags and dtype policies are kept. The given model
  stays as it is; the weights of the new one are copies.

  Example:
  ```
  position_aware = tff_bn.add_position_encodings(model, 'multiply')
  ```

  Args:
    model: A functional or `Sequential` Keras model.
    mode: `'add'` or `'multiply'`, see `tff_bn.layers.PositionEncoding`.
    amplitude: A. Default: 0.05 to add, 0.1 to multiply.
    period: T.
    offset: By how many units the encodings are moved.
    personal_share: The share of the units of each hidden layer, the last ones,
      whose encodings are a client's own in federated learning, see
      `tff_bn.layers.PositionEncoding`.

  Returns:
    The new model, a functional one. It is not compiled.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If an argument is not allowed; or the model is no functional
      one, or has no hidden layer.
  """
  if not isinstance(model, tf.keras.Model):
    raise TypeError(
        f'model must be a tf.keras.Model, but is a {type(model).__name__}.'
    )
  settings = dict(
      mode=mode,
      amplitude=amplitude,
      period=period,
      offset=offset,
      personal_share=personal_share,
  )
  # Raises an error if an argument is not allowed.
  PositionEncoding(**settings)
  if not convert.is_functional(model) or not getattr(model, 'outputs', None):
    raise ValueError(
        f'The model {model.name!r} is no functional model that is connected to'
        ' an input, so its hidden layers can not be found. Build it as'
        ' tf.keras.Model(inputs, outputs), or call'
        ' tff_bn.layers.PositionEncoding in it.'
    )
  copy = _CopyWithEncodings(settings)
  new_model = copy.layer(model)
  if not copy.encoded:
    raise ValueError(
        f'The model {model.name!r} has no hidden layer: no dense or'
        ' convolutional layer that another one comes after.'
    )
  copy.set_state(model)
  return new_model


class _CopyWithEncodings(convert.Copy):
  """Copies layers; functional models get encodings.

  Attributes:
    encoded: The encodings, by the `id` of the layer whose units they are for.
  """

  def __init__(self, settings: dict[str, Any]):
    super().__init__()
    self._settings = settings
    self.encoded: dict[int, PositionEncoding] = {}
    self._activations: dict[int, tf.keras.layers.Layer] = {}
    # By `id`: hidden layers, and nested models before such layers.
    self._before_units: set[int] = set()

  def _new(self, layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    if convert.is_functional(layer):
      return self._new_functional(layer)
    config = layer.get_config()
    if self._fused_activation(layer) is not None:
      config['activation'] = 'linear'
    return type(layer).from_config(config)

  def _fused_activation(self, layer: tf.keras.layers.Layer) -> Optional[Any]:
    """The activation of a hidden layer, if it is no layer of its own."""
    if not self._is_hidden(layer):
      return None
    activation = getattr(layer, 'activation', None)
    is_linear = activation in (None, tf.keras.activations.linear)
    return None if is_linear else activation

  def _is_hidden(self, layer: tf.keras.layers.Layer) -> bool:
    return isinstance(layer, _WITH_UNITS) and id(layer) in self._before_units

  def _new_functional(self, model: tf.keras.Model) -> tf.keras.Model:
    nodes = keras_graph.calls(model)
    followers = collections.defaultdict(list)
    for node in nodes:
      for tensor in node.keras_inputs:
        followers[id(tensor.node)].append(node)
    self._find_hidden_layers(model, nodes, followers)
    # Nodes of normalizations after which a layer's encoding comes.
    normalized = {}
    for node in nodes:
      after = followers[id(node)]
      if (
          self._is_hidden(node.layer)
          and self._fused_activation(node.layer) is None
          and len(after) == 1
          and isinstance(after[0].layer, _NORMALIZATIONS)
      ):
        normalized[id(after[0])] = node.layer
    encoded_later = {id(layer) for layer in normalized.values()}
    tensors = {id(tensor): _new_input(tensor) for tensor in model.inputs}

    def copied(value):
      # Arguments can be other things than tensors of the model.
      return tensors.get(id(value), value)

    for node in nodes:
      outputs = self.layer(node.layer)(
          *tf.nest.map_structure(copied, node.call_args),
          **tf.nest.map_structure(copied, node.call_kwargs),
      )
      has_own = (
          self._is_hidden(node.layer) and id(node.layer) not in encoded_later
      )
      encoded = node.layer if has_own else normalized.get(id(node))
      if encoded is not None:
        outputs = self._encoding(encoded)(outputs)
      if self._fused_activation(node.layer) is not None:
        outputs = self._activation(node.layer)(outputs)
      for old, new in zip(
          tf.nest.flatten(node.outputs), tf.nest.flatten(outputs), strict=True
      ):
        tensors[id(old)] = new
    return tf.keras.Model(
        *(
            tf.nest.map_structure(copied, x[0] if len(x) == 1 else x)
            for x in (model.inputs, model.outputs)
        ),
        name=model.name,
    )

  def _find_hidden_layers(
      self,
      model: tf.keras.Model,
      nodes: Sequence[Any],
      followers: Mapping[int, Sequence[Any]],
  ) -> None:
    """Finds layers and nested models that others with units come after."""
    outputs = {id(tensor.node) for tensor in model.outputs}
    before_units = {}
    for node in reversed(nodes):
      before_units[id(node)] = (
          id(node) in outputs and id(model) in self._before_units
      ) or any(
          before_units[id(other)] or _has_units(other.layer)
          for other in followers[id(node)]
      )
      if before_units[id(node)]:
        self._before_units.add(id(node.layer))

  def _encoding(self, layer: tf.keras.layers.Layer) -> PositionEncoding:
    if id(layer) not in self.encoded:
      channels_first = getattr(layer, 'data_format', None) == 'channels_first'
      self.encoded[id(layer)] = PositionEncoding(
          **self._settings,
          axis=1 if channels_first else -1,
          name=f'{layer.name}_position',
          dtype=layer.dtype_policy,
      )
    return self.encoded[id(layer)]

  def _activation(
      self, layer: tf.keras.layers.Layer
  ) -> tf.keras.layers.Activation:
    if id(layer) not in self._activations:
      self._activations[id(layer)] = tf.keras.layers.Activation(
          layer.activation,
          name=f'{layer.name}_activation',
          dtype=layer.dtype_policy,
      )
    return self._activations[id(layer)]


def _has_units(layer: tf.keras.layers.Layer) -> bool:
  return any(isinstance(x, _WITH_UNITS) for x in (layer, *layer.submodules))


def _new_input(tensor: Any) -> Any:
  return tf.keras.Input(
      tensor.shape[1:], tensor.shape[0], tensor.node.layer.name, tensor.dtype
  )
