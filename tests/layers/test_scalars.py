"""The layers with a single number."""

import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn.layers import ScalarBias
from tff_bn.layers import ScalarMultiplier


@pytest.mark.parametrize('shape', [[5, 3], [2, 4, 4, 3]])
@pytest.mark.parametrize(
    ('layer_class', 'name'), [(ScalarBias, 'bias'), (ScalarMultiplier, 'scale')]
)
def test_forward_and_backward(layer_class, name, shape):
  layer = layer_class(dtype='float64')
  x, dy = (tf.Variable(random_values.inputs(shape, s)) for s in (0, 5))
  # The start is the identity.
  np.testing.assert_array_equal(layer(x), x)
  (scalar,) = layer.trainable_weights
  assert (scalar.name, scalar.shape) == (name, ())
  scalar.assign(1.5)
  with tf.GradientTape() as tape:
    output = layer(x)
    target = tf.reduce_sum(output * dy)
  dx, ds = tape.gradient(target, [x, scalar])
  x, dy = x.numpy(), dy.numpy()
  if layer_class is ScalarBias:
    expected = x + 1.5, dy, dy.sum()
  else:
    expected = 1.5 * x, 1.5 * dy, (x * dy).sum()
  for a, b in zip((output, dx, ds), expected):
    np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize('layer_class', [ScalarBias, ScalarMultiplier])
def test_mixed_precision(layer_class):
  layer = layer_class(dtype='mixed_bfloat16')
  assert layer(np.ones([5, 3], np.float32)).dtype == tf.bfloat16
  assert layer.scalar.dtype == 'float32'
