"""Feature normalization against NumPy, forward and backward."""

import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn.layers import FeatureNormalization


def _call(x, dy=1.0, axis=-1, dtype='float64'):
  """Returns the outputs and the gradient of the inputs."""
  x = tf.Variable(x)
  with tf.GradientTape() as tape:
    output = FeatureNormalization(axis, dtype=dtype)(x)
    target = tf.reduce_sum(output * dy)
  return output, tape.gradient(target, x)


@pytest.mark.parametrize(
    ('shape', 'axis'), [([5, 4], -1), ([5, 3, 4], 2), ([5, 3, 4], 1)]
)
def test_forward_and_backward_equal_numpy(shape, axis):
  x, dy = (random_values.inputs(shape, seed) for seed in (0, 5))
  output, dx = _call(x, dy, axis)

  def dot(a, b):
    return np.sum(a * b, axis=axis, keepdims=True)

  d, length = shape[axis], np.sqrt(dot(x, x))
  np.testing.assert_allclose(output, np.sqrt(d) * x / length, rtol=1e-12)
  # The gradient is orthogonal to the features.
  expected = np.sqrt(d) / length * (dy - x * dot(x, dy) / length**2)
  np.testing.assert_allclose(dx, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('dtype', ['float32', 'float64', 'mixed_float16'])
def test_zeros_stay_zero_without_a_gradient(dtype):
  x = np.zeros([2, 3], 'float64' if dtype == 'float64' else 'float32')
  x[1, 0] = 1
  output, dx = _call(x, dtype=dtype)
  np.testing.assert_array_equal(output[0], np.zeros(3))
  np.testing.assert_array_equal(dx[0], np.zeros(3))
  np.testing.assert_allclose(dx[1], [0, 3**0.5, 3**0.5], rtol=1e-3)


@pytest.mark.parametrize('policy', ['mixed_float16', 'mixed_bfloat16'])
def test_mixed_precision(policy):
  layer = FeatureNormalization(dtype=policy)
  # The sum of squares overflows in float16.
  x = tf.cast(1000 * random_values.inputs([6, 3]), layer.compute_dtype)
  output = layer(x)
  assert output.dtype == layer.compute_dtype
  lengths = np.linalg.norm(tf.cast(output, tf.float64), axis=1)
  np.testing.assert_allclose(lengths, np.sqrt(3) * np.ones(6), rtol=2e-2)
