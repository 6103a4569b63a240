"""Finds the batch normalization layers of a Keras model by their class."""

import keras

BATCH_NORM_CLASSES = (keras.layers.BatchNormalization,)


def is_batch_norm(layer: keras.Layer) -> bool:
  """Returns whether a layer is a batch normalization layer.

  The class decides, never the name.

  Args:
    layer: A Keras layer.

  Returns:
    `True` for `keras.layers.BatchNormalization` and its subclasses, `False` for
    wrappers around them (see `batch_norm_layers`).
  """
  return isinstance(layer, BATCH_NORM_CLASSES)


def all_layers(model: keras.Layer) -> list[keras.Layer]:
  """Returns a model and all layers nested in it.

  Args:
    model: A Keras model or layer. The search includes nested models, wrappers
      such as `TimeDistributed`, and attributes of subclassed models and layers,
      also in lists and dictionaries.

  Returns:
    The model, then the distinct layers inside. A layer that is called several
    times occurs once.
  """
  # Keras has no public method for this.
  found = model._flatten_layers(include_self=True, recursive=True)
  return list({id(layer): layer for layer in found}.values())


def batch_norm_layers(model: keras.Layer) -> list[keras.Layer]:
  """Returns all batch normalization layers nested in a model.

  Args:
    model: A Keras model or layer; see `all_layers`.

  Returns:
    The distinct layers, in no particular order.
  """
  return [layer for layer in all_layers(model) if is_batch_norm(layer)]
