"""Bulyan."""

import numpy as np
import pytest
import rule_calls

from tff_bn import aggregators


def test_example_of_the_docstring():
  x = np.array([0.0, 1, 2, 3, 4, 5, 100])[:, np.newaxis]
  result, _ = rule_calls.aggregate(aggregators.Bulyan(1), x)
  np.testing.assert_allclose(result, [2])


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


def test_dropped_attackers():
  x = np.random.default_rng(2).normal(size=(9, 3))
  for num_dropped in (2, 3):
    result, _ = rule_calls.aggregate(aggregators.Bulyan(2), x, num_dropped)
    np.testing.assert_allclose(result, x.mean(axis=0), rtol=1e-12)


def _truth(x, f):
  """Bulyan with the ties of its docstring, in float64."""
  squared = ((x[:, np.newaxis] - x) ** 2).sum(-1)
  squared = (squared + squared.T) / 2
  left, selected = list(range(len(x))), []
  while len(selected) < len(x) - 2 * f:
    num_near = max(len(left) - f - 2, 1)
    scores = [np.sort(squared[i, left])[1 : num_near + 1].sum() for i in left]
    # The first of equal scores.
    selected.append(left.pop(int(np.argmin(scores))))
  values = x[selected]
  median = np.median(values, axis=0)
  nearest = np.argsort(abs(values - median), axis=0, kind='stable')
  return np.take_along_axis(values, nearest[: len(x) - 4 * f], 0).mean(axis=0)


@pytest.mark.parametrize(('f', 'depends'), [(1, True), (2, True), (3, False)])
def test_ties_are_decided_by_the_order_of_clients(f, depends):
  n, found = 4 * f + 3, set()
  x = np.random.default_rng(f).normal(size=(n, 50))
  for seed in range(12):
    order = np.random.default_rng(seed).permutation(n)
    result, _ = rule_calls.aggregate(aggregators.Bulyan(f), x[order])
    np.testing.assert_allclose(result, _truth(x[order], f), rtol=1e-9)
    found.add(tuple(result.round(9)))
  assert (len(found) > 1) == depends
