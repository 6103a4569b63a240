"""Minimum diameter averaging against a search of all sets."""

import itertools

import numpy as np
import pytest
import rule_calls

from tff_bn import aggregators
from tff_bn.aggregators import mda


def _all_diameters(x, f):
  """Returns the diameters of all sets, in lexicographic order."""
  distances = np.linalg.norm(x[:, np.newaxis] - x, axis=2)
  return {
      rows: distances[np.ix_(rows, rows)].max()
      for rows in itertools.combinations(range(len(x)), len(x) - f)
  }


@pytest.mark.parametrize(
    'kind',
    [
        *('whole', 'line', 'attacked'),
        pytest.param('normal', marks=pytest.mark.slow),
    ],
)
def test_first_set_with_the_smallest_diameter(kind):
  """Whole numbers have many equal distances."""
  num_columns = 1 if kind == 'line' else 3
  aggregate = rule_calls.traced(
      aggregators.MinimumDiameterAveraging(5), 'float64', num_columns
  )
  for n in (3, 5, 8, 11):
    for f, seed in itertools.product(range((n + 1) // 2), range(3)):
      rng = np.random.default_rng([n, f, seed])
      x = rng.normal(size=(n, num_columns))
      if kind in ('whole', 'line'):
        x = x.round()
      if kind == 'attacked':
        x[rng.permutation(n)[:f]] += 10 * rng.normal(size=(f, 3))
      diameters = _all_diameters(x, f)
      rows = min(diameters, key=diameters.get)
      np.testing.assert_allclose(
          # The other tolerated attackers were dropped.
          aggregate(x, 5 - f),
          x[list(rows)].mean(axis=0),
          rtol=1e-12,
          atol=1e-12,
          err_msg=f'n={n}, f={f}, seed={seed}',
      )


def test_many_attackers():
  """There are 10^20 sets."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(100, 50))
  x[:20] += 10
  rule = aggregators.MinimumDiameterAveraging(20)
  result, _ = rule_calls.aggregate(rule, x)
  np.testing.assert_allclose(result, x[20:].mean(axis=0), atol=1e-12)


def test_most_attackers_can_be_tolerated():
  most = mda._MOST_BYZANTINE
  x = np.arange(3.0 * most)[:, np.newaxis]
  rule = aggregators.MinimumDiameterAveraging(most)
  result, _ = rule_calls.aggregate(rule, x)
  np.testing.assert_allclose(result, [most - 0.5])
