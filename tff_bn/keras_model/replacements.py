"""Layers that replace batch normalization layers."""

from collections.abc import Mapping
import dataclasses
import inspect
import math
from typing import Any, Optional

import keras

from tff_bn.common import checks
from tff_bn.common import spelling
from tff_bn.layers import batch_renormalization
from tff_bn.layers import discovery
from tff_bn.layers import federated_batch_normalization
from tff_bn.layers import hybrid_batch_normalization

_BATCH = keras.layers.BatchNormalization
_FEDERATED = federated_batch_normalization.FederatedBatchNormalization
_HYBRID = hybrid_batch_normalization.HybridBatchNormalization
_RENORM = batch_renormalization.BatchRenormalization
_KNOWN_CLASSES = (_FEDERATED, _HYBRID, _RENORM, *discovery.BATCH_NORM_CLASSES)
# The arguments that only `BatchRenormalization` has.
_RENORM_CONFIG = ('r_max', 'd_max')
# The arguments of all layers.
_LAYER_CONFIG = frozenset(['name', 'trainable', 'dtype'])
# A subclass with other methods or more arguments is not plain batch
# normalization.
_HARMLESS_METHODS = frozenset(['__init__', 'get_config', 'from_config'])
_CONFIG = _LAYER_CONFIG.union(inspect.signature(_BATCH).parameters)
_STATISTICS = ('moving_mean', 'moving_variance')
# Of the paper of group normalization, and of Keras.
_DEFAULT_GROUPS = 32
# As in Keras: as many groups as channels.
_INSTANCE = -1
_ADJUST_ADVICE = (
    'adjust_groups=True for the greatest common divisor of groups and channels'
)


@dataclasses.dataclass(frozen=True)
class Target:
  """What replaces a batch normalization layer.

  Attributes:
    layer_class: The class of the new layers.
    arguments: The arguments that all new layers get. The others come from the
      layers that they replace.
  """

  layer_class: type[keras.Layer]
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def is_batch_norm(self) -> bool:
    """Whether the new layers are batch normalization layers, too."""
    return issubclass(self.layer_class, _BATCH)

  def is_specific(self, variable: keras.Variable) -> bool:
    """Whether only one class of layers has a variable of a layer."""
    names = ['mixing']
    if not self.is_batch_norm:
      names.extend(_STATISTICS)
    return variable.name in names

  def new(self, layer: keras.layers.BatchNormalization) -> keras.Layer:
    """Makes the replacement of a layer; raises a `ValueError` if impossible."""
    _check_plain(layer)
    config = layer.get_config()
    config['synchronized'] = False
    config.update(self.arguments)
    config.update(self._arguments_for(layer))
    return self.layer_class.from_config(
        {key: config[key] for key in config if key in self._parameters()}
    )

  def _arguments_for(self, layer: keras.Layer) -> dict[str, Any]:
    """Returns more arguments of a layer's replacement."""
    del layer
    return {}

  def _parameters(self) -> frozenset[str]:
    own = inspect.signature(self.layer_class).parameters
    inherited = _CONFIG if self.is_batch_norm else _LAYER_CONFIG
    return inherited.union(own)


class _LayerTarget(Target):
  """Layer normalization over the channels."""

  def _arguments_for(self, layer: keras.Layer) -> dict[str, Any]:
    if _num_channels(layer) == 1:
      raise ValueError(
          f'{_described(layer)} has a single channel, so the output of layer'
          ' normalization would not depend on the input; use'
          " to='group' with groups=1."
      )
    return {}


@dataclasses.dataclass(frozen=True)
class _GroupTarget(Target):
  """Group normalization.

  Attributes:
    groups: The number of groups, or -1.
    is_adjusted: Whether to use the greatest common divisor of the numbers of
      groups and channels.
    advice: A part of messages: which numbers of groups are possible.
  """

  groups: int = _DEFAULT_GROUPS
  is_adjusted: bool = False
  advice: str = ''

  def _arguments_for(self, layer: keras.Layer) -> dict[str, Any]:
    channels = _num_channels(layer)
    groups = self.groups
    if channels is None:
      if self.is_adjusted:
        raise ValueError(
            f'{_described(layer)} is not built, so its number of channels is'
            ' unknown, which adjust_groups=True needs. Build the model before.'
        )
      return {'groups': groups}  # Keras checks it.
    if groups == _INSTANCE:
      groups = channels
    elif self.is_adjusted:
      groups = math.gcd(groups, channels)
    if channels % groups:
      raise ValueError(
          f'groups={groups} does not divide the {channels} channels of'
          f' {_described(layer, "the")}; use {self.advice}{_ADJUST_ADVICE}.'
      )
    # Without other axes, each group would be a single number.
    if groups == channels and getattr(layer.input_spec, 'ndim', None) == 2:
      raise ValueError(
          f'{_described(layer)} has {channels} channels and its input no other'
          f' axis, so with {groups} groups each group is a single number, and'
          ' the output would not depend on the input; use fewer groups.'
      )
    return {'groups': groups}


TARGETS = {
    'federated': Target(_FEDERATED),
    'batch': Target(_BATCH),
    'synchronized': Target(_BATCH, {'synchronized': True}),
    'hybrid': Target(_HYBRID),
    'batch_renorm': Target(_RENORM),
    'frozen': Target(_BATCH, {'trainable': False}),
    'layer': _LayerTarget(keras.layers.LayerNormalization),
    'group': _GroupTarget(keras.layers.GroupNormalization),
}


def find_target(
    to: Any, groups: Optional[int], adjust_groups: bool, model: keras.Model
) -> Target:
  """Returns the target of `convert_batch_norm`, after a check of all arguments.

  See there.
  """
  if to not in TARGETS:
    raise ValueError(
        f'to={to!r} is unknown; use one of {", ".join(map(repr, TARGETS))}.'
        + spelling.suggestion(str(to), TARGETS)
    )
  if to == 'synchronized' and keras.backend.backend() != 'tensorflow':
    raise ValueError(
        f'to={to!r} needs the TensorFlow backend of Keras, but the backend is'
        f" {keras.backend.backend()!r}. Use 'batch'."
    )
  checks.check_type('adjust_groups', adjust_groups, bool, 'be True or False')
  if groups is not None:
    checks.check_integer('groups', groups)
    if groups < 1 and groups != _INSTANCE:
      raise ValueError(
          f'groups={groups} must be a positive number, or {_INSTANCE} for as'
          ' many groups as channels.'
      )
  checks.check_type('model', model, keras.Model, 'be a keras.Model')
  target = TARGETS[to]
  if isinstance(target, _GroupTarget):
    return dataclasses.replace(
        target,
        groups=_DEFAULT_GROUPS if groups is None else int(groups),
        is_adjusted=adjust_groups,
        advice=_divisor_advice(model),
    )
  if groups is not None or adjust_groups:
    name = 'groups' if groups is not None else 'adjust_groups'
    raise ValueError(
        f"{name} has an effect with to='group' only, but to={to!r}."
    )
  return target


def _divisor_advice(model: keras.Model) -> str:
  """Names a number of groups that divides the channels of all layers."""
  channels = map(_num_channels, discovery.batch_norm_layers(model))
  divisor = math.gcd(*filter(None, channels))
  if divisor < 2:
    return ''
  return f'a divisor of the channels of every layer, such as {divisor}, or '


def _num_channels(layer: keras.layers.BatchNormalization) -> Optional[int]:
  """Returns the number of channels; `None` before the layer is built."""
  return layer.moving_mean.shape[0] if layer.built else None


def _check_plain(layer: keras.layers.BatchNormalization) -> None:
  """Raises a `ValueError` if a layer is not plain batch normalization."""
  name = _described(layer)
  instead = 'Use keras.layers.BatchNormalization.'
  if getattr(layer, 'renorm', False):
    raise ValueError(
        f'{name} has renorm=True, so it cannot be converted. Use'
        ' keras.layers.BatchNormalization without it.'
    )
  for parent in type(layer).__mro__:
    if parent in _KNOWN_CLASSES:
      break
    own = sorted(
        key
        for key, value in vars(parent).items()
        if (callable(value) or isinstance(value, (property, staticmethod)))
        and key not in _HARMLESS_METHODS
    )
    if own:
      raise ValueError(
          f'{name} is a {type(layer).__name__}, whose method {own[0]} may'
          f' change the computation, so it cannot be converted. {instead}'
      )
  known = _CONFIG
  if isinstance(layer, _RENORM):
    known = known.union(_RENORM_CONFIG)
  config = layer.get_config()
  added = sorted(config.keys() - known)
  if added:
    raise ValueError(
        f'{name} is a {type(layer).__name__} with the additional argument'
        f' {added[0]}={config[added[0]]!r}, so it cannot be converted.'
        f' {instead}'
    )


def _described(layer: keras.Layer, article: str = 'The') -> str:
  return f'{article} batch normalization layer {layer.name!r}'
