"""Replaces the batch normalization layers of existing Keras models."""

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any

import keras

from tff_bn.common import checks
from tff_bn.common import spelling
from tff_bn.keras_model import keras_copy
from tff_bn.layers import batch_renormalization
from tff_bn.layers import converted_layer
from tff_bn.layers import discovery
from tff_bn.layers import federated_batch_normalization
from tff_bn.layers import hybrid_batch_normalization

_FEDERATED = federated_batch_normalization.FederatedBatchNormalization
_HYBRID = hybrid_batch_normalization.HybridBatchNormalization
_RENORM = batch_renormalization.BatchRenormalization
# For each value of `to`, the class and its argument `synchronized`.
_TARGETS = {
    'federated': (_FEDERATED, False),
    'batch': (keras.layers.BatchNormalization, False),
    'synchronized': (keras.layers.BatchNormalization, True),
    'hybrid': (_HYBRID, False),
    'batch_renorm': (_RENORM, False),
}
_KNOWN_CLASSES = (_FEDERATED, _HYBRID, _RENORM, *discovery.BATCH_NORM_CLASSES)
# The arguments that only `BatchRenormalization` has.
_RENORM_CONFIG = ('r_max', 'd_max')
# A subclass with other methods or more arguments is not plain batch
# normalization.
_HARMLESS_METHODS = frozenset(['__init__', 'get_config', 'from_config'])
_CONFIG = frozenset(
    ['name', 'trainable', 'dtype']
    + list(inspect.signature(keras.layers.BatchNormalization).parameters)
)


def convert_batch_norm(
    model: keras.Model, to: str = 'federated'
) -> keras.Model:
  """Copies a model and changes the class of its batch normalization layers.

  The architecture, names, weights, `trainable` flags and dtype policies are
  kept. Only `tff_bn.layers.HybridBatchNormalization` has a weight `mixing`: it
  starts at 0, and it is dropped if the new class does not have it. So are the
  arguments `r_max` and `d_max` of `tff_bn.layers.BatchRenormalization`. Nested
  models, shared layers, and layers in wrappers such as
  `keras.layers.TimeDistributed` are converted, too. The given model does not
  change, and the new model has its own weights. In inference mode, both models
  compute the same.

  Custom layers and models may contain batch normalization layers as attributes,
  or in lists, tuples and dictionaries. Their class must create these layers in
  `__init__` and must have a configuration (`get_config`), as for saving the
  model. Such a layer gets a class derived from its own one, with the same name,
  whose configuration also describes the new layers. So `model.save` and
  `keras.models.clone_model` keep them. Whoever loads the saved model must
  import `tff_bn.layers` before, and give Keras the custom classes as for the
  original model (`keras.saving.register_keras_serializable` or
  `custom_objects`). A subclassed model cannot be loaded from the old format
  `.h5`; save it as `.keras`.

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
      `'hybrid'` for `tff_bn.layers.HybridBatchNormalization`,
      `'batch_renorm'` for `tff_bn.layers.BatchRenormalization`, `'batch'` for
      `keras.layers.BatchNormalization`, or `'synchronized'` for
      `keras.layers.BatchNormalization(synchronized=True)`, whose replicas in a
      `tf.distribute` strategy share their batch statistics. `'synchronized'`
      needs the TensorFlow backend.

  Returns:
    The new model.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If `to` is unknown, the model has no batch normalization, or
      the model or a layer can't be converted. The message names the layer and
      gives advice.
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
  checks.check_type('model', model, keras.Model, 'be a keras.Model')
  if not discovery.batch_norm_layers(model):
    raise ValueError(
        f'The model {model.name!r} has no batch normalization layer to convert.'
    )
  copy = _Conversion(functools.partial(_new_batch_norm, *_TARGETS[to]))
  new_model = copy.layer(model)
  if model.built and not keras_copy.is_functional(model):
    keras_copy.build(new_model, model.get_build_config())
  copy.check()
  expected, found = _num_weights(model), _num_weights(new_model)
  error = (
      f'The model {model.name!r} has {expected} weights, but its copy {found},'
      ' because'
  )
  if found < expected:
    if keras_copy.is_functional(model) and not keras_copy.is_connected(model):
      error = (
          f'The model {model.name!r} has been called, but is not connected to'
          ' an input, so its copy cannot be built. Start it with a keras.Input,'
          ' or build it as a functional model, keras.Model(inputs, outputs).'
      )
    else:
      error += (
          ' Keras could not build all layers of the copy. A custom layer must'
          ' create the layers inside it in its `__init__` and call them as its'
          ' attributes.'
      )
    raise ValueError(error)
  copy.set_state(model)
  if found != expected:
    raise ValueError(
        f'{error} layers share weights that their copies do not share. Build'
        ' the model with the layers that you want.'
    )
  _check_lasts(new_model)
  return new_model


def with_batch_norms(
    layer: keras.Layer, norms: Sequence[keras.Layer]
) -> keras.Layer:
  """Copies a custom layer or model with given batch normalization layers.

  Args:
    layer: A layer or model that is not built, as its class makes it.
    norms: The new layers, in the order of `tff_bn.layers.batch_norm_layers`.

  Returns:
    The copy, a `ConvertedLayer` if its class does not make such layers itself.
  """
  made = discovery.batch_norm_layers(layer)
  if len(made) != len(norms):
    raise ValueError(
        f'{type(layer).__name__} makes {len(made)} batch normalization layers,'
        f' but the configuration of the {keras_copy.noun(layer)}'
        f' {layer.name!r} has {len(norms)}: it was saved with another version'
        ' of the class.'
    )
  new = {id(old): norm for old, norm in zip(made, norms)}
  return _Conversion(lambda norm: new[id(norm)]).layer(layer)


def _check_lasts(model: keras.Model) -> None:
  """Raises a `ValueError` if saving a copy would lose its new layers."""
  converted: list[Any] = [
      layer
      for layer in discovery.all_layers(model)
      if isinstance(layer, converted_layer.ConvertedLayer)
  ]
  for layer in converted:
    if _configs(keras_copy.from_config(layer)) != _configs(layer):
      kind = type(layer).__name__
      raise ValueError(
          f'The {keras_copy.noun(layer)} {layer.name!r} ({kind}) would lose its'
          ' new batch normalization layers when it is saved and loaded, because'
          f' its class creates others each time. Change {kind} to create the'
          ' layers that you want.'
      )


def _keep_batch_norms(layer: keras.Layer) -> None:
  """Sets a copy's class so that its configuration has the replaced layers.

  The copy gets its own class if that remakes it, otherwise a `ConvertedLayer`.
  """
  own_class: Any = converted_layer.own_class(layer)
  _set_class(layer, own_class)
  try:
    made = keras_copy.from_config(layer)
  except ValueError:
    # Keras cannot save this layer, either. The layer that contains it may have
    # a configuration.
    return
  ignored = ('name', 'trainable')
  if _configs(made, ignored) != _configs(layer, ignored):
    _set_class(layer, converted_layer.converted_class(own_class))


def _set_class(layer: keras.Layer, layer_class: type[keras.Layer]) -> None:
  # Keras would track an attribute.
  object.__setattr__(layer, '__class__', layer_class)


def _configs(layer: keras.Layer, ignored: Sequence[str] = ()) -> list[Any]:
  """Describes the batch normalization layers inside a layer."""
  return [
      (
          type(norm),
          # Arrays cannot be compared by `==`.
          {
              k: repr(v)
              for k, v in norm.get_config().items()
              if k not in ignored
          },
      )
      for norm in discovery.batch_norm_layers(layer)
  ]


def _num_weights(model: keras.Model) -> int:
  """Counts the weights that do not depend on the class of the layers."""
  own = {
      id(layer.mixing)
      for layer in discovery.batch_norm_layers(model)
      if isinstance(layer, _HYBRID)
  }
  return sum(id(weight) not in own for weight in model.weights)


class _Conversion(keras_copy.Copy):
  """Copies layers and replaces the batch normalization layers."""

  def __init__(self, new_batch_norm: Callable[[keras.Layer], keras.Layer]):
    """Takes a function that replaces a batch normalization layer."""
    super().__init__()
    self._new_batch_norm = new_batch_norm
    # Batch normalization layers that were replaced before they were built, with
    # the layers that created them.
    self._replaced: list[tuple[keras.Layer, keras.Layer]] = []

  def check(self) -> None:
    """Raises a `ValueError` if a layer still uses a replaced layer."""
    for layer, parent in self._replaced:
      if layer.built:
        raise ValueError(_own_norm_error(parent, layer))

  def _new(self, layer: keras.Layer) -> keras.Layer:
    if discovery.is_batch_norm(layer):
      return self._new_batch_norm(layer)
    if keras_copy.is_functional(layer):
      return self._new_functional(layer)
    inside = discovery.batch_norm_layers(layer)
    if not inside:
      return keras_copy.from_config(layer)
    if isinstance(layer, keras.layers.Wrapper) and set(inside) <= set(
        discovery.batch_norm_layers(layer.layer)
    ):
      config = layer.get_config()
      del config['layer']
      own_class = converted_layer.own_class(layer)
      return own_class(self.layer(layer.layer), **config)
    copy = keras_copy.from_config(layer)
    self._replace_inside(layer, copy)
    converted = {id(new) for _, new in self._copies.values()}
    found = {id(norm) for norm in discovery.batch_norm_layers(copy)}
    if len(found) != len(inside) or not found <= converted:
      raise ValueError(_own_norm_error(layer, inside[0]))
    _keep_batch_norms(copy)
    return copy

  def _replace_inside(self, layer: keras.Layer, copy: keras.Layer) -> None:
    """Replaces the layers that the constructor of a layer's copy created."""
    # PyTorch stores modules apart from other attributes.
    names = [*vars(layer), *vars(layer).get('_modules', ())]
    for name in names:
      old, new = (getattr(x, name, None) for x in (layer, copy))
      replacement = self._replacement(old, new, copy)
      if replacement is not new:
        setattr(copy, name, replacement)

  def _replacement(self, old: Any, new: Any, parent: keras.Layer) -> Any:
    """Returns the value of an attribute of a copy, with layers replaced.

    Args:
      old: The value in the original layer.
      new: The value in the copy. A list or dictionary is changed in place.
      parent: The copy.
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
    # Keras wraps lists and dictionaries that contain layers.
    if isinstance(old, list) and hasattr(old, 'tracker'):
      for i, (old_item, new_item) in enumerate(zip(old, new)):
        new[i] = self._replacement(old_item, new_item, parent)
    elif isinstance(old, dict) and hasattr(old, 'tracker'):
      for key in old.keys() & new.keys():
        new[key] = self._replacement(old[key], new[key], parent)
    elif isinstance(old, tuple):
      values = [self._replacement(x, y, parent) for x, y in zip(old, new)]
      if any(x is not y for x, y in zip(values, new)):
        is_named = hasattr(old, '_fields')
        return type(new)(*values) if is_named else type(new)(values)
    return new

  def _replacement_of_layer(
      self, old: keras.Layer, new: keras.Layer, parent: keras.Layer
  ) -> keras.Layer:
    if (
        id(old) not in self._copies
        and converted_layer.own_class(old) is converted_layer.own_class(new)
        and not isinstance(old, keras.layers.Wrapper)
        and not discovery.is_batch_norm(old)
        and not keras_copy.is_functional(old)
    ):
      # No configuration is needed.
      self._replace_inside(old, new)
      _keep_batch_norms(new)
      self._copies[id(old)] = old, new
      return new
    if (
        id(old) not in self._copies
        and isinstance(old, keras.Sequential)
        and keras_copy.is_functional(old)
        and not keras_copy.is_connected(new)
    ):
      # Its first call connects it to an input, so that its weights get the same
      # paths.
      self._copies[id(old)] = old, self._new_sequential(old, False)
    replacement = self.layer(old)
    if replacement is not new:
      # Keras still tracks the old attribute. The replacement takes its place,
      # because the order of the layers is the order of the weights.
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


def _new_batch_norm(
    batch_norm_class: type[keras.Layer],
    is_synchronized: bool,
    layer: keras.Layer,
) -> keras.Layer:
  """Makes the replacement of a batch normalization layer."""
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
          f'{name} is a {type(layer).__name__}, whose method {own[0]} may'
          f' change the computation, so it cannot be converted. {instead}'
      )
  config = layer.get_config()
  limits: dict[str, Any] = {}
  if isinstance(layer, _RENORM):
    limits = {key: config.pop(key) for key in _RENORM_CONFIG}
  added = sorted(config.keys() - _CONFIG)
  if added:
    raise ValueError(
        f'{name} is a {type(layer).__name__} with the additional argument'
        f' {added[0]}={config[added[0]]!r}, so it cannot be converted.'
        f' {instead}'
    )
  config['synchronized'] = is_synchronized
  if batch_norm_class is _RENORM:
    config.update(limits)
  return batch_norm_class.from_config(config)


def _own_norm_error(layer: keras.Layer, norm: keras.Layer) -> str:
  kind = type(layer).__name__
  return (
      f'The {keras_copy.noun(layer)} {layer.name!r} ({kind}) creates the batch'
      f' normalization layer {norm.name!r} in a way that prevents replacing it.'
      f' Make it an attribute in the `__init__` of {kind}, call it in a'
      f' functional model, or change {kind} to create the layer that you want.'
  )
