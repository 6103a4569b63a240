"""Bulyan."""

import numpy as np
import numpy_rules
import pytest
import rule_calls

from tff_bn import aggregators


@pytest.mark.parametrize('num_clients', [None, 25])
def test_a_large_coordinate_does_not_pass(num_clients):
  """The attack of the paper, in one of many coordinates, deceives Krum."""
  rng = np.random.default_rng(1)
  honest = rng.normal(size=(20, 2000)).astype(np.float32)
  sent = np.tile(honest.mean(axis=0), (4, 1))
  sent[:, 7] += 20
  x = np.concatenate([sent, honest])
  krum, _ = rule_calls.aggregate(aggregators.Krum(4), x)
  assert krum[7] > 10
  rule = aggregators.Bulyan(4, num_clients=num_clients)
  result, _ = rule_calls.aggregate(rule, x)
  assert abs(result[7]) < 1


@pytest.mark.parametrize(('f', 'depends'), [(1, True), (2, True), (3, False)])
def test_ties_are_decided_by_the_order_of_clients(f, depends):
  n, found = 4 * f + 3, set()
  x = np.random.default_rng(f).normal(size=(n, 50))
  for seed in range(12):
    order = np.random.default_rng(seed).permutation(n)
    result, _ = rule_calls.aggregate(aggregators.Bulyan(f), x[order])
    np.testing.assert_allclose(
        result, numpy_rules.bulyan(x[order], f), rtol=1e-9
    )
    found.add(tuple(result.round(9)))
  assert (len(found) > 1) == depends
