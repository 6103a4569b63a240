"""Properties of robust rules on random values, and under random attacks."""

import functools

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_strategies
import numpy as np
import pytest
import rule_calls
import tensorflow as tf

from tff_bn.aggregators import robust_rule
from tff_bn.catalog import rules

# With 2, bulyan ends with clients that are each other's nearest: ties.
_F = 3
_D = 3
_CHAINS = ('nnm+mean', 'nnm+trimmed_mean', 'clipping+median', 'arc+krum')
_NAMES = (*rules.RULES, *_CHAINS)
# Their result depends on the distance from the origin.
_WITH_AN_ORIGIN = {'centered_clipping', 'clipping+median', 'arc+krum'}
# The result of these is a mean, a median or a value of each coordinate.
_IN_THE_HULL = ('median', 'trimmed_mean', 'mea_med', 'nnm+trimmed_mean')
_ROBUST = sorted({*rules.RULES, 'nnm+trimmed_mean', 'arc+krum'} - {'mean'})
_few = hypothesis.settings(
    max_examples=hypothesis.settings.default.max_examples // 5
)


@functools.cache
def _rule(name):
  return rule_calls.build(name, _F)


@functools.cache
def _traced(name):
  return rule_calls.traced(_rule(name), 'float64', _D)


@st.composite
def _values(draw):
  """Normal values of any size, without ties: bulyan needs 4f + 3 clients."""
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  shape = draw(st.integers(4 * _F + 3, 18)), _D
  scale = 10.0 ** draw(st.integers(-6, 6))
  return scale * (rng.normal(size=shape) + draw(st.integers(-5, 5)))


# The client whom `monna` trusts is the last one; for `mda`, several sets can
# have the smallest diameter.
@pytest.mark.parametrize('name', sorted(set(_NAMES) - {'monna', 'mda'}))
@_few
@hypothesis.given(values=_values(), seed=st.integers(0, 2**32))
def test_order_of_clients_does_not_matter(name, values, seed):
  order = np.random.default_rng(seed).permutation(len(values))
  found = _traced(name)(values[order])
  size = np.abs(values).max()
  np.testing.assert_allclose(
      found, _traced(name)(values), rtol=1e-9, atol=1e-9 * size
  )


@pytest.mark.parametrize('name', sorted(set(_NAMES) - _WITH_AN_ORIGIN))
@_few
@hypothesis.given(
    values=_values(), steps=st.tuples(*[st.floats(-100, 100)] * _D)
)
def test_result_moves_with_all_values(name, values, steps):
  shift = np.abs(values).max() * np.array(steps)
  found = _traced(name)(values + shift) - shift
  size = np.abs(values).max() + np.abs(shift).max()
  # The geometric median is iterated until it moves little.
  tolerance = 1e-4 if name == 'geometric_median' else 1e-8
  np.testing.assert_allclose(
      found, _traced(name)(values), atol=tolerance * size
  )


_ATTACKERS = np_strategies.arrays(
    np.float64,
    (_F, _D),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@pytest.mark.parametrize('name', _ROBUST)
@_few
@hypothesis.given(
    seed=st.integers(0, 2**32),
    attackers=_ATTACKERS,
    num_honest=st.integers(12, 15),
)
def test_attackers_move_the_result_little(name, seed, attackers, num_honest):
  rng = np.random.default_rng(seed)
  honest = rng.normal(size=(num_honest, _D))
  # `monna` trusts the last client.
  result = _traced(name)(np.concatenate([attackers, honest]))
  least, most = honest.min(axis=0), honest.max(axis=0)
  # Other rules may choose attackers who stay near the honest clients.
  margin = 0 if name in _IN_THE_HULL else (most - least).max()
  assert np.all(result >= least - margin - 1e-9)
  assert np.all(result <= most + margin + 1e-9)


@pytest.mark.parametrize('name', _NAMES)
@_few
@hypothesis.given(values=_values(), data=st.data())
def test_values_that_are_not_finite_are_left_out(name, values, data):
  bad = data.draw(
      st.lists(
          st.tuples(
              st.integers(0, len(values) - 2),
              st.integers(0, _D - 1),
              st.sampled_from([np.nan, np.inf, -np.inf]),
          ),
          min_size=1,
          max_size=_F,
      )
  )
  spoiled = values.copy()
  for row, column, value in bad:
    spoiled[row, column] = value
  rows = sorted({row for row, _, _ in bad})
  gathered = robust_rule.without_abstaining(
      tf.ones([len(values), 1], tf.float64),
      tf.constant(spoiled),
      tf.constant(0),
  )
  assert gathered['num_dropped'] == len(rows)
  assert gathered['num_abstained'] == 0
  rest = np.delete(values, rows, axis=0)
  np.testing.assert_array_equal(gathered['values'], rest)
  if name == 'bulyan' and len(rest) < 4 * (_F - len(rows)) + 3:
    return
  found = _traced(name)(gathered['values'], gathered['num_dropped'])
  np.testing.assert_array_equal(found, _traced(name)(rest, len(rows)))
  assert np.all(np.isfinite(found))
