"""Robust rules on matrices, against NumPy."""

import functools
import itertools

import numpy as np
import numpy_rules
import pytest
import rule_calls
import tensorflow as tf

from tff_bn import aggregators
from tff_bn.aggregators import order_statistics
from tff_bn.catalog import rules
from tff_bn.common import aligned_arrays

_MAX_BYZANTINE = 4


@functools.cache
def _traced(name, dtype, num_columns=6):
  return rule_calls.traced(_ALL_RULES[name], dtype, num_columns)


_M = _MAX_BYZANTINE
# The definitions, as functions of the rows and `num_byzantine`.
_TRUTHS = {
    'mean': lambda x, f: x.mean(axis=0),
    'median': lambda x, f: np.median(x, axis=0),
    'trimmed_mean': numpy_rules.trimmed_mean,
    'mea_med': numpy_rules.mea_med,
    'krum': lambda x, f: x[numpy_rules.krum_order(x, f)[0]],
    'multi_krum': lambda x, f: x[
        numpy_rules.krum_order(x, f)[: len(x) - f]
    ].mean(axis=0),
    'multi_krum of 3': lambda x, f: x[numpy_rules.krum_order(x, f)[:3]].mean(
        axis=0
    ),
    'centered_clipping': lambda x, f: numpy_rules.clipped(
        x, np.zeros(x.shape[1]), 4.0, 3
    ),
    'mda': numpy_rules.minimum_diameter,
    'monna': numpy_rules.near_last,
    'caf': numpy_rules.filtered,
    'smea': numpy_rules.smallest_eigenvalue,
    'bulyan': numpy_rules.bulyan,
}
_STEPS = {
    'nnm': numpy_rules.mixed,
    'arc': numpy_rules.shortened,
    'clipping': lambda x, f: (
        x * np.minimum(1, 2 / np.linalg.norm(x, axis=1))[:, np.newaxis]
    ),
}
_CHAINS = (
    *('nnm+mean', 'nnm+trimmed_mean', 'nnm+krum', 'clipping+trimmed_mean'),
    *('arc+trimmed_mean', 'arc+krum', 'arc+nnm+median'),
)
_RULES = (*_TRUTHS, *_CHAINS)
_ALL_RULES = {
    **{
        name: rule_calls.build(name, _M)
        for name in (
            *rules.RULES,
            *_CHAINS,
            'nnm+geometric_median',
            'bucketing+median',
        )
    },
    'multi_krum of 3': aggregators.MultiKrum(_M, 3),
    'centered_clipping': aggregators.CenteredClipping(4.0, 3, _M),
}
# Rules with a length that does not scale with the values.
_WITH_A_LENGTH = ('centered_clipping', 'clipping+trimmed_mean')
# `monna` trusts the last client, and static clipping does not scale.
_UNDEFENDED = {'mean', 'nnm+mean', 'monna', 'clipping+trimmed_mean'}


def _truth(name, x, f):
  """Returns the result by the definitions, in float64."""
  *steps, last = name.split('+')
  x = x.astype(np.float64)
  for step in steps:
    x = _STEPS[step](x, f)
  return _TRUTHS[last](x, f)


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        *((name, 'float64') for name in _RULES),
        *((name, 'float32') for name in _TRUTHS),
    ],
)
def test_equals_numpy(name, dtype):
  rule = _ALL_RULES[name]
  tolerance = 1e-12 if dtype == 'float64' else 2e-6
  checked = 0
  for n, f in itertools.product([1, 2, 3, 4, 7, 12, 33], range(_M + 1)):
    if n < rule.min_clients(f) or n < 2 * f + 1:
      continue
    if 'krum' in name and n < 2 * f + 3:
      continue
    if name == 'smea' and n > 12 and f > 2:
      continue  # NumPy would take seconds.
    rng = np.random.default_rng([n, f])
    # Wide in some columns, and with an offset in others.
    x = rng.normal(size=(n, 6)) * [1, 1, 3, 0.1, 1, 1] + [0, 0, 0, 0, 5, -2]
    x = x.astype(dtype)
    # More may be dropped than the rule expects.
    result = _traced(name, dtype)(x, _M - f if f else _M + 3)
    assert result.dtype == dtype
    np.testing.assert_allclose(
        result,
        _truth(name, x, f),
        rtol=tolerance,
        atol=tolerance,
        err_msg=f'n={n}, f={f}',
    )
    checked += 1
  assert checked >= 7


@pytest.mark.parametrize('name', _ALL_RULES)
def test_eager_and_traced_are_the_same(name):
  x = np.random.default_rng(0).normal(size=(19, 6))
  eager, _ = rule_calls.aggregate(_ALL_RULES[name], x, 1)
  np.testing.assert_allclose(
      _traced(name, 'float64')(x, 1), eager, rtol=1e-9, atol=1e-12
  )


# Several sets may have the smallest diameter.
@pytest.mark.parametrize('name', sorted(set(_ALL_RULES) - {'monna', 'mda'}))
def test_order_of_clients_does_not_matter(name):
  aggregate = _traced(name, 'float64')
  rng = np.random.default_rng(3)
  for n in (19, 20) if name == 'smea' else (19, 20, 130):
    x = rng.normal(size=(n, 6))
    expected = aggregate(x)
    for _ in range(3):
      np.testing.assert_allclose(
          aggregate(rng.permutation(x)), expected, rtol=1e-10, atol=1e-12
      )


def _attacks(rng, f, d):
  return {
      'large': np.full((f, d), 1e30),
      'small': np.full((f, d), -1e30),
      'both': np.resize([1e30, -1e30], (f, 1)) * np.ones(d),
      'some': 1e30 * rng.choice([0, 1, -1], size=(f, d)),
      'sizes': 10.0 ** rng.integers(0, 38, (f, d)),
      'largest': np.full((f, d), np.finfo(np.float32).max),
  }


@pytest.mark.parametrize('name', sorted(set(_ALL_RULES) - _UNDEFENDED))
def test_attackers_do_not_move_the_result_out_of_the_honest_range(name):
  for n in (19, 24):
    rng = np.random.default_rng(n)
    honest = (10 + rng.normal(size=(n - _M, 6))).astype(np.float32)
    for attack, sent in _attacks(rng, _M, 6).items():
      x = rng.permutation(np.concatenate([honest, sent.astype(np.float32)]))
      result = _traced(name, 'float32')(x)
      # The geometric median may leave the range a little. The center of
      # clipping starts at 0.
      margin = 0.0
      if 'geometric' in name:
        margin = 2.0
      elif name == 'centered_clipping':
        margin = 12.0
      elif name.startswith('arc'):
        # Honest values are clipped to the length of others.
        margin = 2.0
      assert np.all(result >= honest.min(axis=0) - margin), attack
      assert np.all(result <= honest.max(axis=0) + margin), attack


@pytest.mark.parametrize(
    ('name', 'dtype', 'exponents'),
    [
        *(
            (name, 'float32', [-80, 80, 126])
            for name in _ALL_RULES
            # Scaled values are in other buckets.
            if name not in ('bucketing+median', *_WITH_A_LENGTH)
        ),
        # Rules without distances, whose squares would overflow in float64.
        *((n, 'float64', [1022]) for n in ('mean', 'trimmed_mean', 'mea_med')),
    ],
)
def test_result_scales_with_the_values(name, dtype, exponents):
  """Also where sums of the values overflow, but their mean does not."""
  aggregate = _traced(name, dtype)
  x = np.random.default_rng(0).uniform(2, 3, (19, 6)).astype(dtype)
  x[:, 3:] *= -1
  expected = aggregate(x)
  for exponent in exponents:
    # Scaling by a power of 2 does not round.
    result = np.ldexp(aggregate(np.ldexp(x, exponent)), -exponent)
    np.testing.assert_allclose(result, expected, rtol=2e-6)


def test_centered_clipping_scales_with_values_within_the_radius():
  rule = aggregators.CenteredClipping(3e38)
  x = np.random.default_rng(0).uniform(2, 3, (19, 6)).astype(np.float32)
  expected, _ = rule_calls.aggregate(rule, x)
  for exponent in (-80, 80):
    result, _ = rule_calls.aggregate(rule, np.ldexp(x, exponent))
    np.testing.assert_allclose(np.ldexp(result, -exponent), expected, rtol=2e-6)


@pytest.mark.parametrize('scale', [3e37, 1e38])
@pytest.mark.parametrize('name', ['bucketing+median', *_WITH_A_LENGTH])
def test_results_of_large_values_are_finite(name, scale):
  x = np.random.default_rng(0).uniform(2, 3, (33, 6)).astype(np.float32)
  result = _traced(name, 'float32')(np.float32(scale) * x)
  assert np.all(np.isfinite(result))


@pytest.mark.parametrize('name', _ALL_RULES)
def test_no_rows(name):
  rule = _ALL_RULES[name]
  state = rule.initial_state(4, tf.float32)
  result, after = rule_calls.aggregate(
      rule, np.zeros((0, 4), np.float32), 2, state
  )
  np.testing.assert_array_equal(result, np.zeros(4))
  assert result.dtype == np.float32
  tf.nest.map_structure(np.testing.assert_array_equal, after, state)


def test_centered_clipping_continues_from_the_last_result():
  rule = aggregators.CenteredClipping(0.5, 2)
  center, state = np.zeros(4), None
  for seed in range(4):
    x = np.random.default_rng(seed).normal(1.0, 1.0, size=(6, 4))
    result, state = rule_calls.aggregate(rule, x, state=state)
    center = numpy_rules.clipped(x, center, 0.5, 2)
    np.testing.assert_allclose(result, center, rtol=1e-12)
    np.testing.assert_array_equal(state, result)


def test_centered_clipping_of_the_center_itself():
  result, _ = rule_calls.aggregate(
      aggregators.CenteredClipping(1.0), np.zeros((3, 2))
  )
  np.testing.assert_array_equal(result, [0, 0])


def _high_dimensional(offset=0.0):
  """Returns float32 rows whose distances take float32 products."""
  rng = np.random.default_rng(5)
  x = offset + rng.normal(size=(24, 3000)) * np.linspace(0.9, 1.1, 24)[:, None]
  return rng.permutation(x).astype(np.float32)


@pytest.mark.parametrize(
    'name',
    ['krum', 'multi_krum', 'nnm+mean', 'mda', 'monna', 'bulyan', 'smea'],
)
@pytest.mark.parametrize('offset', [0.0, 2.0, 1e3])
def test_choice_of_float32_values_is_right(name, offset):
  """Far from the origin, the digits of float32 products cancel."""
  x = _high_dimensional(offset)
  f = {'mda': 2, 'smea': 1}.get(name, _M)  # NumPy would take hours.
  aggregate = _traced(name, 'float32', x.shape[1])
  found = aggregate(x, _M - f)
  np.testing.assert_allclose(found, _truth(name, x, f), rtol=1e-6, atol=1e-6)
  # Each time the same bits.
  np.testing.assert_array_equal(aggregate(x, _M - f), found)


def test_krum_of_nearly_equal_values_far_from_the_origin():
  """The distances are far below the rounding of float32 squares."""
  x = np.full((9, 50), 1000, np.float32)
  rng = np.random.default_rng(0)
  steps = rng.integers(-3, 4, size=(9, 50)) * np.arange(1, 10)[:, None]
  x += np.float32(2**-10) * steps[rng.permutation(9)].astype(np.float32)
  np.testing.assert_array_equal(
      rule_calls.aggregate(aggregators.Krum(2), x)[0], _truth('krum', x, 2)
  )


@pytest.mark.parametrize('name', ['geometric_median', 'caf'])
@pytest.mark.parametrize('offset', [0.0, 2.0, 1e3])
def test_weights_of_float32_values(name, offset):
  x = _high_dimensional(offset)
  x[:3] += 1
  exact = _traced(name, 'float64', x.shape[1])(x.astype(np.float64))
  aggregate = _traced(name, 'float32', x.shape[1])
  found = aggregate(x)
  np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-5)
  np.testing.assert_array_equal(aggregate(x), found)


@pytest.mark.parametrize(
    'name',
    [
        *(name for name in rules.RULES if name != 'mean'),
        *('nnm+mean', 'arc+mean', 'nnm+krum', 'clipping+krum'),
    ],
)
def test_too_few_clients(name):
  def create(f, num_clients):
    return rule_calls.build(name, f, num_clients=num_clients)

  for f in (0, 2):
    needed = 2 * f + (3 if 'krum' in name else 1)
    if name == 'bulyan':
      needed = 4 * f + 3
    create(f, needed)
    rule = create(f, None)
    x = np.random.default_rng(f).normal(size=(needed, 3))
    rule_calls.aggregate(rule, x)
    if needed == 1:
      continue
    with pytest.raises(
        ValueError, match=f' {needed - 1} clients.*at least {needed}'
    ):
      create(f, needed - 1)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
      rule_calls.aggregate(rule, x[1:])
    for part in (
        f'num_byzantine={f} has to tolerate {f} attackers',
        f'needs at least {needed} of these clients, but there are {needed - 1}',
    ):
      assert part in str(error.value)
    if f:
      # A dropped client is one of the attackers.
      rule_calls.aggregate(rule, x[1:], num_dropped=1)


def test_error_message_says_what_is_allowed():
  with pytest.raises(
      ValueError, match='num_byzantine=4 .*Krum.* 9 clients.*at most 3'
  ):
    aggregators.Krum(4, num_clients=9)
  with pytest.raises(ValueError, match='Krum.* another rule'):
    aggregators.Krum(1, num_clients=2)


def test_multi_krum_needs_enough_clients_to_select():
  aggregators.MultiKrum(2, 8, num_clients=10)
  with pytest.raises(ValueError, match='at least 11'):
    aggregators.MultiKrum(2, 9, num_clients=10)
  with pytest.raises(tf.errors.InvalidArgumentError, match='MultiKrum'):
    rule_calls.aggregate(aggregators.MultiKrum(2, 9), np.zeros((10, 2)))


def test_more_clients_than_num_clients_are_an_error():
  rule = aggregators.TrimmedMean(1, num_clients=4)
  with pytest.raises(
      tf.errors.InvalidArgumentError, match='was made for num_clients=4'
  ):
    rule_calls.aggregate(rule, np.zeros((5, 2)))


@pytest.mark.parametrize('most_single', [0, 200])
@pytest.mark.parametrize('name', ['median', 'trimmed_mean', 'mea_med'])
def test_columns_are_processed_in_blocks(name, most_single, monkeypatch):
  monkeypatch.setattr(order_statistics, '_MOST_SINGLE_ROWS', most_single)
  monkeypatch.setattr(order_statistics, '_OPERAND_BYTES', 64)
  rule = _ALL_RULES[name]
  for num_columns in (7, 8, 9, 50):
    x = np.random.default_rng(num_columns).normal(size=(11, num_columns))
    result, _ = rule_calls.aggregate(rule, x)
    np.testing.assert_allclose(result, _truth(name, x, _M), rtol=1e-12)


@pytest.mark.parametrize('name', ['median', 'trimmed_mean', 'mea_med'])
def test_many_clients(name):
  """210 clients have a network of matrices; a few may be missing."""
  known = rule_calls.build(name, _M, num_clients=210)
  for num_rows in (190, 210):
    x = np.random.default_rng(num_rows).normal(size=(num_rows, 5))
    result, _ = rule_calls.aggregate(known, x)
    np.testing.assert_allclose(result, _truth(name, x, _M), rtol=1e-12)


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', ['median', 'trimmed_mean', 'mea_med'])
def test_result_does_not_depend_on_num_clients(name, dtype, monkeypatch):
  """Up to 3 of the 12 clients are missing in the round."""
  # In blocks of 8 bytes: 2 columns, or 1.
  monkeypatch.setattr(order_statistics, '_OPERAND_BYTES', 16)
  monkeypatch.setattr(aligned_arrays, 'ALIGNMENT', 8)
  known = rule_calls.build(name, _M, num_clients=12)
  aggregate = rule_calls.traced(known, dtype, 6)
  for num_rows in (9, 10, 12):
    rng = np.random.default_rng(num_rows)
    values = (3 * rng.normal(size=(num_rows, 6))).astype(dtype)
    np.testing.assert_allclose(
        aggregate(values),
        _truth(name, values, _M),
        rtol=1e-12 if dtype == 'float64' else 1e-5,
        atol=0 if dtype == 'float64' else 1e-6,
    )


@pytest.mark.parametrize(
    ('name', 'x', 'expected'),
    [
        ('mean', [[1, 2], [3, 4], [8, 0]], [4, 2]),
        ('median', [[1, 2], [3, 4], [8, 0]], [3, 2]),
        ('trimmed_mean', [[1, 2], [3, 4], [8, 0], [5, 9]], [4, 3]),
        ('mea_med', [[0], [3], [4], [5], [100]], [3]),
        ('geometric_median', [[0, 0], [1, 0], [0, 1], [100, 100]], [0.5, 0.5]),
        ('mda', [[0], [2], [9]], [1]),
        ('monna', [[9], [2], [0]], [1]),
        # The weights are 1 - 16/36, 1 - 4/36 and 0.
        ('caf', [[0], [2], [10]], [2 * 32 / (20 + 32)]),
        ('smea', [[0], [2], [9]], [1]),
        ('bulyan', [[0], [1], [2], [3], [4], [5], [100]], [2]),
        # Examples of ByzFL.
        ('monna', [[1, 2, 3], [7, 8, 9], [4, 5, 6]], [2.5, 3.5, 4.5]),
        ('caf', [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [4, 5, 6]),
        ('smea', [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [2.5, 3.5, 4.5]),
        # ByzFL divides 0 by 0 for equal values.
        ('smea', [[5], [1], [1], [1]], [1]),
    ],
)
def test_examples_of_the_docstrings(name, x, expected):
  """With f = 1, and the last client trusted."""
  result, _ = rule_calls.aggregate(
      rule_calls.build(name, 1), np.array(x, np.float64)
  )
  np.testing.assert_allclose(
      result, expected, atol=0.02 if name == 'geometric_median' else 1e-12
  )
