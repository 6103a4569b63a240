"""Finds the batch normalization layers of a Keras model by their class."""

import keras

BATCH_NORM_CLASSES = (keras.layers.BatchNormalization,)


def is_batch_norm(layer: keras.Layer) -> bool:
  """Returns whether a layer normalizes by the statistics of its batch.

  The layer's class decides, never its name. Subclasses count; a wrapper around
  a batch normalization layer does not (see `batch_norm_layers`).

  Args:
    layer: A Keras layer.

  Returns:
    `True` for `keras.layers.BatchNormalization` and its subclasses.
  """
  return isinstance(layer, BATCH_NORM_CLASSES)


def all_layers(model: keras.Layer) -> list[keras.Layer]:
  """Finds a model and all layers inside, however deep they are nested.

  Args:
    model: A Keras model or layer. Nested models, wrappers such as
      `TimeDistributed`, and attributes of subclassed models and layers, lists
      and dictionaries included, are searched.

  Returns:
    The model, then the distinct layers inside. A layer that is called several
    times occurs once.
  """
  # Keras has no public method for this.
  found = model._flatten_layers(include_self=True, recursive=True)
  return list({id(layer): layer for layer in found}.values())


def batch_norm_layers(model: keras.Layer) -> list[keras.Layer]:
  """Finds all batch normalization layers, however deep they are nested.

  Args:
    model: A Keras model or layer, searched as by `all_layers`.

  Returns:
    The distinct layers, in no particular order. A layer that is called several
    times occurs once.
  """
  return [layer for layer in all_layers(model) if is_batch_norm(layer)]
