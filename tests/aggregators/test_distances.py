"""Distances between rows, and means of rows, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.aggregators import distances


def _squared_distances(x):
  return ((x[:, np.newaxis] - x[np.newaxis]) ** 2).sum(axis=2)


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize(
    'function', [distances.squared_distances, distances.exact_squared_distances]
)
def test_distances_with_cancellation(function, dtype, monkeypatch):
  monkeypatch.setattr(distances, '_BLOCK_COLUMNS', 16)
  rng = np.random.default_rng(0)
  offset = 1e3 if dtype == 'float32' else 1e6
  x = (offset + rng.normal(size=(9, 50))).astype(dtype)
  # The central row is none of these attackers.
  x[2], x[5], x[7] = -x[0], 1e30, x[3]
  found = function(tf.constant(x)).numpy()
  honest = [0, 1, 3, 4, 6, 7, 8]
  expected = _squared_distances(x.astype(np.longdouble))
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
  expected = _squared_distances(x.astype(np.float64))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert np.abs(found - expected).max() > 1e-9  # So the product was in float32.


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
