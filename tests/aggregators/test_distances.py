"""Distances between rows, and means of rows, against NumPy."""

import numpy as np
import numpy_rules
import pytest
import tensorflow as tf

from tff_bn.aggregators import distances


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_distances_with_cancellation(dtype, monkeypatch):
  monkeypatch.setattr(distances, '_BLOCK_COLUMNS', 16)
  rng = np.random.default_rng(0)
  offset = 1e3 if dtype == 'float32' else 1e6
  x = (offset + rng.normal(size=(9, 50))).astype(dtype)
  # The central row is none of these attackers.
  x[2], x[5], x[7] = -x[0], 1e30, x[3]
  found = distances.squared_distances(tf.constant(x)).numpy()
  honest = [0, 1, 3, 4, 6, 7, 8]
  expected = numpy_rules.squared_distances(x.astype(np.longdouble))
  np.testing.assert_allclose(
      found[np.ix_(honest, honest)],
      expected[np.ix_(honest, honest)].astype(np.float64),
      rtol=1e-9,
      atol=1e-8,
  )
  np.testing.assert_allclose(found, expected.astype(np.float64), rtol=1e-6)
  np.testing.assert_array_equal(np.diag(found), 0)


def test_distances_of_ordinary_values_take_one_product():
  x = np.random.default_rng(0).normal(size=(20, 300)).astype(np.float32)
  found = distances.squared_distances(tf.constant(x)).numpy()
  expected = numpy_rules.squared_distances(x.astype(np.float64))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert np.abs(found - expected).max() > 1e-9  # So the product was in float32.


@pytest.mark.parametrize('offset', [0.0, 1.0, 30.0, 1e3, 1e5])
def test_distances_far_from_the_origin(offset):
  """The digits of float32 squares cancel from an offset of about 4."""
  rng = np.random.default_rng(0)
  x = (offset + rng.normal(size=(12, 400))).astype(np.float32)
  x[3] *= -2  # A far row.
  expected = numpy_rules.squared_distances(x.astype(np.float64))
  found = distances.squared_distances(tf.constant(x)).numpy()
  np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_products_from_the_medoid():
  x = np.random.default_rng(1).normal(size=(9, 40)).astype(np.float32)
  x[4] = 0
  products, is_accurate = distances.medoid_products(tf.constant(x))
  assert is_accurate
  exact = x.astype(np.float64) @ x.astype(np.float64).T
  np.testing.assert_allclose(products, exact, atol=1e-4)
  for wrong in (1e-30 * x, 1e30 * x, 1e4 + x):
    products, is_accurate = distances.medoid_products(tf.constant(wrong))
    assert not is_accurate
    np.testing.assert_array_equal(products, np.zeros((9, 9)))


@pytest.mark.parametrize('block_elements', [1, 100, 2**22])
def test_clipped_mean(block_elements, monkeypatch):
  monkeypatch.setattr(distances, '_BLOCK_ELEMENTS', block_elements)
  rng = np.random.default_rng(2)
  for num_rows in (1, 2, 7):
    x = rng.normal(size=(num_rows, 40)).astype(np.float32)
    center = rng.normal(size=40).astype(np.float32)
    difference = x.astype(np.float64) - center
    lengths = np.linalg.norm(difference, axis=1, keepdims=True)
    for radius in (1e-3, 8.0, 1e60):
      found, is_accurate = distances.clipped_mean(
          tf.constant(x), tf.constant(center), radius
      )
      assert is_accurate
      shares = np.minimum(1, radius / lengths)
      np.testing.assert_allclose(
          found, center + (shares * difference).mean(axis=0), atol=2e-6
      )


@pytest.mark.parametrize('scale', [1e-25, 1e25])
def test_clipped_mean_notices_squares_out_of_range(scale):
  x = np.full((3, 4), scale, np.float32)
  for radius in (scale, 1e-30):
    _, is_accurate = distances.clipped_mean(
        tf.constant(x), tf.zeros([4]), radius
    )
    assert not is_accurate
  # All differences are within the radius, however small their squares.
  if scale < 1:
    _, is_accurate = distances.clipped_mean(tf.constant(x), tf.zeros([4]), 1.0)
    assert is_accurate


def test_mean_of_some_rows():
  x = np.float32([[1, 2], [3e38, -3e38], [5, 8]])
  mean = distances.mean_of_some(tf.constant(x), tf.constant([1.0, 0.0, 1.0]))
  np.testing.assert_array_equal(mean, [3, 5])


def test_means_of_the_largest_numbers_are_finite():
  x = np.full((3, 5), np.finfo(np.float32).max)
  x[1] *= -1
  weights = np.array([[0.5, 0, 0.5], [1 / 3] * 3, [0, 1, 0]]) * (1 + 1e-7)
  mixed = distances.mix(tf.constant(x, tf.float32), tf.constant(weights))
  assert np.all(np.isfinite(mixed))
  assert mixed.dtype == tf.float32


def test_mean_is_right_where_the_sum_overflows():
  largest = np.finfo(np.float32).max
  mean = distances.mean(tf.constant([[largest], [largest], [-largest]]))
  np.testing.assert_allclose(mean, [largest / 3], rtol=1e-6)


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
@pytest.mark.parametrize(('n', 'd'), [(7, 50), (11, 2000), (25, 50)])
def test_squared_distances_are_symmetric(n, d, dtype):
  """Else rounding would decide ties, not the order of the clients."""
  x = np.random.default_rng(n).normal(size=(n, d)).astype(dtype)
  squared = distances.squared_distances(tf.constant(x))
  np.testing.assert_array_equal(squared, tf.transpose(squared))
