"""Batch normalization without running statistics against Keras's layer."""

import keras
import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn import layers
from tff_bn.layers import StaticBatchNormalization


def _pair(shape, axis=-1, epsilon=1e-3):
  """Our layer and Keras's, with the same random scale and shift."""
  ours = StaticBatchNormalization(axis, epsilon, dtype='float64')
  theirs = keras.layers.BatchNormalization(
      axis=axis, epsilon=epsilon, dtype='float64'
  )
  for layer in (ours, theirs):
    layer.build([None, *shape[1:]])
  random_values.randomize(ours)
  theirs.gamma.assign(ours.gamma)
  theirs.beta.assign(ours.beta)
  return ours, theirs


def _gradients(layer, x, dy, **arguments):
  x = tf.Variable(x)
  with tf.GradientTape() as tape:
    output = layer(x, **arguments)
    target = tf.reduce_sum(output * dy)
  return output, *tape.gradient(target, [x, layer.gamma, layer.beta])


@pytest.mark.parametrize(
    ('shape', 'arguments'),
    [
        ([8, 3], {}),
        ([6, 3, 4, 5], dict(axis=1)),
        ([6, 3, 4, 5], dict(axis=-3, epsilon=0.3)),
        ([1, 3], {}),
    ],
)
def test_always_equals_keras_in_training(shape, arguments):
  ours, theirs = _pair(shape, **arguments)
  x, dy = (random_values.inputs(shape, seed) for seed in (0, 5))
  found = _gradients(ours, x, dy)
  for training in (False, True):
    # The model casts its inputs to float32.
    in_model = keras.Sequential([ours])(x, training=training)
    np.testing.assert_allclose(in_model, found[0], rtol=1e-5, atol=1e-5)
  expected = _gradients(theirs, x, dy, training=True)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_masked_values_do_not_matter():
  layer = StaticBatchNormalization(dtype='float64')
  x = random_values.inputs([4, 7, 3])
  mask = np.arange(28).reshape(4, 7) % 3 > 0
  x[~mask] = 1e9
  values = x[mask]
  expected = (values - values.mean(0)) / np.sqrt(values.var(0) + 1e-3)
  output = layer(x, mask=tf.constant(mask)).numpy()
  np.testing.assert_allclose(output[mask], expected, rtol=1e-9)


def test_it_has_no_statistics_and_is_not_keras_batch_normalization():
  layer = StaticBatchNormalization()
  assert layer(random_values.inputs([6, 3])).shape == [6, 3]
  assert [v.name for v in layer.weights] == ['gamma', 'beta']
  assert len(layer.trainable_weights) == 2
  np.testing.assert_array_equal(layer.gamma, np.ones(3))
  np.testing.assert_array_equal(layer.beta, np.zeros(3))
  assert not layers.is_batch_norm(layer)


@pytest.mark.parametrize('policy', ['mixed_float16', 'mixed_bfloat16'])
def test_mixed_precision(policy):
  layer = StaticBatchNormalization(dtype=policy)
  # In 16 bits, the variance would be lost.
  x = tf.cast(1000 + 30 * random_values.inputs([64, 3]), layer.compute_dtype)
  output = layer(x)
  assert output.dtype == layer.compute_dtype
  x = tf.cast(x, tf.float64).numpy()
  np.testing.assert_allclose(
      tf.cast(output, tf.float64),
      (x - x.mean(0)) / x.std(0),
      rtol=2e-2,
      atol=2e-2,
  )
  assert {v.dtype for v in layer.weights} == {'float32'}
