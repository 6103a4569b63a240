"""The filter CAF, the rule SMEA, and subsets by their ranks."""

import itertools

import numpy as np
import pytest
import rule_calls
import tensorflow as tf

from tff_bn import aggregators
from tff_bn.aggregators import eigenvalue_rules


def test_filter_of_equal_values():
  rule = aggregators.CovarianceBoundAgnosticFilter(2)
  for value in (0.0, 3.5, 1e30):
    x = np.full((6, 4), value, np.float32)
    np.testing.assert_allclose(rule_calls.aggregate(rule, x)[0], x[0])


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('offset', [0.0, 1e3])
def test_filter_with_attackers_of_all_sizes(offset, dtype):
  """In ByzFL, the largest attackers hide the others."""
  rng = np.random.default_rng(0)
  honest = (offset + rng.normal(size=(20, 30))).astype(dtype)
  sent = (offset + np.power(10.0, [[2], [6], [15], [30]]) * np.ones(30)).astype(
      dtype
  )
  rule = aggregators.CovarianceBoundAgnosticFilter(4)
  result, _ = rule_calls.aggregate(rule, np.concatenate([sent, honest]))
  assert np.linalg.norm(result - honest.mean(axis=0)) < 2.5


def test_sets_are_compared_in_blocks(monkeypatch):
  x = np.random.default_rng(0).normal(size=(9, 4))
  rule = aggregators.SmallestMaximumEigenvalueAveraging(3)
  expected, _ = rule_calls.aggregate(rule, x)
  monkeypatch.setattr(eigenvalue_rules, '_BLOCK_ELEMENTS', 5 * 81)
  np.testing.assert_array_equal(rule_calls.aggregate(rule, x)[0], expected)


def test_too_many_sets_are_an_error_in_the_round():
  rule = aggregators.SmallestMaximumEigenvalueAveraging(5)
  with pytest.raises(
      tf.errors.InvalidArgumentError, match='would take too long'
  ):
    rule_calls.aggregate(rule, np.zeros((100, 2)))
  rule_calls.aggregate(rule, np.zeros((100, 2)), num_dropped=4)
  aggregators.SmallestMaximumEigenvalueAveraging(9, num_clients=20)
  aggregators.SmallestMaximumEigenvalueAveraging(0, num_clients=5000)


@pytest.mark.parametrize(('n', 'left_out'), [(1, 0), (5, 0), (6, 2), (9, 4)])
def test_subsets_are_in_lexicographic_order(n, left_out):
  counts = eigenvalue_rules.counts_of_subsets(
      tf.constant(n), tf.constant(left_out)
  )
  expected = list(itertools.combinations(range(n), n - left_out))
  assert counts[n, left_out] == len(expected)
  found = eigenvalue_rules.subsets_of_ranks(
      counts, tf.constant(left_out), tf.range(len(expected), dtype=tf.int64)
  )
  assert [tuple(np.flatnonzero(row)) for row in found.numpy()] == expected


def test_numbers_of_subsets_do_not_overflow():
  counts = eigenvalue_rules.counts_of_subsets(
      tf.constant(300), tf.constant(140)
  )
  assert counts[30, 15] == 155117520
  assert counts[300, 140] == 2**60
