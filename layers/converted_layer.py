"""Layers and models whose batch normalization layers have been replaced."""

import functools
import types
from typing import Any

import keras
from keras.src.saving import object_registration

from tff_bn.layers import discovery

# The entry of a configuration that describes the replaced layers.
_KEY = 'converted_batch_norm'
# An attribute of the layers that replaced batch normalization layers.
_MARK = 'replaces_batch_norm'


def mark_replacement(layer: keras.Layer) -> None:
  """Lets `norm_layers` find a layer that replaced batch normalization."""
  setattr(layer, _MARK, True)


def unmark_replacement(layer: keras.Layer) -> None:
  """Undoes `mark_replacement`."""
  if hasattr(layer, _MARK):
    delattr(layer, _MARK)


def is_norm(layer: keras.Layer) -> bool:
  """Returns whether a layer is batch normalization or replaced it."""
  return discovery.is_batch_norm(layer) or hasattr(layer, _MARK)


def norm_layers(layer: keras.Layer) -> list[keras.Layer]:
  """Returns the batch normalization layers in a layer, and their replacements.

  A replacement may be of another class, such as
  `keras.layers.GroupNormalization`. Other layers of such classes are not found.
  They are in the order of `tff_bn.layers.batch_norm_layers`.
  """
  return [each for each in discovery.all_layers(layer) if is_norm(each)]


@keras.saving.register_keras_serializable(package='tff_bn')
class ConvertedLayer:
  """Adds the replaced layers to the configuration of a custom layer or model.

  A custom layer makes its batch normalization layers in its constructor, so
  Keras cannot know from its configuration that they have been replaced.
  `converted_class` derives from this class and from the layer's own class. The
  configuration of such a layer describes the layers inside it, and
  `from_config` puts them in place of those that the constructor makes. So
  saved models and clones keep them.

  Keras finds this class by its registered name when it loads a model.
  """

  # The class of the layer before; only derived classes have one.
  own_class: Any = None

  def get_config(self) -> dict[str, Any]:
    """Returns the configuration of the layer's own class, and the layers."""
    own = own_class(self)
    converted = {
        'class': {
            'module': own.__module__,
            'class_name': own.__name__,
            'registered_name': keras.saving.get_registered_name(own),
        },
        'layers': [
            keras.saving.serialize_keras_object(norm)
            for norm in norm_layers(self)
        ],
    }
    return {**own.get_config(self), _KEY: converted}

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> keras.Layer:
    """Makes the layer and replaces its batch normalization layers.

    From a configuration of the layer's own class, it makes a layer of that
    class.
    """
    # Layers inside, and those that replace them, are built with the layer.
    config = without_build(config)
    converted = config.pop(_KEY, None)
    if cls.own_class is not None:
      layer = cls.own_class.from_config(config)
    else:
      layer = keras.saving.deserialize_keras_object(
          {**converted['class'], 'config': config}
      )
    if converted is None:
      return layer
    norms = [
        keras.saving.deserialize_keras_object(norm)
        for norm in converted['layers']
    ]
    # That module needs this one.
    from tff_bn.keras_model import convert

    return convert.with_batch_norms(layer, norms)


def without_build(config: Any) -> Any:
  """Copies a configuration without the entries that build layers inside."""
  if isinstance(config, dict):
    return {
        key: without_build(value)
        for key, value in config.items()
        if key != 'build_config'
    }
  if isinstance(config, (list, tuple)):
    return type(config)(map(without_build, config))
  return config


def own_class(layer: keras.Layer) -> type[keras.Layer]:
  """Returns the class of a layer, without `ConvertedLayer`."""
  if isinstance(layer, ConvertedLayer):
    return layer.own_class
  return type(layer)


@functools.cache
def converted_class(layer_class: type[keras.Layer]) -> type[keras.Layer]:
  """Derives a class from `ConvertedLayer` and the class of a layer or model.

  It has the same name, which Keras shows and uses in files.
  """

  def get_config(self):
    return ConvertedLayer.get_config(self)

  # Keras keeps the arguments of constructors for classes without their own
  # `get_config`. It recognizes such classes by this attribute.
  vars(get_config)['_is_default'] = getattr(
      layer_class.get_config, '_is_default', False
  )
  new_class = types.new_class(
      layer_class.__name__,
      (ConvertedLayer, layer_class),
      exec_body=lambda namespace: namespace.update(
          __doc__=layer_class.__doc__,
          __module__=layer_class.__module__,
          __qualname__=layer_class.__qualname__,
          get_config=get_config,
          own_class=layer_class,
      ),
  )
  # The decorator would replace `ConvertedLayer` itself.
  object_registration.GLOBAL_CUSTOM_NAMES[new_class] = (
      keras.saving.get_registered_name(ConvertedLayer)
  )
  return new_class
