"""Finds the batch normalization layers of a Keras model by their class."""

import tensorflow as tf

# Keras's synchronized layer derives from none of the others, and the layer of
# TensorFlow 1 is a sibling of today's, not its base.
BATCH_NORM_CLASSES = (
    tf.keras.layers.BatchNormalization,
    tf.keras.layers.experimental.SyncBatchNormalization,
    tf.compat.v1.keras.layers.BatchNormalization,
)
# Those that run in inference mode if they have `trainable=False`.
FREEZABLE_CLASSES = BATCH_NORM_CLASSES[:2]


def is_batch_norm(layer: tf.keras.layers.Layer) -> bool:
  """Returns whether a layer normalizes by the statistics of its batch.

  The layer's class decides, never its name. Subclasses count; a wrapper around
  a batch normalization layer does not (see `batch_norm_layers`).

  Args:
    layer: A Keras layer.

  Returns:
    `True` for `BatchNormalization`, `SyncBatchNormalization` and their
    subclasses.
  """
  return isinstance(layer, BATCH_NORM_CLASSES)


def batch_norm_layers(
    model: tf.keras.layers.Layer,
) -> list[tf.keras.layers.Layer]:
  """Finds all batch normalization layers, however deep they are nested.

  Args:
    model: A Keras model or layer. Nested models, wrappers such as
      `TimeDistributed`, and attributes of subclassed models are searched.

  Returns:
    The distinct layers, in no particular order. A layer that is called several
    times occurs once.
  """
  return [
      module
      for module in [model, *model.submodules]
      if isinstance(module, tf.keras.layers.Layer) and is_batch_norm(module)
  ]
