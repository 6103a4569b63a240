"""The covariance bound-agnostic filter."""

import numpy as np
import pytest
import rule_calls

from tff_bn import aggregators


def test_example_of_the_docstring():
  rule = aggregators.CovarianceBoundAgnosticFilter(1)
  result, _ = rule_calls.aggregate(rule, np.array([[0.0], [2.0], [10.0]]))
  # The weights are 1 - 16/36, 1 - 4/36 and 0.
  mean = 2 * (32 / 36) / (20 / 36 + 32 / 36)
  np.testing.assert_allclose(result, [mean])


def test_equal_values():
  rule = aggregators.CovarianceBoundAgnosticFilter(2)
  for value in (0.0, 3.5, 1e30):
    x = np.full((6, 4), value, np.float32)
    np.testing.assert_allclose(rule_calls.aggregate(rule, x)[0], x[0])


def test_example_of_byzfl():
  rule = aggregators.CovarianceBoundAgnosticFilter(1)
  x = np.arange(1.0, 10).reshape(3, 3)
  np.testing.assert_allclose(rule_calls.aggregate(rule, x)[0], [4, 5, 6])


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('offset', [0.0, 1e3])
def test_attackers_of_all_sizes(offset, dtype):
  """In ByzFL, the largest attackers hide the others."""
  rng = np.random.default_rng(0)
  honest = (offset + rng.normal(size=(20, 30))).astype(dtype)
  sent = (offset + np.power(10.0, [[2], [6], [15], [30]]) * np.ones(30)).astype(
      dtype
  )
  rule = aggregators.CovarianceBoundAgnosticFilter(4)
  result, _ = rule_calls.aggregate(rule, np.concatenate([sent, honest]))
  assert np.linalg.norm(result - honest.mean(axis=0)) < 2.5
