"""Robust rules on matrices, against NumPy."""

import functools
import itertools

import numpy as np
import pytest
import rule_calls
import tensorflow as tf

from tff_bn import aggregators
from tff_bn.aggregators import order_statistics

_RULES = rule_calls.RULES
_M = rule_calls.MAX_BYZANTINE


@functools.cache
def _traced(name, dtype, num_columns=6):
  """Traces a rule for any number of rows and dropped clients."""
  rule = _RULES[name]
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


# The rules' definitions in plain NumPy.


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


def _first_least(x, f, measure):
  """The mean of the first n - f rows, in lexicographic order, that minimize."""
  rows = itertools.combinations(range(len(x)), len(x) - f)
  return x[list(min(rows, key=measure))].mean(axis=0)


def _minimum_diameter(x, f):
  squared = _squared_distances(x)
  return _first_least(x, f, lambda s: squared[np.ix_(s, s)].max())


def _smallest_eigenvalue(x, f):
  def largest(rows):
    centered = x[list(rows)] - x[list(rows)].mean(axis=0)
    # Rounding must not choose between sets with the same eigenvalue.
    return np.linalg.norm(centered, 2).round(9)

  return _first_least(x, f, largest)


def _near_first(x, f):
  lengths = np.linalg.norm(x - x[0], axis=1)
  return x[np.argsort(lengths, kind='stable')[: len(x) - f]].mean(axis=0)


def _filtered(x, f):
  weights, best, least = np.ones(len(x)), x.mean(axis=0), np.inf
  while weights.sum() > len(x) - 2 * f:
    mean = weights @ x / weights.sum()
    covariance = (weights * (x - mean).T) @ (x - mean) / weights.sum()
    eigenvalues, vectors = np.linalg.eigh(covariance)
    if eigenvalues[-1] < least:
      best, least = mean, eigenvalues[-1]
    tau = ((x - mean) @ vectors[:, -1]) ** 2
    most = tau[weights > 0].max()
    if not most:
      break
    weights = weights * np.maximum(1 - tau / most, 0)
  return best


def _bulyan(x, f):
  left, selected = list(range(len(x))), []
  while len(selected) < len(x) - 2 * f:
    num_near = max(len(left) - f - 2, 1)
    scores = []
    for i in left:
      others = sorted(np.sum((x[i] - x[j]) ** 2) for j in left if j != i)
      scores.append(sum(others[:num_near]))
    selected.append(left.pop(np.argmin(scores)))
  return _mea_med(x[selected], 2 * f)


def _shortened(x, f):
  lengths = np.linalg.norm(x, axis=1)
  longest = np.sort(lengths)[::-1][2 * f * (len(x) - f) // len(x)]
  return x * np.minimum(1, longest / lengths)[:, np.newaxis]


# The definitions as functions of the rows and `num_byzantine`.
_DEFINITIONS = {
    'mean': lambda x, f: x.mean(axis=0),
    'median': lambda x, f: np.median(x, axis=0),
    'trimmed_mean': _trimmed_mean,
    'mea_med': _mea_med,
    'krum': lambda x, f: x[_krum_order(x, f)[0]],
    'multi_krum': lambda x, f: x[_krum_order(x, f)[: len(x) - f]].mean(axis=0),
    'multi_krum_of_3': lambda x, f: x[_krum_order(x, f)[:3]].mean(axis=0),
    'centered_clipping': lambda x, f: _clipped(x, np.zeros(x.shape[1]), 4.0, 3),
    'nnm_mean': lambda x, f: _mixed(x, f).mean(axis=0),
    'nnm_trimmed_mean': lambda x, f: _trimmed_mean(_mixed(x, f), f),
    'nnm_krum': lambda x, f: _mixed(x, f)[_krum_order(_mixed(x, f), f)[0]],
    'mda': _minimum_diameter,
    'monna': _near_first,
    'caf': _filtered,
    'smea': _smallest_eigenvalue,
    'bulyan': _bulyan,
    'clipping_trimmed_mean': lambda x, f: _trimmed_mean(
        x * np.minimum(1, 5 / np.linalg.norm(x, axis=1))[:, np.newaxis], f
    ),
    'arc_trimmed_mean': lambda x, f: _trimmed_mean(_shortened(x, f), f),
    'arc_krum': lambda x, f: _shortened(x, f)[
        _krum_order(_shortened(x, f), f)[0]
    ],
}
# `monna` trusts the first client, and static clipping does not scale.
_UNDEFENDED = {'mean', 'nnm_mean', 'monna', 'clipping_trimmed_mean'}


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', _DEFINITIONS)
def test_equals_numpy(name, dtype):
  rule, expected = _RULES[name], _DEFINITIONS[name]
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


@pytest.mark.parametrize('name', _RULES)
def test_eager_and_traced_are_the_same(name):
  rule = _RULES[name]
  for n, num_dropped in ((19, 0), (24, 2), (3, 4), (0, 1)):
    x = np.random.default_rng(n).normal(size=(n, 6))
    eager, _ = rule_calls.aggregate(rule, x, num_dropped)
    np.testing.assert_allclose(
        _traced(name, 'float64')(x, num_dropped), eager, rtol=1e-9, atol=1e-12
    )


# Several sets may have the smallest diameter.
@pytest.mark.parametrize('name', sorted(set(_RULES) - {'monna', 'mda'}))
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


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', sorted(set(_RULES) - _UNDEFENDED))
def test_attackers_do_not_move_the_result_out_of_the_honest_range(name, dtype):
  for n in (19, 24):
    rng = np.random.default_rng(n)
    honest = (10 + rng.normal(size=(n - _M, 6))).astype(dtype)
    for attack, sent in _attacks(rng, _M, 6).items():
      x = rng.permutation(np.concatenate([honest, sent.astype(dtype)]))
      result = _traced(name, dtype)(x)
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
            (name, np.float32, (-80, 80, 126))
            for name in sorted(set(_RULES) - {'clipping_trimmed_mean'})
        ),
        # Rules without distances, whose squares would overflow in float64.
        *(
            (n, np.float64, (1022,))
            for n in ('mean', 'trimmed_mean', 'mea_med')
        ),
    ],
)
def test_result_scales_with_the_values(name, dtype, exponents):
  """The sums of the largest values overflow, but not their means."""
  rule = _RULES[name]
  if name == 'centered_clipping':
    rule = aggregators.CenteredClipping(1e60)
  x = np.random.default_rng(0).normal(size=(19, 6)).clip(-3, 3).astype(dtype)
  expected, _ = rule_calls.aggregate(rule, x)
  for exponent in exponents:
    # Scaling by a power of 2 does not round.
    result, _ = rule_calls.aggregate(rule, np.ldexp(x, exponent))
    assert np.all(np.isfinite(result))
    if 'bucketing' not in name:  # Scaled values have other hashes.
      np.testing.assert_allclose(
          np.ldexp(result, -exponent), expected, rtol=2e-6
      )


@pytest.mark.parametrize('name', _RULES)
def test_no_rows(name):
  rule = _RULES[name]
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
    center = _clipped(x, center, 0.5, 2)
    np.testing.assert_allclose(result, center, rtol=1e-12)
    np.testing.assert_array_equal(state, result)


def test_centered_clipping_of_the_center_itself():
  result, _ = rule_calls.aggregate(
      aggregators.CenteredClipping(1.0), np.zeros((3, 2))
  )
  np.testing.assert_array_equal(result, [0, 0])


def test_dropped_clients_are_byzantine():
  x = np.sort(np.random.default_rng(0).normal(size=(5, 3)), axis=0)
  rule = aggregators.TrimmedMean(2)
  for num_dropped, f in ((0, 2), (1, 1), (2, 0), (3, 0), (9, 0)):
    result, _ = rule_calls.aggregate(rule, x, num_dropped)
    np.testing.assert_allclose(result, x[f : 5 - f].mean(axis=0))


def _high_dimensional(offset=0.0):
  """Returns float32 rows whose distances take float32 products."""
  rng = np.random.default_rng(5)
  x = offset + rng.normal(size=(24, 3000)) * np.linspace(0.9, 1.1, 24)[:, None]
  return rng.permutation(x).astype(np.float32)


@pytest.mark.parametrize(
    'name',
    [
        *('krum', 'multi_krum', 'nnm_mean', 'mda', 'monna', 'bulyan', 'smea'),
        *('caf', 'geometric_median'),
    ],
)
@pytest.mark.parametrize('offset', [0.0, 2.0, 20.0, 1e3])
def test_choice_of_float32_values_is_right(name, offset):
  """Far from the origin, the digits of float32 products cancel."""
  x = _high_dimensional(offset)
  x[:3] += 1  # Attackers.
  exact, _ = rule_calls.aggregate(_RULES[name], x.astype(np.float64))
  found, _ = rule_calls.aggregate(_RULES[name], x)
  np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-5)


def test_krum_of_nearly_equal_values_far_from_the_origin():
  """The distances are far below the rounding of float32 squares."""
  x = np.full((9, 50), 1000, np.float32)
  rng = np.random.default_rng(0)
  steps = rng.integers(-3, 4, size=(9, 50)) * np.arange(1, 10)[:, None]
  x += np.float32(2**-10) * steps[rng.permutation(9)].astype(np.float32)
  rule, expected = aggregators.Krum(2), _DEFINITIONS['krum']
  np.testing.assert_array_equal(
      rule_calls.aggregate(rule, x)[0], expected(x.astype(np.float64), 2)
  )


@pytest.mark.parametrize('name', _RULES)
def test_same_bits_each_time(name):
  x = _high_dimensional()
  state = _RULES[name].initial_state(3000, tf.float32)
  first, *others = [
      rule_calls.aggregate(_RULES[name], x, 0, state)[0] for _ in range(3)
  ]
  for other in others:
    np.testing.assert_array_equal(other, first)


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
    'mda': lambda f, n: aggregators.MinimumDiameterAveraging(f, num_clients=n),
    'monna': lambda f, n: aggregators.NearestNeighborAveraging(
        f, num_clients=n
    ),
    'caf': lambda f, n: aggregators.CovarianceBoundAgnosticFilter(
        f, num_clients=n
    ),
    'smea': lambda f, n: aggregators.SmallestMaximumEigenvalueAveraging(
        f, num_clients=n
    ),
    'bulyan': lambda f, n: aggregators.Bulyan(f, num_clients=n),
    'arc': lambda f, n: aggregators.AdaptiveRobustClipping(
        aggregators.Mean(), f, num_clients=n
    ),
    'clipping_of_krum': lambda f, n: aggregators.StaticClipping(
        aggregators.Krum(f), 1.0, num_clients=n
    ),
    'nnm_of_krum': lambda f, n: aggregators.NearestNeighborMixing(
        aggregators.Krum(f), 0, num_clients=n
    ),
}


@pytest.mark.parametrize('name', _CREATE)
def test_too_few_clients(name):
  create = _CREATE[name]
  for f in range(4):
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
            lambda: aggregators.StaticClipping(aggregators.Mean(), 0.0),
            'max_norm=0.0 of StaticClipping must be a positive',
        ),
        (
            lambda: aggregators.NearestNeighborAveraging(1, 0.5),
            'trusted_client=0.5 of NearestNeighborAveraging',
        ),
        (
            lambda: aggregators.NearestNeighborAveraging(1, -6, num_clients=5),
            'trusted_client=-6 .* not among 5 clients; use -5 to 4',
        ),
        (
            lambda: aggregators.MinimumDiameterAveraging(25),
            'num_byzantine=25 .* too long; use at most 24',
        ),
        (
            lambda: aggregators.SmallestMaximumEigenvalueAveraging(
                5, num_clients=100
            ),
            'compares 75287520 sets of 100 clients; use num_byzantine of at'
            ' most 2',
        ),
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
      lambda rule: aggregators.StaticClipping(rule, 1.0),
      lambda rule: aggregators.AdaptiveRobustClipping(rule, 1),
  ):
    with pytest.raises(TypeError, match='CoordinateMedian, TrimmedMean'):
      wrap('median')
    with pytest.raises(TypeError, match='Krum'):
      wrap(aggregators.Krum)


def test_numpy_integers_are_integers():
  assert aggregators.TrimmedMean(np.int64(2)).num_byzantine == 2


def test_more_clients_than_num_clients_are_an_error():
  rule = aggregators.TrimmedMean(1, num_clients=4)
  with pytest.raises(
      tf.errors.InvalidArgumentError, match='was made for num_clients=4'
  ):
    rule_calls.aggregate(rule, np.zeros((5, 2)))


@pytest.mark.parametrize('most_single', [0, 128])
@pytest.mark.parametrize('name', ['median', 'trimmed_mean', 'mea_med'])
def test_columns_are_processed_in_blocks(name, most_single, monkeypatch):
  monkeypatch.setattr(order_statistics, '_MOST_SINGLE_ROWS', most_single)
  monkeypatch.setattr(order_statistics, '_OPERAND_BYTES', 64)
  rule, expected = _RULES[name], _DEFINITIONS[name]
  for num_columns in (7, 8, 9, 50):
    x = np.random.default_rng(num_columns).normal(size=(11, num_columns))
    result, _ = rule_calls.aggregate(rule, x)
    np.testing.assert_allclose(result, expected(x, _M), rtol=1e-12)


@pytest.mark.parametrize('name', ['median', 'trimmed_mean', 'mea_med'])
def test_many_clients(name):
  """150 clients have a network of matrices; a few may be missing."""
  rule, expected = _RULES[name], _DEFINITIONS[name]
  known = type(rule)(_M, num_clients=150)
  for num_rows in (131, 150):
    x = np.random.default_rng(num_rows).normal(size=(num_rows, 5))
    result, _ = rule_calls.aggregate(known, x)
    np.testing.assert_allclose(result, expected(x, _M), rtol=1e-12)


@pytest.mark.parametrize('num_rows', [9, 10, 12])
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', ['median', 'trimmed_mean', 'mea_med'])
def test_result_does_not_depend_on_num_clients(
    name, dtype, num_rows, monkeypatch
):
  """Up to 3 of the 12 clients are missing in the round."""
  # In blocks of 4 and 2, or 2 columns.
  monkeypatch.setattr(order_statistics, '_OPERAND_BYTES', 16)
  rng = np.random.default_rng(num_rows)
  values = (3 * rng.normal(size=(num_rows, 6))).astype(dtype)
  rule, truth = _RULES[name], _DEFINITIONS[name]
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
