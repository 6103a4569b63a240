"""Sorting networks against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.aggregators import order_statistics


@pytest.mark.parametrize('num_rows', [1, 2, 3, 7, 16, 33])
def test_sorting_networks_sort(num_rows):
  """Tests the unrolled network and the loop over comparators."""
  rng = np.random.default_rng(num_rows)
  values = rng.integers(0, 9, (num_rows, 5)).astype('float32')

  def rows(values):
    return order_statistics.map_ordered(
        values,
        tf.range(tf.shape(values)[0]),
        lambda ordered: ordered[0] + 100 * ordered[num_rows - 1],
    )

  expected = np.sort(values, axis=0)
  for shape in ([num_rows, 5], [None, 5]):
    traced = tf.function(
        rows, input_signature=[tf.TensorSpec(shape, tf.float32)]
    )
    np.testing.assert_array_equal(
        traced(values), expected[0] + 100 * expected[-1]
    )
