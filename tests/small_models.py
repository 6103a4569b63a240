"""Models for tests that need no particular loss."""

import keras
import tensorflow as tf

from tff_bn.keras_model.batch_norm_model import BatchNormModel


def classifier(keras_model_fn, spec, metrics_fn=None):
  """Builds the `BatchNormModel` of a Keras model that gives logits.

  Args:
    keras_model_fn: Builds the Keras model.
    spec: The `element_spec` of batches, or the shape of a float32 sample.
    metrics_fn: See `BatchNormModel`.
  """
  if all(isinstance(size, int) for size in spec):
    spec = tf.TensorSpec((None, *spec)), tf.TensorSpec((None,), tf.int32)
  return BatchNormModel(
      keras_model_fn,
      spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=metrics_fn,
  )
