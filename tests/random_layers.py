"""Layers that drop half of their inputs, each by another random generator."""

import keras
import tensorflow as tf


class _OwnDropout(keras.layers.Layer):

  def call(self, inputs, training=None):
    if not training:
      return inputs
    is_kept = self._draw(tf.shape(inputs)) < 0.5
    return tf.where(is_kept, 2 * inputs, tf.zeros_like(inputs))


class WithTensorFlowGenerator(_OwnDropout):
  """Draws from a `tf.random.Generator`."""

  def __init__(self):
    super().__init__()
    self._generator = tf.random.Generator.from_seed(1)

  def _draw(self, shape):
    return self._generator.uniform(shape)


class WithKerasGlobalGenerator(_OwnDropout):
  """Draws from the generator that all of Keras shares."""

  def _draw(self, shape):
    return keras.random.uniform(shape)


def keras_dropout():
  """Draws from a generator of its own, as layers of Keras do."""
  return keras.layers.Dropout(0.5)


KINDS = (keras_dropout, WithTensorFlowGenerator, WithKerasGlobalGenerator)
