"""Replaces the batch normalization layers of existing Keras models."""

import abc
import copy as copy_lib
import inspect
import tempfile
from typing import Any

import keras
from keras import ops
from keras import tree
from keras.src.models import functional as keras_functional

from tff_bn.common import spelling
from tff_bn.keras_model import keras_graph
from tff_bn.layers import discovery
from tff_bn.layers import federated_batch_normalization

_FEDERATED = federated_batch_normalization.FederatedBatchNormalization
# The class for each value of `to`, and the value of its argument
# `synchronized`.
_TARGETS = {
    'federated': (_FEDERATED, False),
    'batch': (keras.layers.BatchNormalization, False),
    'synchronized': (keras.layers.BatchNormalization, True),
}
_KNOWN_CLASSES = (_FEDERATED, *discovery.BATCH_NORM_CLASSES)
# A subclass that has more methods than these, or a longer configuration, is a
# layer of another kind.
_HARMLESS_METHODS = frozenset(['__init__', 'get_config', 'from_config'])
_CONFIG = frozenset(
    ['name', 'trainable', 'dtype']
    + list(inspect.signature(keras.layers.BatchNormalization).parameters)
)

# Keras has no public name for the class of functional models.
_Functional = keras_functional.Functional


def convert_batch_norm(
    model: keras.Model, to: str = 'federated'
) -> keras.Model:
  """Copies a model, with all batch normalization layers of another class.

  Architecture, names, weights, `trainable` flags and dtype policies are kept.
  Nested models, shared layers, and layers in wrappers such as
  `keras.layers.TimeDistributed` are converted, too. The given model stays as
  it is; the weights of the new one are copies.

  Layers and models of your own classes may contain batch normalization layers
  as attributes, or in lists, tuples and dictionaries. Their class must create
  them in `__init__` and must have a configuration (`get_config`), as for saving
  the model.

  The new model is not compiled.

  Example:
  ```
  model = keras.applications.ResNet50(weights=None, classes=10)
  federated = tff_bn.convert_batch_norm(model)
  federated.compile('sgd', 'sparse_categorical_crossentropy')
  ...
  model = tff_bn.convert_batch_norm(federated, to='batch')
  ```

  Args:
    model: A Keras model.
    to: `'federated'` for `tff_bn.layers.FederatedBatchNormalization`,
      `'batch'` for `keras.layers.BatchNormalization`, or `'synchronized'` for
      `keras.layers.BatchNormalization(synchronized=True)`, whose replicas in a
      `tf.distribute` strategy share their batch statistics. The last one needs
      the TensorFlow backend.

  Returns:
    The new model.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If `to` is unknown, the model has no batch normalization, or
      it, or a layer of it, can't be converted. The message names the layer and
      says what to do.
  """
  if to not in _TARGETS:
    raise ValueError(
        f'to={to!r} is unknown; use one of {", ".join(map(repr, _TARGETS))}.'
        + spelling.suggestion(str(to), _TARGETS)
    )
  if to == 'synchronized' and keras.backend.backend() != 'tensorflow':
    raise ValueError(
        f'to={to!r} needs the TensorFlow backend of Keras, but the backend is'
        f" {keras.backend.backend()!r}. Use 'batch'."
    )
  if not isinstance(model, keras.Model):
    raise TypeError(
        f'model must be a keras.Model, but is a {type(model).__name__}.'
    )
  if not discovery.batch_norm_layers(model):
    raise ValueError(
        f'The model {model.name!r} has no batch normalization layer to convert.'
    )
  copy = _Conversion(*_TARGETS[to])
  new_model = copy.layer(model)
  if model.built and not is_functional(model):
    _build(new_model, model.get_build_config())
  copy.check()
  if len(new_model.weights) < len(model.weights):
    if is_functional(model) and not _is_connected(model):
      raise ValueError(
          f'The model {model.name!r} has been called, but is not connected to'
          ' an input, so its copy cannot be built. Begin it with a keras.Input,'
          ' or build it as a functional model, keras.Model(inputs, outputs).'
      )
    raise ValueError(
        f'The model {model.name!r} has {len(model.weights)} weights, but its'
        f' copy {len(new_model.weights)}, because Keras could not build all'
        ' layers of the copy. A layer of your own class must make the layers'
        ' inside in its `__init__` and call them as its attributes.'
    )
  copy.set_state(model)
  if len(new_model.weights) != len(model.weights):
    raise ValueError(
        f'The model {model.name!r} has {len(model.weights)} weights, but its'
        f' copy {len(new_model.weights)}, because layers that are copied one'
        ' by one share weights. Build the model with the layers that you want.'
    )
  return new_model


def is_functional(layer: keras.Layer) -> bool:
  """Whether a layer is a functional or `Sequential` model.

  Args:
    layer: The layer.

  Returns:
    `False` for other layers and for models with a `call` of their own.
  """
  return isinstance(layer, (_Functional, keras.Sequential)) and type(
      layer
  ).call in (_Functional.call, keras.Sequential.call)


class Copy(abc.ABC):
  """Copies layers; the same layer becomes the same copy wherever it is met."""

  def __init__(self):
    # By `id`; the layers are kept, so that no other one gets it.
    self._copies: dict[int, tuple[Any, Any]] = {}

  def layer(self, layer: keras.Layer) -> keras.Layer:
    """Returns the copy of a layer or model, without its weights.

    Args:
      layer: A layer or model, or another `keras.Operation`.

    Returns:
      The copy.
    """
    if id(layer) not in self._copies:
      is_layer = isinstance(layer, keras.Layer)
      new = self._new(layer) if is_layer else _copy_operation(layer)
      self._copies[id(layer)] = layer, new
    return self._copies[id(layer)][1]

  @abc.abstractmethod
  def _new(self, layer: keras.Layer) -> keras.Layer:
    """Makes the copy of a layer or model, without its weights."""

  def _new_functional(self, model: keras.Model) -> keras.Model:
    """Makes the copy of a functional or `Sequential` model."""
    if isinstance(model, keras.Sequential):
      return self._new_sequential(model, _is_connected(model))
    tensors = new_inputs(model)
    for call in keras_graph.calls(model):
      outputs = call.repeat(self.layer(call.layer), tensors)
      for old, new in zip(call.outputs, outputs, strict=True):
        tensors[id(old)] = new
    model_class = type(model)
    if not keras_functional.functional_like_constructor(model_class):
      # Its constructor takes no inputs and outputs.
      model_class = keras.Model
    return model_class(*new_ends(model, tensors), name=model.name)

  def _new_sequential(
      self, model: keras.Sequential, is_connected: bool
  ) -> keras.Sequential:
    layers = [self.layer(layer) for layer in model.layers]
    if is_connected:
      layers.insert(0, _new_input_layer(model.inputs[0]))
    has_own_constructor = type(model).__init__ is not keras.Sequential.__init__
    model_class = keras.Sequential if has_own_constructor else type(model)
    return model_class(layers, name=model.name)

  def set_state(self, layer: keras.Layer) -> None:
    """Gives the copy of a layer, and the copies of all inside, its state.

    Args:
      layer: The layer, whose copy has been built.
    """
    copy = self._copies[id(layer)][1]
    # Sets all layers inside, which then get their own flags.
    copy.trainable = layer.trainable
    if is_functional(layer):
      for child in layer.layers:
        # Input layers are made with the model.
        if not isinstance(child, keras.layers.InputLayer):
          self.set_state(child)
      return
    _set_state_inside(layer, copy)


class PlainCopy(Copy):
  """Copies layers as they are."""

  def _new(self, layer: keras.Layer) -> keras.Layer:
    if is_functional(layer):
      return self._new_functional(layer)
    return from_config(layer)


class _Conversion(Copy):
  """Copies layers; those of batch normalization become others."""

  def __init__(
      self, batch_norm_class: type[keras.Layer], is_synchronized: bool
  ):
    super().__init__()
    self._batch_norm_class = batch_norm_class
    self._is_synchronized = is_synchronized
    # Batch normalization layers that have been replaced before they were built,
    # and the layers that had made them.
    self._replaced: list[tuple[keras.Layer, keras.Layer]] = []

  def check(self) -> None:
    """Checks that no layer uses a layer that has been replaced.

    Raises:
      ValueError: If one does. The message names it.
    """
    for layer, parent in self._replaced:
      if layer.built:
        raise ValueError(_own_norm_error(parent, layer))

  def _new(self, layer: keras.Layer) -> keras.Layer:
    if discovery.is_batch_norm(layer):
      return self._new_batch_norm(layer)
    if is_functional(layer):
      return self._new_functional(layer)
    inside = discovery.batch_norm_layers(layer)
    if not inside:
      return from_config(layer)
    if isinstance(layer, keras.layers.Wrapper) and set(inside) <= set(
        discovery.batch_norm_layers(layer.layer)
    ):
      config = layer.get_config()
      del config['layer']
      return type(layer)(self.layer(layer.layer), **config)
    try:
      copy = from_config(layer)
    except (NotImplementedError, TypeError) as error:
      kind = type(layer).__name__
      raise ValueError(
          f'The {_noun(layer)} {layer.name!r} ({kind}), with the batch'
          f' normalization layer {inside[0].name!r}, cannot be copied from its'
          f' configuration. Give {kind} a `get_config` with the arguments of'
          ' its `__init__`, or build a functional model,'
          ' keras.Model(inputs, outputs).'
      ) from error
    self._replace_inside(layer, copy)
    converted = {id(new) for _, new in self._copies.values()}
    found = {id(norm) for norm in discovery.batch_norm_layers(copy)}
    if len(found) != len(inside) or not found <= converted:
      raise ValueError(_own_norm_error(layer, inside[0]))
    return copy

  def _replace_inside(self, layer: keras.Layer, copy: keras.Layer) -> None:
    """Replaces batch normalization layers that a layer has as attributes.

    Args:
      layer: The layer.
      copy: A copy of it, with the layers that its constructor has made.
    """
    # PyTorch keeps modules apart from other attributes.
    names = [*vars(layer), *vars(layer).get('_modules', ())]
    for name in names:
      old, new = (getattr(x, name, None) for x in (layer, copy))
      replacement = self._replacement(old, new, copy)
      if replacement is not new:
        setattr(copy, name, replacement)

  def _replacement(self, old: Any, new: Any, parent: keras.Layer) -> Any:
    """Finds what takes the place of a value in a copy.

    Args:
      old: A value in the original layer.
      new: The corresponding value in the copy. A list or dictionary is changed
        in place.
      parent: The copy.

    Returns:
      The value to use in the copy.
    """
    if isinstance(old, keras.Layer):
      if not discovery.batch_norm_layers(old):
        return new
      if not isinstance(new, keras.Layer):
        raise ValueError(
            _own_norm_error(parent, discovery.batch_norm_layers(old)[0])
        )
      return self._replacement_of_layer(old, new, parent)
    if type(old) is not type(new):
      return new
    # Keras wraps the lists and dictionaries in which it finds layers.
    if isinstance(old, list) and hasattr(old, 'tracker'):
      for i, values in enumerate(zip(old, new)):
        new[i] = self._replacement(*values, parent)
    elif isinstance(old, dict) and hasattr(old, 'tracker'):
      for key in old.keys() & new.keys():
        new[key] = self._replacement(old[key], new[key], parent)
    elif isinstance(old, tuple):
      values = [self._replacement(*x, parent) for x in zip(old, new)]
      if any(x is not y for x, y in zip(values, new)):
        is_named = hasattr(old, '_fields')
        return type(new)(*values) if is_named else type(new)(values)
    return new

  def _replacement_of_layer(
      self, old: keras.Layer, new: keras.Layer, parent: keras.Layer
  ) -> keras.Layer:
    if (
        id(old) not in self._copies
        and type(old) is type(new)
        and not isinstance(old, keras.layers.Wrapper)
        and not discovery.is_batch_norm(old)
        and not is_functional(old)
    ):
      # This needs no configuration.
      self._replace_inside(old, new)
      self._copies[id(old)] = old, new
      return new
    if (
        id(old) not in self._copies
        and isinstance(old, keras.Sequential)
        and is_functional(old)
        and not _is_connected(new)
    ):
      # It is connected to an input when it is called, so that its weights have
      # the same paths.
      self._copies[id(old)] = old, self._new_sequential(old, False)
    replacement = self.layer(old)
    if replacement is not new:
      # Keras keeps a layer that was an attribute. In the same place, because
      # the order of the layers is the order of the weights.
      tracker = parent._tracker
      if tracker.is_in_store('layers', replacement):
        tracker.untrack(new)
      elif tracker.is_in_store('layers', new):
        tracker.replace_tracked_value('layers', new, replacement)
      self._replaced += [
          (layer, parent)
          for layer in discovery.batch_norm_layers(new)
          if not layer.built
      ]
    return replacement

  def _new_batch_norm(self, layer: keras.Layer) -> keras.Layer:
    name = f'The batch normalization layer {layer.name!r}'
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
            f'{name} is a {type(layer).__name__}, which computes in its own way'
            f' ({own[0]}), so it cannot be converted. {instead}'
        )
    config = layer.get_config()
    added = sorted(config.keys() - _CONFIG)
    if added:
      raise ValueError(
          f'{name} is a {type(layer).__name__} with an argument of its own,'
          f' {added[0]}={config[added[0]]!r}, so it cannot be converted.'
          f' {instead}'
      )
    return self._batch_norm_class.from_config(
        {**config, 'synchronized': self._is_synchronized}
    )


def from_config(layer: keras.Layer) -> keras.Layer:
  """Copies a layer from its configuration, without its weights.

  Args:
    layer: The layer.

  Returns:
    The copy. Layers that its constructor makes have the names of the original
    ones.
  """
  copy = type(layer).from_config(layer.get_config())
  _set_names_inside(layer, copy)
  return copy


def new_inputs(model: keras.Model) -> dict[int, keras.KerasTensor]:
  """Makes inputs for the copy of a functional model.

  Args:
    model: The model.

  Returns:
    The new input for each input of the model, by the `id` of the latter.
  """
  return {id(x): _new_input_layer(x).output for x in model.inputs}


def new_ends(
    model: keras.Model, tensors: dict[int, keras.KerasTensor]
) -> tuple[Any, Any]:
  """Finds the inputs and outputs of the copy of a functional model.

  Args:
    model: The model.
    tensors: The tensor of the copy for each tensor of the model, by the `id` of
      the latter.

  Returns:
    The inputs and the outputs, in the structures of the model's.
  """
  if isinstance(model, keras.Sequential):
    # Its `input` is that of its first call.
    ends = model.inputs[0], model.outputs[0]
  else:
    ends = model.input, model.output
  inputs, outputs = (
      tree.map_structure(lambda x: tensors[id(x)], end) for end in ends
  )
  return inputs, outputs


def _new_input_layer(tensor: keras.KerasTensor) -> keras.layers.InputLayer:
  layer = keras_graph.producer(tensor).layer
  return type(layer).from_config(layer.get_config())


def _copy_operation(operation: keras.Operation) -> keras.Operation:
  # Not every operation has a configuration. Calls are recorded in two lists.
  copy = copy_lib.copy(operation)
  copy._inbound_nodes, copy._outbound_nodes = [], []
  return copy


def _build(model: keras.Model, config: Any) -> None:
  """Builds a model with its own `call`."""
  # The scope is part of the paths of weights.
  with keras.name_scope(model.name):
    model.build_from_config(config)
  if not model.built and config and 'input_shape' in config:
    # Keras has built the layers inside only.
    model.build(config['input_shape'])


def _children(layer: keras.Layer) -> list[keras.Layer]:
  """The layers that a layer has itself, without those inside them."""
  children = layer._flatten_layers(include_self=False, recursive=False)
  # A `Sequential` model has one when it is built.
  return [x for x in children if not isinstance(x, keras.layers.InputLayer)]


def _set_names_inside(old: keras.Layer, new: keras.Layer) -> None:
  """Gives the layers inside an unbuilt copy the names of the original ones."""
  pairs = list(zip(_children(old), _children(new)))
  if all(_is_alike(*pair) for pair in pairs):
    for a, b in pairs:
      # The paths of the weights get the name when the layer is built.
      if not b.built:
        b.name = a.name
        _set_names_inside(a, b)


def _is_alike(old: keras.Layer, new: keras.Layer) -> bool:
  both = (old, new)
  return type(old) is type(new) or all(map(discovery.is_batch_norm, both))


def _set_state_inside(old: keras.Layer, new: keras.Layer) -> None:
  """Copies the state of a layer and of all layers inside."""
  new.trainable = old.trainable
  if old.built:
    variables = {}
    old.save_own_variables(variables)
    # A JAX array that two models have is deleted when one of them is trained.
    new.load_own_variables(
        {key: ops.convert_to_numpy(x) for key, x in variables.items()}
    )
  if hasattr(old, 'save_assets'):
    with tempfile.TemporaryDirectory() as folder:
      old.save_assets(folder)
      new.load_assets(folder)
  for a, b in zip(_children(old), _children(new), strict=True):
    _set_state_inside(a, b)


def _is_connected(model: keras.Model) -> bool:
  """Whether a functional or `Sequential` model has inputs and outputs."""
  return bool(getattr(model, 'inputs', None))


def _noun(layer: keras.Layer) -> str:
  return 'model' if isinstance(layer, keras.Model) else 'layer'


def _own_norm_error(layer: keras.Layer, norm: keras.Layer) -> str:
  kind = type(layer).__name__
  return (
      f'The {_noun(layer)} {layer.name!r} ({kind}) makes the batch'
      f' normalization layer {norm.name!r} itself, so it cannot be replaced.'
      f' Make it an attribute in the `__init__` of {kind}, call it in a'
      f' functional model, or change {kind} to make the layer that you want.'
  )
