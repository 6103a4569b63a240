"""Smallest maximum eigenvalue averaging."""

import numpy as np
import pytest
import rule_calls
import tensorflow as tf

from tff_bn import aggregators
from tff_bn.aggregators import eigenvalue_rules


@pytest.mark.parametrize('offset', [0.0, 2.0, 20.0, 1e3])
def test_choice_of_float32_values_is_right(offset):
  rng = np.random.default_rng(5)
  x = rng.normal(size=(24, 3000)) * np.linspace(0.9, 1.1, 24)[:, None]
  x = (offset + rng.permutation(x)).astype(np.float32)
  exact = x.astype(np.float64)
  norms = [np.linalg.norm(y - y.mean(axis=0), 2) for y in _without_one(exact)]
  expected = _without_one(exact)[int(np.argmin(norms))].mean(axis=0)
  rule = aggregators.SmallestMaximumEigenvalueAveraging(1)
  result, _ = rule_calls.aggregate(rule, x)
  np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def _without_one(x):
  return [np.delete(x, i, axis=0) for i in range(len(x))]


def test_sets_are_compared_in_blocks(monkeypatch):
  x = np.random.default_rng(0).normal(size=(9, 4))
  rule = aggregators.SmallestMaximumEigenvalueAveraging(3)
  expected, _ = rule_calls.aggregate(rule, x)
  monkeypatch.setattr(eigenvalue_rules, '_BLOCK_ELEMENTS', 5 * 81)
  np.testing.assert_array_equal(rule_calls.aggregate(rule, x)[0], expected)


def test_first_of_equal_sets():
  rule = aggregators.SmallestMaximumEigenvalueAveraging(1)
  # ByzFL's example.
  x = np.arange(1.0, 10).reshape(3, 3)
  result, _ = rule_calls.aggregate(rule, x)
  np.testing.assert_allclose(result, [2.5, 3.5, 4.5])
  result, _ = rule_calls.aggregate(rule, np.array([[0.0], [2.0], [9.0]]))
  np.testing.assert_allclose(result, [1])
  # ByzFL divides 0 by 0 for equal values.
  x = np.array([[5.0], [1.0], [1.0], [1.0]])
  np.testing.assert_allclose(rule_calls.aggregate(rule, x)[0], [1])


def test_too_many_sets_are_an_error_in_the_round():
  rule = aggregators.SmallestMaximumEigenvalueAveraging(5)
  with pytest.raises(
      tf.errors.InvalidArgumentError, match='would take too long'
  ):
    rule_calls.aggregate(rule, np.zeros((100, 2)))
  rule_calls.aggregate(rule, np.zeros((100, 2)), num_dropped=4)
  aggregators.SmallestMaximumEigenvalueAveraging(9, num_clients=20)
  aggregators.SmallestMaximumEigenvalueAveraging(0, num_clients=5000)
