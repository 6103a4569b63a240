"""Replaces the batch normalization layers of existing Keras models."""

import abc
from collections.abc import Iterator

import tensorflow as tf

from tff_bn import spelling
from tff_bn.layers import discovery
from tff_bn.layers import federated_batch_normalization

# Keras 2.14 forgets the `synchronized` of a `BatchNormalization` when a model
# is saved or cloned, but not this class.
_SYNCHRONIZED = tf.keras.layers.experimental.SyncBatchNormalization
_CLASSES = {
    'federated': federated_batch_normalization.FederatedBatchNormalization,
    'batch': tf.keras.layers.BatchNormalization,
    'synchronized': _SYNCHRONIZED,
}
_KNOWN_CLASSES = (*_CLASSES.values(), *discovery.BATCH_NORM_CLASSES)
# A subclass that has more methods than these, or a longer configuration, is a
# layer of another kind.
_HARMLESS_METHODS = frozenset(['__init__', 'get_config', 'from_config'])
_CONFIG = frozenset(tf.keras.layers.BatchNormalization().get_config()) | {
    'batch_input_shape'
}
_TF1_OPTIONS = ('renorm', 'virtual_batch_size', 'adjustment')

# Functional and Sequential models.
_FUNCTIONAL = tf.keras.Sequential.__base__


def convert_batch_norm(
    model: tf.keras.Model, to: str = 'federated'
) -> tf.keras.Model:
  """Copies a model, with all batch normalization layers of another class.

  Architecture, names, weights, `trainable` flags and dtype policies are kept.
  Nested models, shared layers, and layers in wrappers such as
  `tf.keras.layers.TimeDistributed` are converted, too. The given model stays as
  it is; the weights of the new one are copies.

  The new model is not compiled.

  Example:
  ```
  model = tf.keras.applications.ResNet50(weights=None, classes=10)
  federated = tff_bn.convert_batch_norm(model)
  federated.compile('sgd', 'sparse_categorical_crossentropy')
  ...
  model = tff_bn.convert_batch_norm(federated, to='batch')
  ```

  Args:
    model: A functional or `Sequential` Keras model.
    to: `'federated'` for `tff_bn.layers.FederatedBatchNormalization`,
      `'batch'` for `tf.keras.layers.BatchNormalization`, or `'synchronized'`
      for `tf.keras.layers.experimental.SyncBatchNormalization`, whose replicas
      in a `tf.distribute` strategy share their batch statistics.

  Returns:
    The new model.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If `to` is unknown, the model has no batch normalization, or
      it, or a layer of it, can't be converted. The message names the layer and
      says what to do.
  """
  if to not in _CLASSES:
    raise ValueError(
        f'to={to!r} is unknown; use one of {", ".join(map(repr, _CLASSES))}.'
        + spelling.suggestion(str(to), _CLASSES)
    )
  if not isinstance(model, tf.keras.Model):
    raise TypeError(
        f'model must be a tf.keras.Model, but is a {type(model).__name__}.'
    )
  if not discovery.batch_norm_layers(model):
    raise ValueError(
        f'The model {model.name!r} has no batch normalization layer to convert.'
    )
  copy = _Conversion(_CLASSES[to])
  new_model = copy.layer(model)
  if model.built and not new_model.built:
    raise ValueError(
        f'The model {model.name!r} has been called, but is not connected to an'
        ' input, so its copy cannot be built. Begin it with a tf.keras.Input,'
        ' or build it as a functional model, tf.keras.Model(inputs, outputs).'
    )
  copy.set_state(model)
  if model.built and len(new_model.weights) != len(model.weights):
    raise ValueError(
        f'The model {model.name!r} has {len(model.weights)} weights, but its'
        f' copy {len(new_model.weights)}, because layers that Keras copies one'
        ' by one share weights. Build the model with the layers that you want.'
    )
  return new_model


class Copy(abc.ABC):
  """Copies layers; the same layer becomes the same copy wherever it is met."""

  def __init__(self):
    # By `id`; the layers are kept, so that no other one gets it.
    self._copies: dict[
        int, tuple[tf.keras.layers.Layer, tf.keras.layers.Layer]
    ] = {}

  def layer(self, layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    """Returns the copy of a layer or model, without its weights."""
    if id(layer) not in self._copies:
      self._copies[id(layer)] = layer, self._new(layer)
    return self._copies[id(layer)][1]

  @abc.abstractmethod
  def _new(self, layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    """Makes the copy of a layer or model, without its weights."""

  def set_state(self, layer: tf.keras.layers.Layer) -> None:
    """Gives the copy of a layer, and those of all inside, its state.

    Args:
      layer: The layer, whose copy has been built.
    """
    copy = self._copies[id(layer)][1]
    # Sets all layers inside, which then get their own.
    copy.trainable = layer.trainable
    if is_functional(layer):
      for child in layer.layers:
        # Those are cloned with the model.
        if not isinstance(child, tf.keras.layers.InputLayer):
          self.set_state(child)
      return
    if id(getattr(layer, 'layer', None)) in self._copies:
      self.set_state(layer.layer)
    else:
      for old, new in zip(_layers_inside(layer), _layers_inside(copy)):
        new.trainable = old.trainable
    # In the order of Keras, which depends on the flags.
    copy.set_weights(layer.get_weights())


class PlainCopy(Copy):
  """Copies layers as they are."""

  def _new(self, layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    if is_functional(layer):
      return tf.keras.models.clone_model(layer, clone_function=self.layer)
    return type(layer).from_config(layer.get_config())


class _Conversion(Copy):
  """Copies layers; those of batch normalization become others."""

  def __init__(self, batch_norm_class: type[tf.keras.layers.Layer]):
    super().__init__()
    self._batch_norm_class = batch_norm_class

  def _new(self, layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    if discovery.is_batch_norm(layer):
      return self._new_batch_norm(layer)
    if is_functional(layer):
      return tf.keras.models.clone_model(layer, clone_function=self.layer)
    inside = discovery.batch_norm_layers(layer)
    if not inside:
      return type(layer).from_config(layer.get_config())
    if isinstance(layer, tf.keras.layers.Wrapper) and set(inside) <= set(
        discovery.batch_norm_layers(layer.layer)
    ):
      config = layer.get_config()
      del config['layer']
      return type(layer)(self.layer(layer.layer), **config)
    if isinstance(layer, tf.keras.Model):
      raise ValueError(
          f'The model {layer.name!r} ({type(layer).__name__}), with the batch'
          f' normalization layer {inside[0].name!r}, is a subclass of'
          ' tf.keras.Model with its own `call`, which cannot be converted.'
          ' Build it as a functional model, tf.keras.Model(inputs, outputs), or'
          ' with the layers that you want.'
      )
    raise ValueError(
        f'The layer {layer.name!r} ({type(layer).__name__}) makes the batch'
        f' normalization layer {inside[0].name!r} itself, so it cannot be'
        ' replaced. Call that layer in the functional model, or change'
        f' {type(layer).__name__} to make the layer that you want.'
    )

  def _new_batch_norm(
      self, layer: tf.keras.layers.Layer
  ) -> tf.keras.layers.Layer:
    name = f'The batch normalization layer {layer.name!r}'
    instead = 'Use tf.keras.layers.BatchNormalization.'
    for option in _TF1_OPTIONS:
      if getattr(layer, option, None):
        raise ValueError(
            f'{name} has {option}={getattr(layer, option)}, an option of'
            f' TensorFlow 1, so it cannot be converted. {instead}'
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
    if not layer.trainable and not issubclass(
        parent, discovery.FREEZABLE_CLASSES
    ):
      raise ValueError(
          f'{name} has trainable=False, but is of a class of TensorFlow 1 that'
          f' uses the statistics of its batch all the same. {instead}'
      )
    config = layer.get_config()
    added = sorted(config.keys() - _CONFIG)
    if added:
      raise ValueError(
          f'{name} is a {type(layer).__name__} with an argument of its own,'
          f' {added[0]}={config[added[0]]!r}, so it cannot be converted.'
          f' {instead}'
      )
    if (
        layer.fused is False
        and not layer.synchronized
        and self._batch_norm_class is not _SYNCHRONIZED
    ):
      # Not in the configuration, but it decides on masks and on epsilon.
      config['fused'] = False
    return self._batch_norm_class.from_config(config)


def is_functional(layer: tf.keras.layers.Layer) -> bool:
  """Whether a layer is a functional or `Sequential` model.

  Args:
    layer: The layer.

  Returns:
    `False` for other layers and for models with a `call` of their own.
  """
  return isinstance(layer, _FUNCTIONAL) and type(layer).call in (
      _FUNCTIONAL.call,
      tf.keras.Sequential.call,
  )


def _layers_inside(
    layer: tf.keras.layers.Layer,
) -> Iterator[tf.keras.layers.Layer]:
  return (
      module
      for module in layer.submodules
      if isinstance(module, tf.keras.layers.Layer)
  )
