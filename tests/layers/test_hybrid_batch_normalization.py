"""What only the hybrid layer does: its shares of the batch's statistics."""

import batch_norm_references
import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn.layers import HybridBatchNormalization


def _layer(shape, **arguments):
  layer = HybridBatchNormalization(**arguments)
  layer.build([None, *shape[1:]])
  random_values.randomize(layer)
  return layer


@pytest.mark.parametrize('scale', [1e-4, 1.0, 1e4])
def test_float32_with_means_much_larger_than_deviations(scale):
  layer = _layer([64, 3], epsilon=1e-12)
  layer.moving_mean.assign([1000.0 * scale] * 3)
  layer.moving_variance.assign([scale**2] * 3)
  x = (scale * (1000 + random_values.inputs([64, 3]))).astype(np.float32)
  expected = batch_norm_references.reference(layer, x).output
  np.testing.assert_allclose(layer(x, training=True), expected, atol=5e-3)


def test_gradients_equal_finite_differences():
  layer = _layer([5, 3, 2], dtype='float64')
  x, dy = (random_values.inputs([5, 3, 2], seed) for seed in (0, 5))
  mask = np.array([[1, 1, 0]] * 3 + [[0, 1, 1]] * 2, bool)
  inputs = tf.Variable(x)
  with tf.GradientTape() as tape:
    output = layer(inputs, training=True, mask=tf.constant(mask))
    loss = tf.reduce_sum(output * dy)
  dx, *gradients = tape.gradient(loss, [inputs, *layer.trainable_variables])

  def target():
    return np.sum(np.array(layer(x, training=True, mask=mask)) * dy)

  def difference(change):
    step = 1e-6
    change(step)
    above = target()
    change(-2 * step)
    below = target()
    change(step)
    return (above - below) / (2 * step)

  for variable, gradient in zip(layer.trainable_variables, gradients):
    for channel in range(2):

      def add(step, variable=variable, channel=channel):
        value = np.array(variable)
        value[channel] += step
        variable.assign(value)

      np.testing.assert_allclose(gradient[channel], difference(add), rtol=1e-6)
  for index in np.ndindex(x.shape):

    def add_to_x(step, index=index):
      x[index] += step

    np.testing.assert_allclose(
        dx[index], difference(add_to_x), rtol=1e-5, atol=1e-7
    )


def test_start_is_half_and_half():
  layer = HybridBatchNormalization(dtype='float64', epsilon=1e-9)
  assert layer.mixing is None
  x = random_values.inputs([8, 3])
  output = layer(x, training=True)
  np.testing.assert_array_equal(layer.mixing, np.zeros(3))
  expected = (x - x.mean(0) / 2) / np.sqrt(0.5 + x.var(0) / 2 + 1e-9)
  np.testing.assert_allclose(output, expected, rtol=1e-12)
  assert [v.name for v in layer.trainable_variables] == [
      *('gamma', 'beta', 'mixing'),
  ]
  assert [v.name for v in layer.non_trainable_variables] == [
      *('moving_mean', 'moving_variance'),
  ]
