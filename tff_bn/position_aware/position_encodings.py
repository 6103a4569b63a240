"""Adds position encodings to existing Keras models.

Li, Xu, Song, Li, Wang, Shao, Federated Learning with Position-Aware Neurons,
CVPR 2022.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, Optional

import keras

from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import keras_graph
from tff_bn.layers import discovery
from tff_bn.layers.position_encoding import PositionEncoding
from tff_bn.layers.static_batch_normalization import StaticBatchNormalization

_layers = keras.layers
# Layers whose outputs are units or channels with their own weights.
_WITH_UNITS = (
    _layers.Dense,
    _layers.Conv1D,
    _layers.Conv2D,
    _layers.Conv3D,
    _layers.SeparableConv1D,
    _layers.SeparableConv2D,
    _layers.DepthwiseConv1D,
    _layers.DepthwiseConv2D,
    _layers.Conv1DTranspose,
    _layers.Conv2DTranspose,
    _layers.Conv3DTranspose,
)
_NORMALIZATIONS = (
    *discovery.BATCH_NORM_CLASSES,
    StaticBatchNormalization,
    _layers.GroupNormalization,
    _layers.LayerNormalization,
    _layers.RMSNormalization,
    _layers.UnitNormalization,
)


def add_position_encodings(
    model: keras.Model,
    mode: str = 'add',
    amplitude: Optional[float] = None,
    period: float = 1.0,
    offset: float = 0.0,
    personal_share: float = 0.0,
) -> keras.Model:
  """Copies a model and adds a position encoding to each hidden layer.

  A hidden layer is a dense or convolutional layer that another one follows.
  Its encoding comes after its normalization, if there is one, and before its
  activation. The activation of a layer with `activation=...` becomes a separate
  layer. The branches of a residual block are encoded before the addition.
  Nested models are searched. A layer that is called several times has one
  encoding.

  The copy keeps weights, names, `trainable` flags and dtype policies. The given
  model doesn't change.

  Example:
  ```
  position_aware = tff_bn.add_position_encodings(model, 'multiply')
  ```

  Args:
    model: A functional or `Sequential` Keras model.
    mode: `'add'` or `'multiply'`, see `tff_bn.layers.PositionEncoding`.
    amplitude: The amplitude A. Default: 0.05 for `'add'`, 0.1 for `'multiply'`.
    period: The period T.
    offset: The shift of the encodings in units.
    personal_share: The share of units at the end of each hidden layer whose
      encodings are personal in federated learning, see
      `tff_bn.layers.PositionEncoding`.

  Returns:
    The new functional model. It is not compiled.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If an argument is not allowed, or the model is not functional or
      has no hidden layer.
  """
  if not isinstance(model, keras.Model):
    raise TypeError(
        f'model must be a keras.Model, but is a {type(model).__name__}.'
    )
  new_encoding = functools.partial(
      PositionEncoding,
      mode=mode,
      amplitude=amplitude,
      period=period,
      offset=offset,
      personal_share=personal_share,
  )
  new_encoding()  # Raises an error if an argument is not allowed.
  if not keras_copy.is_functional(model) or not getattr(model, 'outputs', None):
    raise ValueError(
        f'The model {model.name!r} is not a functional model with inputs, so'
        ' its hidden layers cannot be found. Build it as keras.Model(inputs,'
        ' outputs), or call tff_bn.layers.PositionEncoding in it.'
    )
  copy = _CopyWithEncodings(new_encoding)
  new_model = copy.layer(model)
  if not copy.encoded:
    raise ValueError(
        f'The model {model.name!r} has no hidden layer: no dense or'
        ' convolutional layer that another one follows.'
    )
  copy.set_state(model)
  return new_model


class _CopyWithEncodings(keras_copy.Copy):
  """Copies layers and adds encodings to functional models.

  Attributes:
    encoded: The encoding of each hidden layer, by the layer's `id`.
  """

  def __init__(self, new_encoding: Callable[..., PositionEncoding]):
    super().__init__()
    self._new_encoding = new_encoding
    self.encoded: dict[int, PositionEncoding] = {}
    self._activations: dict[int, keras.Layer] = {}
    # The `id`s of layers and nested models that layers with units follow.
    self._before_units: set[int] = set()

  def _new(self, layer: keras.Layer) -> keras.Layer:
    if keras_copy.is_functional(layer):
      return self._new_functional(layer)
    if self._fused_activation(layer) is not None:
      return type(layer).from_config(
          {**keras_copy.get_config(layer), 'activation': 'linear'}
      )
    return keras_copy.same_from_config(layer)

  def _fused_activation(self, layer: keras.Layer) -> Optional[Any]:
    """Returns the `activation` of a hidden layer, None if it is linear."""
    if not self._is_hidden(layer):
      return None
    activation = getattr(layer, 'activation', None)
    is_linear = activation in (None, keras.activations.linear)
    return None if is_linear else activation

  def _is_hidden(self, layer: keras.Layer) -> bool:
    return isinstance(layer, _WITH_UNITS) and id(layer) in self._before_units

  def _new_functional(self, model: keras.Model) -> keras.Model:
    calls = keras_graph.calls(model)
    # By the `id` of a tensor: the calls that take it.
    followers = collections.defaultdict(list)
    for call in calls:
      for tensor_id in {id(tensor) for tensor in call.inputs}:
        followers[tensor_id].append(call)
    self._find_hidden_layers(model, calls, followers)
    # By the `id` of a normalization's call: the hidden layer before it.
    normalized = {}
    for call in calls:
      after = [x for tensor in call.outputs for x in followers[id(tensor)]]
      if (
          self._is_hidden(call.layer)
          and self._fused_activation(call.layer) is None
          and len(after) == 1
          and isinstance(after[0].layer, _NORMALIZATIONS)
      ):
        normalized[id(after[0])] = call.layer
    encoded_later = {id(layer) for layer in normalized.values()}
    tensors = keras_copy.new_inputs(model)
    for call in calls:
      outputs = call.repeat(self.layer(call.layer), tensors)
      encoded = normalized.get(id(call))
      if self._is_hidden(call.layer) and id(call.layer) not in encoded_later:
        encoded = call.layer
      if encoded is not None:
        outputs = [self._encoding(encoded)(x) for x in outputs]
      if self._fused_activation(call.layer) is not None:
        outputs = [self._activation(call.layer)(x) for x in outputs]
      for old, new in zip(call.outputs, outputs, strict=True):
        tensors[id(old)] = new
    return keras.Model(*keras_copy.new_ends(model, tensors), name=model.name)

  def _find_hidden_layers(
      self,
      model: keras.Model,
      calls: Sequence[keras_graph.Call],
      followers: Mapping[int, Sequence[keras_graph.Call]],
  ) -> None:
    """Finds layers and nested models that layers with units follow."""
    ends = {id(tensor) for tensor in model.outputs}
    # By the `id` of a call.
    before_units: dict[int, bool] = {}
    for call in reversed(calls):
      outputs = {id(tensor) for tensor in call.outputs}
      before_units[id(call)] = (
          bool(outputs & ends) and id(model) in self._before_units
      ) or any(
          before_units[id(other)] or _has_units(other.layer)
          for output in outputs
          for other in followers[output]
      )
      if before_units[id(call)]:
        self._before_units.add(id(call.layer))

  def _encoding(self, layer: keras.Layer) -> PositionEncoding:
    if id(layer) not in self.encoded:
      channels_first = getattr(layer, 'data_format', None) == 'channels_first'
      self.encoded[id(layer)] = self._new_encoding(
          axis=1 if channels_first else -1,
          name=f'{layer.name}_position',
          dtype=layer.dtype_policy,
      )
    return self.encoded[id(layer)]

  def _activation(self, layer: keras.Layer) -> keras.layers.Activation:
    if id(layer) not in self._activations:
      self._activations[id(layer)] = keras.layers.Activation(
          layer.activation,
          name=f'{layer.name}_activation',
          dtype=layer.dtype_policy,
      )
    return self._activations[id(layer)]


def _has_units(layer: Any) -> bool:
  return isinstance(layer, keras.Layer) and any(
      isinstance(x, _WITH_UNITS) for x in discovery.all_layers(layer)
  )
