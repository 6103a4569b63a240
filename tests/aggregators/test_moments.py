"""The aggregators of batch normalization statistics, against NumPy."""

import collections
import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import numpy_rules
import pytest
import rule_calls
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators

pytestmark = pytest.mark.usefixtures('in_process_runtime')


def _type(*sizes, dtype=np.float64):
  return tff.to_type(
      [aggregators.layer_moments_type(size, dtype) for size in sizes]
  )


def _aggregate(process, clients):
  return process.next(process.initialize(), clients).result


def _assert_close(found, expected, rtol=1e-12, atol=0.0):
  for layer, truth in zip(found, expected, strict=True):
    for value, other in zip(layer, truth, strict=True):
      np.testing.assert_allclose(value, other, rtol=rtol, atol=atol)


@pytest.fixture(scope='module')
def pooled():
  return aggregators.PooledMomentsFactory().create(_type(2))


@pytest.fixture(scope='module')
def naive():
  return aggregators.NaiveMomentsFactory().create(_type(2))


def _moments_of(x):
  return aggregators.layer_moments(float(len(x)), x.mean(0), x.var(0))


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    offset=st.floats(-1e6, 1e6),
    seed=st.integers(0, 2**31),
)
def test_pooled_equals_moments_of_the_union(pooled, sizes, offset, seed):
  rng = np.random.default_rng(seed)
  data = [
      rng.normal(offset + rng.normal(0, 5), rng.uniform(0, 3), (size, 2))
      for size in sizes
  ]
  union = np.concatenate(data)

  (result,) = _aggregate(pooled, [[_moments_of(x)] for x in data])

  assert result.count == len(union)
  # The mean of values of both signs can be near 0.
  np.testing.assert_allclose(result.mean, union.mean(0), rtol=1e-12, atol=1e-12)
  # Rounding of the mean limits the accuracy of the variance.
  np.testing.assert_allclose(
      result.variance, union.var(0), rtol=1e-9, atol=1e-9
  )


@pytest.mark.parametrize('name', ['naive', 'pooled'])
def test_moments_with_count_zero_are_ignored(name, request):
  process = request.getfixturevalue(name)
  real = aggregators.layer_moments(2.0, np.array([3.0, 4]), np.array([5.0, 6]))
  empty = aggregators.layer_moments(
      0.0, np.array([1e9, 1e9]), np.array([1e9, 1e9])
  )
  _assert_close(_aggregate(process, [[empty], [real], [empty]]), [real])
  nothing = _aggregate(process, [[empty], [empty]])
  _assert_close(nothing, [(0, [0, 0], [0, 0])])


def test_pooled_does_not_cancel_in_float32():
  process = aggregators.PooledMomentsFactory().create(
      _type(2, dtype=np.float32)
  )
  rng = np.random.default_rng(0)
  data = [rng.normal(3000, 0.5, (64, 2)) for _ in range(8)]
  clients = [
      [
          aggregators.layer_moments(
              np.float32(64),
              x.mean(0).astype(np.float32),
              x.var(0).astype(np.float32),
          )
      ]
      for x in data
  ]
  (result,) = _aggregate(process, clients)
  np.testing.assert_allclose(
      result.variance, np.concatenate(data).var(0), rtol=1e-3
  )


@pytest.mark.parametrize(
    'factory',
    [aggregators.NaiveMomentsFactory, aggregators.PooledMomentsFactory],
)
def test_other_types_are_an_error(factory):
  vector = tff.TensorType(np.float32, [2])
  for wrong in (vector, tff.to_type([vector]), tff.to_type([(vector, vector)])):
    with pytest.raises(TypeError, match='a list of <count, mean, variance>'):
      factory().create(wrong)


@pytest.mark.parametrize('rule', [None, aggregators.Mean()])
def test_moments_in_another_container(rule):
  value_type = [
      collections.OrderedDict(
          count=np.float64, mean=(np.float64, [2]), variance=(np.float64, [2])
      )
  ]
  process = aggregators.PooledMomentsFactory(rule).create(
      tff.to_type(value_type)
  )
  client = _moments_of(np.array([[1.0, 2], [3, 6]]))
  (result,) = _aggregate(process, [[client._asdict()], [client]])
  assert isinstance(result, type(client))
  _assert_close([result], [(4, [2, 4], [1, 4])])


_BETA = 0.25


def _clients(num_clients, sizes=(2, 3), seed=0, dtype=np.float64):
  """Moments of layers of different sizes, with different counts."""
  rng = np.random.default_rng(seed)
  return [
      [
          aggregators.layer_moments(
              dtype(rng.integers(2, 30)),
              rng.normal(3, 2, size).astype(dtype),
              rng.uniform(0.5, 4, size).astype(dtype),
          )
          for size in sizes
      ]
      for _ in range(num_clients)
  ]


def _stack(clients, layer, name):
  return np.stack([getattr(client[layer], name) for client in clients])


def _factors(count):
  return {
      'NaiveMomentsFactory': 0,
      'PooledMomentsFactory': 1,
      'FbnMomentsFactory': count / ((count - 1) * _BETA),
  }


@functools.cache
def _process(name, rule=None, *, dtype=np.float64, **more):
  momentum = () if name != 'FbnMomentsFactory' else (1 - _BETA,)
  factory = getattr(aggregators, name)(*momentum, rule, **more)
  return factory.create(_type(2, 3, dtype=dtype))


_NAMES = tuple(_factors(2.0))


@pytest.mark.parametrize('name', _NAMES)
def test_weighted_means_and_a_factor_of_the_spread(name):
  clients, truth = _clients(6), []
  for layer in range(2):
    counts = _stack(clients, layer, 'count')[:, np.newaxis]
    shares = counts / counts.sum()
    means = _stack(clients, layer, 'mean')
    mean = (shares * means).sum(0)
    variance = (shares * _stack(clients, layer, 'variance')).sum(0)
    spread = (shares * (means - mean) ** 2).sum(0)
    factor = _factors(counts.sum())[name]
    truth.append((counts.sum(), mean, variance + factor * spread))
  _assert_close(_aggregate(_process(name), clients), truth)


def _robust_truth(clients, factor_name, aggregate):
  """R' = Agg(r), S' = Agg(s) + c Agg((r - R')²) on all layers as one vector."""
  layers = range(len(clients[0]))
  means = np.concatenate([_stack(clients, i, 'mean') for i in layers], 1)
  variances = np.concatenate(
      [_stack(clients, i, 'variance') for i in layers], 1
  )
  both = aggregate(np.concatenate([means, variances], 1))
  mean, variance = np.split(both, 2)
  spread = aggregate((means - mean) ** 2)
  result, start = [], 0
  for i in layers:
    count = _stack(clients, i, 'count').sum()
    size = clients[0][i].mean.size
    part = slice(start, start + size)
    start += size
    factor = _factors(count)[factor_name]
    result.append((count, mean[part], variance[part] + factor * spread[part]))
  return result


def _clipped_mixed_median(x):
  return np.median(numpy_rules.mixed(numpy_rules.shortened(x, 2), 2), 0)


@pytest.mark.parametrize(
    ('name', 'rule', 'aggregate'),
    [
        *((name, 'median', lambda x: np.median(x, 0)) for name in _NAMES),
        ('FbnMomentsFactory', 'arc+nnm+median', _clipped_mixed_median),
    ],
)
def test_rules_replace_the_mean(name, rule, aggregate):
  clients = _clients(7)
  process = _process(name, rule_calls.build(rule, 2))
  _assert_close(
      _aggregate(process, clients), _robust_truth(clients, name, aggregate)
  )


def test_a_rule_withstands_attackers_in_float32():
  honest = _clients(7, dtype=np.float32)
  rule = rule_calls.build('nnm+median', 3)
  process = _process('FbnMomentsFactory', rule, dtype=np.float32)
  for bad in (1e30, -1e30, np.nan, np.inf):
    attackers = [
        [
            aggregators.layer_moments(
                layer.count,
                np.full_like(layer.mean, bad),
                np.full_like(layer.variance, bad),
            )
            for layer in client
        ]
        for client in honest[:3]
    ]
    output = process.next(process.initialize(), attackers + honest)
    dropped = 0 if np.isfinite(bad) else 3
    assert output.measurements['num_dropped'] == dropped
    for i, layer in enumerate(output.result):
      means = _stack(honest, i, 'mean')
      variances = _stack(honest, i, 'variance')
      assert np.all(layer.mean >= means.min(0))
      assert np.all(layer.mean <= means.max(0))
      assert np.all(layer.variance >= variances.min(0))
      spread = np.ptp(means, axis=0) ** 2
      factor = _factors(layer.count)['FbnMomentsFactory']
      assert np.all(layer.variance <= variances.max(0) + factor * spread)


@pytest.mark.parametrize('rule', [None, aggregators.CoordinateMedian()])
def test_empty_clients_are_ignored_and_dropped_clients_counted(rule):
  clients = _clients(5)
  nothing, dropped = (
      [
          aggregators.layer_moments(count, layer.mean + 1e3, layer.variance)
          for layer in clients[0]
      ]
      for count in (0.0, np.nan)
  )
  process = _process('FbnMomentsFactory', rule)
  expected = _aggregate(process, clients)
  output = process.next(
      process.initialize(), [nothing, *clients[:2], dropped, *clients[2:]]
  )
  _assert_close(output.result, expected, 1e-14)
  if rule is not None:
    assert output.measurements['num_dropped'] == 1
  nobody = _aggregate(process, [nothing, dropped])
  assert all(layer.count == 0 for layer in nobody)
  assert all(np.all(layer.mean == 0) for layer in nobody)


def _replaced(clients, vector):
  """Replaces the statistics of the first three clients by a vector."""
  sizes = [layer.mean.size for layer in clients[0]]
  parts = np.split(vector, np.cumsum(2 * sizes)[:-1])
  attackers = [
      [
          aggregators.layer_moments(own.count, parts[i], parts[2 + i])
          for i, own in enumerate(client)
      ]
      for client in clients[:3]
  ]
  return attackers + clients[3:]


def _matrix(clients):
  """Returns the means and variances, one client in a row."""
  return np.concatenate(
      [
          _stack(clients, i, name)
          for name in ('mean', 'variance')
          for i in range(2)
      ],
      axis=1,
  )


def test_attack_is_applied_once_and_flips_only_the_means():
  clients = _clients(7)
  rule = aggregators.Attacked(
      aggregators.Mean(), aggregators.SignFlipping(), num_attackers=3
  )
  sent = _matrix(clients[3:]).mean(0) * ([-1] * 5 + [1] * 5)
  _assert_close(
      _aggregate(_process('FbnMomentsFactory', rule), clients),
      _robust_truth(
          _replaced(clients, sent), 'FbnMomentsFactory', lambda x: x.mean(0)
      ),
  )


def test_optimized_attack_knows_the_rule_of_the_statistics():
  clients = _clients(7)
  defense = aggregators.TrimmedMean(3, num_clients=7)
  attack = aggregators.OptimizedALittleIsEnough()
  process = _process(
      'FbnMomentsFactory', aggregators.Attacked(defense, attack, 3)
  )
  matrix = tf.constant(_matrix(clients[3:]))
  (vector,) = attack.values(
      matrix,
      1,
      tf.constant(0),
      defense=lambda x: defense.aggregate(
          tf.concat([x[:1], x[:1], x], axis=0), tf.constant(0), ()
      )[0],
  )
  assert np.linalg.norm(vector - np.mean(matrix, axis=0)) > 1
  truth = _robust_truth(
      _replaced(clients, vector.numpy()),
      'FbnMomentsFactory',
      lambda x: numpy_rules.trimmed_mean(x, 3),
  )
  _assert_close(_aggregate(process, clients), truth, 1e-9, 1e-12)


def test_infinite_statistics_are_dropped():
  clients = _clients(7)
  attacked = aggregators.Attacked(
      aggregators.CoordinateMedian(3, num_clients=7), aggregators.Infinity(), 3
  )
  _assert_close(
      _aggregate(_process('FbnMomentsFactory', attacked), clients),
      _robust_truth(
          clients[3:], 'FbnMomentsFactory', lambda x: np.median(x, 0)
      ),
  )


def test_attackers_cannot_make_a_variance_negative():
  clients = _clients(4)
  rule = aggregators.Attacked(
      aggregators.Mean(), aggregators.FallOfEmpires(9.0), num_attackers=2
  )
  process = _process('NaiveMomentsFactory', rule)
  for layer in _aggregate(process, clients):
    np.testing.assert_array_equal(layer.variance, 0 * layer.variance)
    assert np.all(layer.mean < 0)


def test_state_of_the_rule_lasts():
  """Centered clipping starts from its last result."""
  clients = _clients(5)
  process = _process('PooledMomentsFactory', aggregators.CenteredClipping(0.5))
  first = process.next(process.initialize(), clients)
  second = process.next(first.state, clients)
  lengths = [
      np.linalg.norm(np.concatenate([layer.mean for layer in output.result]))
      for output in (first, second)
  ]
  assert lengths[0] <= 0.5
  assert lengths[1] > lengths[0] + 0.1


def test_without_pooling_clients_have_the_same_weight():
  clients = _clients(4)
  process = _process('FbnMomentsFactory', pooled=False)
  truth = _robust_truth(clients, 'FbnMomentsFactory', lambda x: x.mean(0))
  _assert_close(_aggregate(process, clients), truth)


def test_each_layer_has_its_own_momentum():
  clients = _clients(4)
  process = aggregators.FbnMomentsFactory([0.5, 0.75], unbiased=False).create(
      _type(2, 3)
  )
  pooled, naive = map(_process, ('PooledMomentsFactory', 'NaiveMomentsFactory'))
  for i, (layer, with_spread, without) in enumerate(
      zip(*(_aggregate(p, clients) for p in (process, pooled, naive)))
  ):
    spread = with_spread.variance - without.variance
    np.testing.assert_allclose(
        layer.variance, without.variance + (2, 4)[i] * spread, rtol=1e-12
    )


def test_wrong_number_of_momentums_is_an_error():
  factory = aggregators.FbnMomentsFactory([0.5, 0.5, 0.5])
  with pytest.raises(ValueError, match='momentum has 3 values, .* 2 layers'):
    factory.create(_type(2, 3))


def test_rule_of_another_class_is_an_error():
  with pytest.raises(TypeError, match='rule must be a tff_bn.aggregators.Rule'):
    aggregators.FbnMomentsFactory(0.9, tff.aggregators.UnweightedMeanFactory())


@pytest.mark.parametrize(
    'factory',
    [
        aggregators.NaiveMomentsFactory(),
        aggregators.PooledMomentsFactory(),
        aggregators.FbnMomentsFactory(0.9),
    ],
    ids=['naive', 'pooled', 'fbn'],
)
def test_means_whose_sums_overflow(factory):
  """The means are finite, and all variances whose true value is finite."""
  process = factory.create(tff.to_type([aggregators.layer_moments_type(3)]))
  all_means = np.float32([[3e38, -3e38, 1], [-3e38, 3e38, 2]] * 3)
  is_naive = isinstance(factory, aggregators.NaiveMomentsFactory)
  for num_clients in (1, 2, 5):
    means = all_means[:num_clients]
    clients = [
        [aggregators.layer_moments(np.float32(8), mean, np.float32([1, 2, 3]))]
        for mean in means
    ]
    (found,) = process.next(process.initialize(), clients).result
    expected = means.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(found.mean, expected, rtol=1e-5, atol=1e32)
    is_finite = np.isfinite(found.variance)
    assert np.all(is_finite) == (is_naive or num_clients == 1)
    assert is_finite[2]
