"""Nearest-neighbor averaging around a trusted client."""

import numpy as np
import pytest
import rule_calls
import tensorflow as tf

from tff_bn import aggregators
from tff_bn.aggregators import attacks


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('scale', [1e-30, 1.0, 1e30])
def test_each_trusted_client(scale, dtype):
  x = np.random.default_rng(0).normal(size=(9, 40))
  for trusted in range(-9, 9):
    rule = aggregators.NearestNeighborAveraging(3, trusted)
    lengths = np.linalg.norm(x - x[trusted], axis=1)
    expected = x[np.argsort(lengths)[:6]].mean(axis=0)
    found, _ = rule_calls.aggregate(rule, (scale * x).astype(dtype))
    np.testing.assert_allclose(found / scale, expected, rtol=2e-5, atol=1e-6)


def test_equal_values_and_the_trusted_one():
  """The trusted value is one of the n - f, also if others are equal."""
  x = np.full((5, 2), 3, np.float32)
  rule = aggregators.NearestNeighborAveraging(2, -1)
  np.testing.assert_array_equal(rule_calls.aggregate(rule, x)[0], [3, 3])


def test_attackers_around_a_trusted_client():
  honest = np.random.default_rng(0).normal(size=(7, 5))
  x = np.concatenate([np.zeros((3, 5)), honest])
  rule = aggregators.Attacked(
      aggregators.NearestNeighborAveraging(3, -1),
      attacks.FallOfEmpires(1e6),
      3,
  )
  result, _ = rule_calls.aggregate(rule, x)
  np.testing.assert_allclose(result, honest.mean(axis=0))


def test_missing_trusted_client_is_an_error_in_the_round():
  for trusted in (4, -5):
    rule = aggregators.NearestNeighborAveraging(1, trusted)
    rule_calls.aggregate(rule, np.zeros((5, 2)))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f'trusted_client={trusted} '
    ):
      rule_calls.aggregate(rule, np.zeros((4, 2)))
