"""Tests of the robust rules on matrices, against NumPy."""

import functools
import itertools

import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

from tff_bn import aggregators
from tff_bn.aggregators import distances
from tff_bn.aggregators import order_statistics

_MAX_BYZANTINE = 4


def _aggregate(rule, values, num_dropped=0, state=None):
  if state is None:
    state = rule.initial_state(values.shape[1], tf.as_dtype(values.dtype))
  result, state = rule.aggregate(
      tf.constant(values), tf.constant(num_dropped), state
  )
  return result.numpy(), state


@functools.cache
def _traced(name, dtype, num_columns=6):
  """One of the rules, as a function of any number of rows and dropped ones."""
  rule = _ALL_RULES[name]
  state = rule.initial_state(num_columns, tf.as_dtype(dtype))

  @tf.function(
      input_signature=[
          tf.TensorSpec([None, num_columns], dtype),
          tf.TensorSpec([], tf.int32),
      ]
  )
  def aggregate(values, num_dropped):
    return rule.aggregate(values, num_dropped, state)[0]

  assert aggregate.get_concrete_function().structured_outputs.shape == [
      num_columns
  ]
  return lambda values, num_dropped=0: aggregate(values, num_dropped).numpy()


# What the rules are, written down again as slowly and plainly as possible.


def _squared_distances(x):
  return ((x[:, np.newaxis] - x[np.newaxis]) ** 2).sum(axis=2)


def _trimmed_mean(x, f):
  return np.array([np.sort(c)[f : len(c) - f].mean() for c in x.T])


def _mea_med(x, f):
  result = []
  for column in x.T:
    ascending = np.sort(column)
    nearest = np.argsort(np.abs(ascending - np.median(column)), kind='stable')
    result.append(ascending[nearest[: len(column) - f]].mean())
  return np.array(result)


def _krum_order(x, f):
  scores = []
  for i in range(len(x)):
    others = [np.sum((x[i] - x[j]) ** 2) for j in range(len(x)) if j != i]
    scores.append(sum(sorted(others)[: len(x) - f - 2]))
  return np.argsort(scores, kind='stable')


def _mixed(x, f):
  rows = []
  for i in range(len(x)):
    lengths = [np.linalg.norm(x[i] - y) for y in x]
    rows.append(x[np.argsort(lengths, kind='stable')[: len(x) - f]].mean(0))
  return np.array(rows)


def _clipped(x, center, radius, num_iterations):
  for _ in range(num_iterations):
    steps = []
    for row in x:
      length = np.linalg.norm(row - center)
      steps.append((row - center) * (min(1, radius / length) if length else 1))
    center = center + np.mean(steps, axis=0)
  return center


_M = _MAX_BYZANTINE
# The rule, and what it is in NumPy, given the rows and the number of attackers.
_RULES = {
    'mean': (aggregators.Mean(), lambda x, f: x.mean(axis=0)),
    'median': (
        aggregators.CoordinateMedian(_M),
        lambda x, f: np.median(x, axis=0),
    ),
    'trimmed_mean': (aggregators.TrimmedMean(_M), _trimmed_mean),
    'mea_med': (aggregators.MeaMed(_M), _mea_med),
    'krum': (aggregators.Krum(_M), lambda x, f: x[_krum_order(x, f)[0]]),
    'multi_krum': (
        aggregators.MultiKrum(_M),
        lambda x, f: x[_krum_order(x, f)[: len(x) - f]].mean(axis=0),
    ),
    'multi_krum_of_3': (
        aggregators.MultiKrum(_M, 3),
        lambda x, f: x[_krum_order(x, f)[:3]].mean(axis=0),
    ),
    'centered_clipping': (
        aggregators.CenteredClipping(4.0, 3, _M),
        lambda x, f: _clipped(x, np.zeros(x.shape[1]), 4.0, 3),
    ),
    'nnm_mean': (
        aggregators.NearestNeighborMixing(aggregators.Mean(), _M),
        lambda x, f: _mixed(x, f).mean(axis=0),
    ),
    'nnm_trimmed_mean': (
        aggregators.NearestNeighborMixing(aggregators.TrimmedMean(_M), _M),
        lambda x, f: _trimmed_mean(_mixed(x, f), f),
    ),
    'nnm_krum': (
        aggregators.NearestNeighborMixing(aggregators.Krum(_M), _M),
        lambda x, f: _mixed(x, f)[_krum_order(_mixed(x, f), f)[0]],
    ),
}
# Those that are compared with no formula.
_ALL_RULES = {
    **{name: rule for name, (rule, _) in _RULES.items()},
    'geometric_median': aggregators.GeometricMedian(_M),
    'nnm_geometric_median': aggregators.NearestNeighborMixing(
        aggregators.GeometricMedian(_M), _M
    ),
    'bucketing_median': aggregators.Bucketing(
        aggregators.CoordinateMedian(_M), 2
    ),
}
_UNDEFENDED = {'mean', 'nnm_mean'}


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', _RULES)
def test_equals_numpy(name, dtype):
  rule, expected = _RULES[name]
  tolerance = 1e-12 if dtype == 'float64' else 2e-6
  checked = 0
  for n, f in itertools.product([1, 2, 3, 4, 7, 12, 33], range(_M + 1)):
    if n < rule.min_clients(f) or n < 2 * f + 1:
      continue
    if 'krum' in name and n < 2 * f + 3:
      continue
    rng = np.random.default_rng([n, f])
    # Wide in some columns, and with an offset in others.
    x = rng.normal(size=(n, 6)) * [1, 1, 3, 0.1, 1, 1] + [0, 0, 0, 0, 5, -2]
    x = x.astype(dtype)
    result = _traced(name, dtype)(x, _M - f)
    assert result.dtype == dtype
    np.testing.assert_allclose(
        result,
        expected(x.astype(np.float64), f),
        rtol=tolerance,
        atol=tolerance,
        err_msg=f'n={n}, f={f}',
    )
    checked += 1
  assert checked >= 7


@pytest.mark.parametrize('most_unrolled', [0, 128])
@pytest.mark.parametrize('name', ['median', 'trimmed_mean', 'mea_med'])
def test_columns_are_processed_in_blocks(name, most_unrolled, monkeypatch):
  monkeypatch.setattr(order_statistics, '_MOST_UNROLLED_ROWS', most_unrolled)
  monkeypatch.setattr(order_statistics, '_ROW_BYTES', 64)
  monkeypatch.setattr(order_statistics, '_UNROLLED_ROW_BYTES', 64)
  rule, expected = _RULES[name]
  for num_columns in (7, 8, 9, 50):
    x = np.random.default_rng(num_columns).normal(size=(11, num_columns))
    result, _ = _aggregate(rule, x)
    np.testing.assert_allclose(result, expected(x, _M), rtol=1e-12)


@pytest.mark.parametrize('name', _ALL_RULES)
def test_eager_and_traced_are_the_same(name):
  rule = _ALL_RULES[name]
  for n, num_dropped in ((19, 0), (24, 2), (3, 4), (0, 1)):
    x = np.random.default_rng(n).normal(size=(n, 6))
    eager, _ = _aggregate(rule, x, num_dropped)
    np.testing.assert_allclose(
        _traced(name, 'float64')(x, num_dropped), eager, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize('name', _ALL_RULES)
def test_order_of_clients_makes_no_difference(name):
  aggregate = _traced(name, 'float64')
  rng = np.random.default_rng(3)
  for n in (19, 20, 130):
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


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', sorted(set(_ALL_RULES) - _UNDEFENDED))
def test_attackers_do_not_move_it_out_of_the_range(name, dtype):
  for n in (19, 24):
    rng = np.random.default_rng(n)
    honest = (10 + rng.normal(size=(n - _M, 6))).astype(dtype)
    for attack, sent in _attacks(rng, _M, 6).items():
      x = rng.permutation(np.concatenate([honest, sent.astype(dtype)]))
      result = _traced(name, dtype)(x)
      # Further than the honest ones are apart from each other: those that go by
      # distances. The center of clipping starts at 0.
      margin = 0.0
      if 'geometric' in name:
        margin = 2.0
      elif name == 'centered_clipping':
        margin = 12.0
      assert np.all(result >= honest.min(axis=0) - margin), attack
      assert np.all(result <= honest.max(axis=0) + margin), attack


@pytest.mark.parametrize('name', sorted(set(_ALL_RULES) - _UNDEFENDED))
def test_honest_values_may_be_of_any_size(name):
  rule = _ALL_RULES[name]
  if name == 'centered_clipping':
    rule = aggregators.CenteredClipping(1e60)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(19, 6)).astype(np.float32)
  expected, _ = _aggregate(rule, x)
  for exponent in (-80, 80):
    if 'bucketing' in name:  # The hash of other bits is another one.
      continue
    # A power of 2 changes no digit.
    scaled = np.ldexp(x, exponent)
    result, _ = _aggregate(rule, scaled)
    np.testing.assert_allclose(np.ldexp(result, -exponent), expected, rtol=2e-6)


def test_mean_has_no_defence():
  honest = np.random.default_rng(0).normal(size=(9, 3))
  x = np.concatenate([honest, np.full((1, 3), 1e30)])
  np.testing.assert_allclose(_aggregate(aggregators.Mean(), x)[0], 1e29)


@pytest.mark.parametrize('name', _ALL_RULES)
def test_no_rows(name):
  rule = _ALL_RULES[name]
  state = rule.initial_state(4, tf.float32)
  result, after = _aggregate(rule, np.zeros((0, 4), np.float32), 2, state)
  np.testing.assert_array_equal(result, np.zeros(4))
  assert result.dtype == np.float32
  tf.nest.map_structure(np.testing.assert_array_equal, after, state)


def _objective(z, x):
  return np.linalg.norm(x - z, axis=1).sum()


@pytest.mark.parametrize('n', [3, 4, 10, 41])
@pytest.mark.parametrize('scale', [1e-8, 1.0, 1e8])
def test_geometric_median_has_the_least_sum_of_distances(n, scale):
  rule = aggregators.GeometricMedian()
  for seed in range(3):
    rng = np.random.default_rng([n, seed])
    x = rng.normal(size=(n, 3)) * [1, 2, 5] + rng.normal(size=3)
    result, _ = _aggregate(rule, scale * x)
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
  result, _ = _aggregate(rule, line.astype(np.float64))
  np.testing.assert_allclose(result, [6, 8], atol=1e-4)
  # Most values are the same.
  same = np.array([[1, 2]] * 4 + [[5, 5], [7, 0], [1e20, 3]], np.float32)
  np.testing.assert_array_equal(_aggregate(rule, same)[0], [1, 2])
  alone = np.array([[1.5, 2.5]])
  np.testing.assert_array_equal(_aggregate(rule, alone)[0], [1.5, 2.5])


def test_geometric_median_of_far_attackers():
  # From 1e30, honest values are one point: attackers pull as if their direction
  # were all that there is.
  rng = np.random.default_rng(0)
  honest = rng.normal(size=(7, 2))
  for size in (1e6, 1e30):
    x = np.concatenate([honest, size * np.array([[1, 0], [0, 1]])])
    result, _ = _aggregate(aggregators.GeometricMedian(2), x)
    pull = np.array([1, 1])
    lengths = np.linalg.norm(honest - result, axis=1, keepdims=True)
    gradient = ((honest - result) / lengths).sum(axis=0) + pull
    np.testing.assert_allclose(gradient, 0, atol=1e-5)


def test_geometric_median_stops():
  x = np.random.default_rng(0).normal(size=(9, 3))
  exact, _ = _aggregate(aggregators.GeometricMedian(), x)
  once, _ = _aggregate(aggregators.GeometricMedian(max_iterations=1), x)
  rough, _ = _aggregate(aggregators.GeometricMedian(tolerance=1e-3), x)
  assert np.abs(once - exact).max() > 1e-3
  assert 1e-8 < np.abs(rough - exact).max() < 1e-2


def test_centered_clipping_starts_where_it_ended():
  rule = aggregators.CenteredClipping(0.5, 2)
  center, state = np.zeros(4), None
  for seed in range(4):
    x = np.random.default_rng(seed).normal(1.0, 1.0, size=(6, 4))
    result, state = _aggregate(rule, x, state=state)
    center = _clipped(x, center, 0.5, 2)
    np.testing.assert_allclose(result, center, rtol=1e-12)
    np.testing.assert_array_equal(state, result)


def test_centered_clipping_of_the_center_itself():
  result, _ = _aggregate(aggregators.CenteredClipping(1.0), np.zeros((3, 2)))
  np.testing.assert_array_equal(result, [0, 0])


class _Observed(aggregators.Rule):
  """A mean that remembers the rows; only for eager calls."""

  def __init__(self):
    super().__init__(0)
    self.rows = None

  def aggregate(self, values, num_dropped, state):
    self.rows = values.numpy()
    return tf.reduce_mean(values, axis=0), state


def _buckets(n, bucket_size, seed=0, round_num=0, order=None):
  """Which rows are in each bucket."""
  observed = _Observed()
  rule = aggregators.Bucketing(observed, bucket_size, seed)
  state = rule.initial_state(2, tf.float64)
  state['round_num'] += round_num
  x = np.array([[2.0**i, 1 / (1 + i)] for i in range(n)])
  _, after = _aggregate(rule, x if order is None else x[order], state=state)
  assert after['round_num'] == round_num + 1
  found = set()
  for mean, _ in observed.rows:
    for size in {bucket_size, n % bucket_size} - {0}:
      total = round(mean * size)
      if np.isclose(total, mean * size) and bin(total).count('1') == size:
        members = [i for i in range(n) if total >> i & 1]
        break
    else:
      raise AssertionError(f'{mean} is the mean of no bucket')
    found.add(frozenset(members))
  assert len(found) == len(observed.rows) == -(-n // bucket_size)
  assert sorted(itertools.chain(*found)) == list(range(n))
  return found


def test_buckets_are_random():
  together = np.zeros((7, 7))
  for seed in range(300):
    for bucket in _buckets(7, 3, seed):
      for i in bucket:
        for j in bucket - {i}:
          together[i, j] += 1
  # Of 21 pairs, 3 + 3 are together.
  off_diagonal = together[~np.eye(7, dtype=bool)] / 300
  assert np.all(np.abs(off_diagonal - 6 / 21) < 0.12)
  np.testing.assert_allclose(off_diagonal.mean(), 6 / 21)


def test_buckets_differ_by_round_and_not_by_order():
  rounds = {frozenset(_buckets(9, 2, round_num=r)) for r in range(20)}
  assert len(rounds) > 17
  order = np.random.default_rng(0).permutation(9)
  assert _buckets(9, 2, 5, 3) == _buckets(9, 2, 5, 3)
  assert _buckets(9, 2, 5, 3) == _buckets(9, 2, 5, 3, order)
  assert _buckets(9, 1) == {frozenset([i]) for i in range(9)}
  assert _buckets(3, 5) == {frozenset(range(3))}


@pytest.mark.parametrize('are_equal', [False, True])
def test_buckets_do_not_depend_on_how_like_values_are(are_equal):
  x = np.array([[1], [1], [2], [2]], np.float32)
  if not are_equal:
    x = np.nextafter(x, np.array([[0], [3], [0], [3]], np.float32))
  observed = _Observed()
  rule = aggregators.Bucketing(observed, 2)
  apart = 0
  for round_num in range(60):
    state = rule.initial_state(1, tf.float32)
    state['round_num'] += round_num
    _aggregate(rule, x, state=state)
    apart += np.all(np.abs(observed.rows - 1.5) < 0.1)
  assert 28 <= apart <= 52  # Expected: 40.


def test_buckets_keep_the_rules_state():
  rule = aggregators.Bucketing(aggregators.CenteredClipping(1.0), 2)
  state, center = None, np.zeros(2)
  for _ in range(3):
    result, state = _aggregate(rule, np.full((4, 2), 5.0), state=state)
    center = _clipped(np.full((2, 2), 5.0), center, 1.0, 1)
    np.testing.assert_allclose(result, center)
    np.testing.assert_allclose(state['rule'], center)


def test_dropped_clients_are_byzantine():
  x = np.sort(np.random.default_rng(0).normal(size=(5, 3)), axis=0)
  rule = aggregators.TrimmedMean(2)
  for num_dropped, f in ((0, 2), (1, 1), (2, 0), (3, 0), (9, 0)):
    result, _ = _aggregate(rule, x, num_dropped)
    np.testing.assert_allclose(result, x[f : 5 - f].mean(axis=0))


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize(
    'function', [distances.squared_distances, distances.exact_squared_distances]
)
def test_distances_where_digits_cancel(function, dtype, monkeypatch):
  monkeypatch.setattr(distances, '_BLOCK_COLUMNS', 16)
  rng = np.random.default_rng(0)
  offset = 1e3 if dtype == 'float32' else 1e6
  x = (offset + rng.normal(size=(9, 50))).astype(dtype)
  # Attackers, of the same length or far away, are not what is subtracted.
  x[2], x[5], x[7] = -x[0], 1e30, x[3]
  found = function(tf.constant(x)).numpy()
  honest = [0, 1, 3, 4, 6, 7, 8]
  expected = _squared_distances(x.astype(np.longdouble))
  np.testing.assert_allclose(
      found[np.ix_(honest, honest)],
      expected[np.ix_(honest, honest)].astype(np.float64),
      rtol=1e-9,
      atol=1e-8,
  )
  np.testing.assert_allclose(found, expected.astype(np.float64), rtol=1e-6)
  np.testing.assert_array_equal(np.diag(found), 0)


def test_distances_of_ordinary_values_take_one_product():
  x = np.random.default_rng(0).normal(size=(20, 300)).astype(np.float32)
  found = distances.squared_distances(tf.constant(x)).numpy()
  expected = _squared_distances(x.astype(np.float64))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert np.abs(found - expected).max() > 1e-9  # So it was not in float64.


def test_means_of_the_largest_numbers_are_finite():
  x = np.full((3, 5), np.finfo(np.float32).max)
  x[1] *= -1
  weights = np.array([[0.5, 0, 0.5], [1 / 3] * 3, [0, 1, 0]]) * (1 + 1e-7)
  mixed = distances.mix(tf.constant(x, tf.float32), tf.constant(weights))
  assert np.all(np.isfinite(mixed))
  assert mixed.dtype == tf.float32


_CREATE = {
    'median': lambda f, n: aggregators.CoordinateMedian(f, num_clients=n),
    'trimmed_mean': lambda f, n: aggregators.TrimmedMean(f, num_clients=n),
    'geometric': lambda f, n: aggregators.GeometricMedian(f, num_clients=n),
    'mea_med': lambda f, n: aggregators.MeaMed(f, num_clients=n),
    'clipping': lambda f, n: aggregators.CenteredClipping(
        1.0, num_byzantine=f, num_clients=n
    ),
    'nnm': lambda f, n: aggregators.NearestNeighborMixing(
        aggregators.Mean(), f, num_clients=n
    ),
    'krum': lambda f, n: aggregators.Krum(f, num_clients=n),
    'multi_krum': lambda f, n: aggregators.MultiKrum(f, num_clients=n),
    'nnm_of_krum': lambda f, n: aggregators.NearestNeighborMixing(
        aggregators.Krum(f), 0, num_clients=n
    ),
}


@pytest.mark.parametrize('name', _CREATE)
def test_too_few_clients(name):
  create = _CREATE[name]
  for f in range(4):
    needed = 2 * f + (3 if 'krum' in name else 1)
    create(f, needed)
    rule = create(f, None)
    x = np.random.default_rng(f).normal(size=(needed, 3))
    _aggregate(rule, x)
    if needed == 1:
      continue
    with pytest.raises(
        ValueError, match=f' {needed - 1} clients.*at least {needed}'
    ):
      create(f, needed - 1)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
      _aggregate(rule, x[1:])
    for part in (f'num_byzantine={f}', f'\n{needed}\n', f'\n{needed - 1}\n'):
      assert part in str(error.value)
    if f:
      # A dropped client is one of the attackers.
      _aggregate(rule, x[1:], num_dropped=1)


def test_message_says_what_is_allowed():
  with pytest.raises(
      ValueError, match='num_byzantine=4 .*Krum.* 9 clients.*at most 3'
  ):
    aggregators.Krum(4, num_clients=9)
  with pytest.raises(ValueError, match='Krum.* another rule'):
    aggregators.Krum(1, num_clients=2)


def test_multi_krum_selects_no_more_than_there_are():
  aggregators.MultiKrum(2, 8, num_clients=10)
  with pytest.raises(ValueError, match='at least 11'):
    aggregators.MultiKrum(2, 9, num_clients=10)
  with pytest.raises(tf.errors.InvalidArgumentError, match='MultiKrum'):
    _aggregate(aggregators.MultiKrum(2, 9), np.zeros((10, 2)))


def test_buckets_count_as_clients():
  aggregators.Bucketing(aggregators.TrimmedMean(2), 2, num_clients=9)
  with pytest.raises(
      ValueError, match='bucket_size=2.* 8 clients.*4 buckets.*num_byzantine'
  ):
    aggregators.Bucketing(aggregators.TrimmedMean(2), 2, num_clients=8)
  rule = aggregators.Bucketing(aggregators.TrimmedMean(2), 2)
  assert rule.num_byzantine == 2
  _aggregate(rule, np.zeros((9, 2)))
  with pytest.raises(tf.errors.InvalidArgumentError, match='TrimmedMean'):
    _aggregate(rule, np.zeros((8, 2)))


@pytest.mark.parametrize(
    'create, message',
    [
        (lambda: aggregators.TrimmedMean(-1), 'num_byzantine=-1.*TrimmedMean'),
        (lambda: aggregators.Krum(1.0), 'num_byzantine=1.0'),
        (lambda: aggregators.Krum(True), 'num_byzantine=True'),
        (lambda: aggregators.Mean(num_clients=0), 'num_clients=0'),
        (lambda: aggregators.MultiKrum(1, 0), 'num_selected=0'),
        (lambda: aggregators.CenteredClipping(0.0), 'radius=0.0.*positive'),
        (lambda: aggregators.CenteredClipping(float('nan')), 'radius=nan'),
        (lambda: aggregators.CenteredClipping(1.0, 0), 'num_iterations=0'),
        (lambda: aggregators.GeometricMedian(smoothing=0.0), 'smoothing=0.0'),
        (lambda: aggregators.GeometricMedian(tolerance=-1.0), 'tolerance=-1'),
        (lambda: aggregators.GeometricMedian(max_iterations=0), 'max_iter'),
        (
            lambda: aggregators.Bucketing(aggregators.Mean(), 0),
            'bucket_size=0.*Bucketing',
        ),
        (
            lambda: aggregators.Bucketing(aggregators.Mean(), 2, -1),
            'seed=-1',
        ),
    ],
)
def test_wrong_arguments(create, message):
  with pytest.raises(ValueError, match=message):
    create()


def test_only_rules_can_be_wrapped():
  for wrap in (
      lambda rule: aggregators.NearestNeighborMixing(rule, 1),
      lambda rule: aggregators.Bucketing(rule, 2),
  ):
    with pytest.raises(TypeError, match='CoordinateMedian, TrimmedMean'):
      wrap('median')
    with pytest.raises(TypeError, match='Krum'):
      wrap(aggregators.Krum)


def test_numpy_integers_are_integers():
  assert aggregators.TrimmedMean(np.int64(2)).num_byzantine == 2


@pytest.mark.parametrize('num_rows', [9, 10, 12])
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', ['median', 'trimmed_mean', 'mea_med'])
def test_known_number_of_clients_makes_no_difference(
    name, dtype, num_rows, monkeypatch
):
  """Of 12 clients some may be missing, of those that are known at most."""
  # In blocks of 4 and 2, or 2 columns.
  monkeypatch.setattr(order_statistics, '_UNROLLED_ROW_BYTES', 16)
  order_statistics._all_comparators.cache_clear()
  rng = np.random.default_rng(num_rows)
  values = (3 * rng.normal(size=(num_rows, 6))).astype(dtype)
  rule, truth = _RULES[name]
  known = type(rule)(_M, num_clients=12)

  @tf.function(input_signature=[tf.TensorSpec([None, 6], dtype)])
  def aggregate(values):
    return known.aggregate(values, tf.constant(0), ())[0]

  np.testing.assert_allclose(
      aggregate(values),
      truth(values.astype('float64'), _M),
      rtol=1e-12 if dtype == 'float64' else 1e-5,
      atol=0 if dtype == 'float64' else 1e-6,
  )


def test_more_clients_than_known_are_an_error():
  rule = aggregators.TrimmedMean(1, num_clients=4)
  with pytest.raises(
      tf.errors.InvalidArgumentError, match='was made for num_clients=4'
  ):
    _aggregate(rule, np.zeros((5, 2)))


@pytest.mark.parametrize('num_rows', [1, 2, 3, 7, 16, 33])
def test_sorting_networks_sort(num_rows):
  """Unrolled and as a loop."""
  rng = np.random.default_rng(num_rows)
  values = rng.integers(0, 9, (num_rows, 5)).astype('float32')

  def rows(values):
    return order_statistics.map_ordered(
        values,
        tf.range(tf.shape(values)[0]),
        lambda ordered: tf.reshape(ordered.stack(), [-1])[:5]
        + 100 * ordered.read(num_rows - 1),
    )

  expected = np.sort(values, axis=0)
  for shape in ([num_rows, 5], [None, 5]):
    traced = tf.function(
        rows, input_signature=[tf.TensorSpec(shape, tf.float32)]
    )
    np.testing.assert_array_equal(
        traced(values), expected[0] + 100 * expected[-1]
    )
