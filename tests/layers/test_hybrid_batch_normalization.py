"""What only the hybrid layer does: its shares of the batch's statistics."""

import batch_norm_references
import numpy as np
import pytest
import random_values

from tff_bn.layers import HybridBatchNormalization


def _layer(shape, **arguments):
  layer = HybridBatchNormalization(**arguments)
  layer.build([None, *shape[1:]])
  random_values.randomize(layer)
  return layer


@pytest.mark.parametrize('scale', [1e-4, 1e4])
def test_float32_with_means_much_larger_than_deviations(scale):
  layer = _layer([64, 3], epsilon=1e-12)
  layer.moving_mean.assign([1000.0 * scale] * 3)
  layer.moving_variance.assign([scale**2] * 3)
  x = (scale * (1000 + random_values.inputs([64, 3]))).astype(np.float32)
  expected = batch_norm_references.reference(layer, x).output
  np.testing.assert_allclose(layer(x, training=True), expected, atol=5e-3)


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
