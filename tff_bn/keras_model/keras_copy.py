"""Copies of Keras models with some layers replaced."""

import abc
import collections
import copy as copy_lib
import inspect
import tempfile
from typing import Any
import warnings

import keras
from keras import ops
from keras import tree
from keras.src.models import functional as keras_functional

from tff_bn.keras_model import keras_graph
from tff_bn.layers import converted_layer
from tff_bn.layers import discovery

# Keras has no public name for the class of functional models.
_Functional = keras_functional.Functional
# Copies get the first three later. A constructor may draw a seed.
_NOT_COMPARED = ('name', 'trainable', 'dtype', 'seed')


def is_functional(layer: keras.Layer) -> bool:
  """Returns whether a layer is a functional model without its own `call`."""
  return isinstance(layer, (_Functional, keras.Sequential)) and type(
      layer
  ).call in (_Functional.call, keras.Sequential.call)


class Copy(abc.ABC):
  """Copies layers. A layer that occurs several times has one copy."""

  def __init__(self):
    # Keyed by `id`. Keeping the originals prevents that an `id` is reused.
    self._copies: dict[int, tuple[Any, Any]] = {}

  def layer(self, layer: keras.Layer) -> keras.Layer:
    """Returns the copy of a layer, model or operation, without its weights."""
    if id(layer) not in self._copies:
      is_layer = isinstance(layer, keras.Layer)
      new = self._new(layer) if is_layer else _copy_operation(layer)
      if is_functional(layer):
        _set_policy(layer, new)
      self._copies[id(layer)] = layer, new
    return self._copies[id(layer)][1]

  @abc.abstractmethod
  def _new(self, layer: keras.Layer) -> keras.Layer:
    """Makes the copy of a layer or model, without its weights."""

  def _new_functional(self, model: keras.Model) -> keras.Model:
    """Makes the copy of a functional or `Sequential` model."""
    if isinstance(model, keras.Sequential):
      return self._new_sequential(model, is_connected(model))
    tensors = new_inputs(model)
    for call in keras_graph.calls(model):
      outputs = self._repeat(call, self.layer(call.layer), tensors)
      for old, new in zip(call.outputs, outputs, strict=True):
        tensors[id(old)] = new
    model_class = type(model)
    if not keras_functional.functional_like_constructor(model_class):
      # Its constructor takes no inputs and outputs.
      model_class = keras.Model
    return model_class(*new_ends(model, tensors), name=model.name)

  def _repeat(
      self,
      call: keras_graph.Call,
      layer: keras.Layer,
      tensors: dict[int, keras.KerasTensor],
  ) -> list[keras.KerasTensor]:
    """Repeats the call of a layer with its copy, see `Call.repeat`."""
    return call.repeat(layer, tensors)

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
    """Gives a layer's state, and the states inside, to the built copies."""
    copy = self._copies[id(layer)][1]
    # Also sets the flags of the layers inside, which then get their own.
    copy.trainable = layer.trainable
    if is_functional(layer):
      for child in layer.layers:
        # Input layers are created with the model.
        if not isinstance(child, keras.layers.InputLayer):
          self.set_state(child)
      return
    _set_state_inside(layer, copy)


class PlainCopy(Copy):
  """Copies layers without replacing any."""

  def _new(self, layer: keras.Layer) -> keras.Layer:
    if is_functional(layer):
      return self._new_functional(layer)
    return same_from_config(layer)


def same_from_config(layer: keras.Layer) -> keras.Layer:
  """Copies a layer as `from_config`, with equal layers inside.

  It also raises a `ValueError` if the layer's class makes other batch
  normalization layers than the layer has.
  """
  copy = from_config(layer)
  kinds = [
      list(map(type, discovery.batch_norm_layers(x))) for x in (layer, copy)
  ]
  if kinds[0] != kinds[1]:
    raise ValueError(
        f'Keras cannot make the {_name(layer)} again from its configuration: it'
        ' would have other batch normalization layers. Create them in the'
        f' `__init__` of {type(layer).__name__}.'
    )
  return copy


def from_config(layer: keras.Layer) -> keras.Layer:
  """Copies a layer from its configuration, without its weights.

  Functions, such as the one of a `Lambda` layer, are not copied but used again,
  and custom classes need not be registered. Layers that the constructor makes
  get the names and dtype policies of the original ones, but batch normalization
  layers may be of other classes.

  If the configuration does not make the layer, or makes it with other
  arguments, it raises a `ValueError`.
  """
  try:
    with keras.saving.CustomObjectScope(_custom_classes(layer)):
      copy = _remade(layer)
    difference = '' if _is_of_keras(type(layer)) else _difference(layer, copy)
  except Exception as error:  # Of any class, from the layer's own methods.
    raise ValueError(_cannot_be_copied(layer)) from error
  if difference:
    raise ValueError(
        f'Keras cannot make the {_name(layer)} again from its configuration:'
        f' {difference}. Give {type(layer).__name__} a `get_config` with the'
        ' arguments of its `__init__`.'
    )
  _set_properties_inside(layer, copy)
  return copy


def get_config(layer: keras.Layer) -> dict[str, Any]:
  """Returns a layer's configuration without warning of Python lambdas."""
  with warnings.catch_warnings():
    # A file would contain their code, a copy has the functions.
    warnings.filterwarnings('ignore', '.*being serialized includes a `lambda`')
    return dict(layer.get_config())


def _remade(layer: keras.Layer) -> keras.Layer:
  """Makes a layer from its configuration, with the same functions."""
  layer_class = type(layer)
  config = get_config(layer)
  if _inherits(layer_class, keras.layers.Lambda, '__init__', 'from_config'):
    # Its configuration has the function's code.
    for name, value in (
        ('function', layer.function),
        ('output_shape', layer._output_shape),
        ('mask', layer.mask),
        ('arguments', layer.arguments),
    ):
      config[name] = value
    return layer_class(**config)
  if _inherits(layer_class, keras.layers.Wrapper, 'from_config'):
    del config['layer']
    return layer_class(PlainCopy().layer(layer.layer), **config)
  if _function(layer_class, 'from_config').__module__.split('.')[0] == 'keras':
    for name, value in config.items():
      attribute = getattr(layer, name, None)
      if isinstance(value, dict) and inspect.isfunction(attribute):
        config[name] = attribute
  # Building layers inside would fix their names.
  return layer_class.from_config(converted_layer.without_build(config))


def _name(layer: keras.Layer) -> str:
  return f'{noun(layer)} {layer.name!r} ({type(layer).__name__})'


def _cannot_be_copied(layer: keras.Layer) -> str:
  kind = type(layer).__name__
  inside = discovery.batch_norm_layers(layer)
  described = (
      f', with the batch normalization layer {inside[0].name!r},'
      if inside
      else ''
  )
  return (
      f'The {_name(layer)}{described} cannot be copied from its configuration.'
      f' Give {kind} a `get_config` with the arguments of its `__init__`,'
      ' without Python lambdas, or build a functional model,'
      ' keras.Model(inputs, outputs).'
  )


def _difference(old: keras.Layer, new: keras.Layer) -> str:
  """Describes an argument in which the copy of a custom layer differs.

  Keras makes subclassed models without `get_config` with the default arguments,
  whatever their arguments were. The description is empty without a difference.
  """
  if not _is_of_keras(type(old)):
    parameters = inspect.signature(type(old).__init__).parameters
    found = _different_argument(
        old,
        *({name: vars(x).get(name) for name in parameters} for x in (old, new)),
    )
  elif not _children(old):
    found = _different_argument(old, *map(get_config, (old, new)))
  else:
    found = ''
  for a, b in zip(_children(old), _children(new)):
    if not found and not discovery.is_batch_norm(a) and _is_alike(a, b):
      found = _difference(a, b)
  return found


def _different_argument(
    layer: keras.Layer, old: dict[str, Any], new: dict[str, Any]
) -> str:
  """Describes the first argument that differs in two configurations."""
  for name in old:
    a, b = _plain(old[name]), _plain(new.get(name))
    if name not in _NOT_COMPARED and a is not None and b is not None and a != b:
      return f'{name} of {layer.name!r} would be {b!r} instead of {a!r}'
  return ''


def _plain(value: Any) -> Any:
  """Returns a number, a text or a tuple of these, otherwise `None`."""
  if isinstance(value, (list, tuple)):
    values = tuple(map(_plain, value))
    return None if None in values else values
  return value if isinstance(value, (int, float, str)) else None


def _is_of_keras(layer_class: type[keras.Layer]) -> bool:
  return layer_class.__module__.split('.')[0] == 'keras'


def _inherits(
    layer_class: type[keras.Layer], parent: type[keras.Layer], *names: str
) -> bool:
  """Returns whether a class has methods of a parent class."""
  return issubclass(layer_class, parent) and all(
      _function(layer_class, name) is _function(parent, name) for name in names
  )


def _function(layer_class: type[keras.Layer], name: str) -> Any:
  method = getattr(layer_class, name)
  return getattr(method, '__func__', method)


def _custom_classes(layer: keras.Layer) -> dict[str, type[keras.Layer]]:
  """Returns the custom classes of a layer and of the layers inside, by name."""
  by_name = collections.defaultdict(set)
  for each in discovery.all_layers(layer):
    layer_class = converted_layer.own_class(each)
    if not _is_of_keras(layer_class):
      by_name[keras.saving.get_registered_name(layer_class)].add(layer_class)
  return {
      name: next(iter(classes))
      for name, classes in by_name.items()
      if len(classes) == 1
  }


def new_inputs(model: keras.Model) -> dict[int, keras.KerasTensor]:
  """Returns new inputs for the copy of a model, by the `id` of the old ones."""
  return {id(x): _new_input_layer(x).output for x in model.inputs}


def new_ends(
    model: keras.Model, tensors: dict[int, keras.KerasTensor]
) -> tuple[Any, Any]:
  """Returns the inputs and outputs of a functional model's copy, structured.

  Args:
    model: The model.
    tensors: The tensors of the copy, by the `id`s of the model's tensors.
  """
  if isinstance(model, keras.Sequential):
    # Its `input` is the input of its first call.
    ends = model.inputs[0], model.outputs[0]
  else:
    ends = model.input, model.output
  return tree.map_structure(lambda x: tensors[id(x)], ends)


def _new_input_layer(tensor: keras.KerasTensor) -> keras.layers.InputLayer:
  layer = keras_graph.producer(tensor).layer
  return type(layer).from_config(layer.get_config())


def _copy_operation(operation: keras.Operation) -> keras.Operation:
  # Not every operation has a configuration. The copy has no calls yet.
  copy = copy_lib.copy(operation)
  copy._inbound_nodes, copy._outbound_nodes = [], []
  return copy


def build(model: keras.Model, config: Any) -> None:
  """Builds a model that has its own `call`."""
  # The scope becomes part of the weights' paths.
  with keras.name_scope(model.name):
    model.build_from_config(config)
  if not model.built and config and 'input_shape' in config:
    # Keras has only built the layers inside.
    model.build(config['input_shape'])


def _children(layer: keras.Layer) -> list[keras.Layer]:
  """Returns the layers directly inside a layer."""
  children = layer._flatten_layers(include_self=False, recursive=False)
  # A `Sequential` model gets an input layer when it is built.
  return [x for x in children if not isinstance(x, keras.layers.InputLayer)]


def _set_properties_inside(old: keras.Layer, new: keras.Layer) -> None:
  """Gives layers inside an unbuilt copy their original names and policies."""
  pairs = list(zip(_children(old), _children(new)))
  if all(_is_alike(*pair) for pair in pairs):
    for a, b in pairs:
      # Building the layer copies its name to the weights' paths.
      if not b.built:
        b.name = a.name
        _set_policy(a, b)
        _set_properties_inside(a, b)


def _set_policy(old: keras.Layer, new: keras.Layer) -> None:
  # A constructor may use the global policy, which may have changed.
  if new.dtype_policy != old.dtype_policy:
    new.dtype_policy = old.dtype_policy


def _is_alike(old: keras.Layer, new: keras.Layer) -> bool:
  both = (old, new)
  return converted_layer.own_class(old) is converted_layer.own_class(
      new
  ) or all(map(discovery.is_batch_norm, both))


def _set_state_inside(old: keras.Layer, new: keras.Layer) -> None:
  """Copies the state of a layer and of all layers inside."""
  new.trainable = old.trainable
  if not old.built:
    pass
  elif discovery.is_batch_norm(old) and type(old) is not type(new):
    # The classes have different weights, but equal names for the common ones.
    values = {x.name: ops.convert_to_numpy(x) for x in old.weights}
    for variable in new.weights:
      if variable.name in values:
        variable.assign(values[variable.name])
  else:
    variables: dict[str, Any] = {}
    old.save_own_variables(variables)
    # Training a model deletes its JAX arrays, so the copy needs its own.
    new.load_own_variables(
        {key: ops.convert_to_numpy(x) for key, x in variables.items()}
    )
  if hasattr(old, 'save_assets'):
    with tempfile.TemporaryDirectory() as folder:
      old.save_assets(folder)
      new.load_assets(folder)
  for a, b in zip(_children(old), _children(new), strict=True):
    _set_state_inside(a, b)


def is_connected(model: keras.Model) -> bool:
  """Returns whether a functional or `Sequential` model has inputs."""
  return bool(getattr(model, 'inputs', None))


def noun(layer: keras.Layer) -> str:
  """Returns the noun for a layer in messages."""
  return 'model' if isinstance(layer, keras.Model) else 'layer'
