"""The geometric median against SciPy and by hand."""

import numpy as np
import pytest
import rule_calls
import scipy.optimize

from tff_bn import aggregators


def _objective(z, x):
  return np.linalg.norm(x - z, axis=1).sum()


@pytest.mark.parametrize('n', [3, 4, 10, 41])
@pytest.mark.parametrize('scale', [1e-8, 1.0, 1e8])
def test_geometric_median_has_the_least_sum_of_distances(n, scale):
  rule = aggregators.GeometricMedian()
  for seed in range(3):
    rng = np.random.default_rng([n, seed])
    x = rng.normal(size=(n, 3)) * [1, 2, 5] + rng.normal(size=3)
    result, _ = rule_calls.aggregate(rule, scale * x)
    result /= scale
    found = scipy.optimize.minimize(
        _objective, np.median(x, axis=0), (x,), tol=1e-12
    )
    assert _objective(result, x) <= found.fun * (1 + 1e-6)
    np.testing.assert_allclose(result, found.x, atol=2e-5)
    if np.linalg.norm(x - result, axis=1).min() > 1e-2:
      # The gradient, a sum of unit vectors, is 0.
      lengths = np.linalg.norm(x - result, axis=1, keepdims=True)
      assert np.linalg.norm(((x - result) / lengths).sum(axis=0)) < 1e-7


def test_geometric_median_may_be_one_of_the_values():
  rule = aggregators.GeometricMedian()
  # On a line, it is the median.
  line = np.array([0, 1, 2, 10, 1000])[:, np.newaxis] * np.array([[3, 4]])
  result, _ = rule_calls.aggregate(rule, line.astype(np.float64))
  np.testing.assert_allclose(result, [6, 8], atol=1e-4)
  # Most values are the same.
  same = np.array([[1, 2]] * 4 + [[5, 5], [7, 0], [1e20, 3]], np.float32)
  np.testing.assert_array_equal(rule_calls.aggregate(rule, same)[0], [1, 2])
  alone = np.array([[1.5, 2.5]])
  np.testing.assert_array_equal(
      rule_calls.aggregate(rule, alone)[0], [1.5, 2.5]
  )


def test_geometric_median_of_float32_values_is_one_of_them():
  # Near it, the digits of float32 products cancel.
  direction = np.random.default_rng(0).normal(size=300)
  x = np.outer([0, 1, 1.5, 10, 11], direction).astype(np.float32)
  result, _ = rule_calls.aggregate(aggregators.GeometricMedian(), x)
  np.testing.assert_allclose(result, x[2], atol=1e-5)


def test_geometric_median_of_far_attackers():
  # The result depends on the attackers' directions, but not on their distances.
  rng = np.random.default_rng(0)
  honest = rng.normal(size=(7, 2))
  for size in (1e6, 1e30):
    x = np.concatenate([honest, size * np.array([[1, 0], [0, 1]])])
    result, _ = rule_calls.aggregate(aggregators.GeometricMedian(2), x)
    pull = np.array([1, 1])
    lengths = np.linalg.norm(honest - result, axis=1, keepdims=True)
    gradient = ((honest - result) / lengths).sum(axis=0) + pull
    np.testing.assert_allclose(gradient, 0, atol=1e-5)


def test_geometric_median_stops():
  x = np.random.default_rng(0).normal(size=(9, 3))
  exact, _ = rule_calls.aggregate(aggregators.GeometricMedian(), x)
  once, _ = rule_calls.aggregate(
      aggregators.GeometricMedian(max_iterations=1), x
  )
  rough, _ = rule_calls.aggregate(
      aggregators.GeometricMedian(tolerance=1e-3), x
  )
  assert np.abs(once - exact).max() > 1e-3
  assert 1e-8 < np.abs(rough - exact).max() < 1e-2
