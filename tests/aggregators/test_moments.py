"""Tests of the aggregators of batch normalization statistics."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn import aggregators

pytestmark = pytest.mark.usefixtures('in_process_runtime')


def _type(num_layers, dtype=np.float64):
  return tff.to_type(
      [aggregators.layer_moments_type(2, dtype) for _ in range(num_layers)]
  )


def _aggregate(process, clients):
  return process.next(process.initialize(), clients).result


@pytest.fixture(scope='module')
def pooled():
  return aggregators.PooledMomentsFactory().create(_type(1))


@pytest.fixture(scope='module')
def naive():
  return aggregators.NaiveMomentsFactory().create(_type(1))


def _moments_of(x):
  return aggregators.layer_moments(float(len(x)), x.mean(0), x.var(0))


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    offset=st.floats(-1e6, 1e6),
    seed=st.integers(0, 2**31),
)
def test_pooled_is_the_moments_of_the_union(pooled, sizes, offset, seed):
  rng = np.random.default_rng(seed)
  data = [
      rng.normal(offset + rng.normal(0, 5), rng.uniform(0, 3), (size, 2))
      for size in sizes
  ]
  union = np.concatenate(data)

  (result,) = _aggregate(pooled, [[_moments_of(x)] for x in data])

  assert result['count'] == len(union)
  np.testing.assert_allclose(result['mean'], union.mean(0), rtol=1e-12)
  # Rounding of the mean itself limits the variance.
  np.testing.assert_allclose(
      result['variance'], union.var(0), rtol=1e-9, atol=1e-9
  )


def test_naive_is_the_weighted_mean_of_both(naive):
  clients = [
      [aggregators.layer_moments(1.0, np.array([0.0, 4]), np.array([1.0, 1]))],
      [aggregators.layer_moments(3.0, np.array([8.0, 0]), np.array([5.0, 1]))],
  ]
  (result,) = _aggregate(naive, clients)
  assert result['count'] == 4
  np.testing.assert_allclose(result['mean'], [6, 1], rtol=1e-15)
  np.testing.assert_allclose(result['variance'], [4, 1], rtol=1e-15)


def test_pooled_adds_the_spread_of_the_means(pooled):
  clients = [
      [aggregators.layer_moments(1.0, np.array([0.0, 4]), np.array([1.0, 1]))],
      [aggregators.layer_moments(3.0, np.array([8.0, 0]), np.array([5.0, 1]))],
  ]
  (result,) = _aggregate(pooled, clients)
  # 4 + (1·36 + 3·4)/4 and 1 + (1·9 + 3·1)/4.
  np.testing.assert_allclose(result['variance'], [16, 4], rtol=1e-15)


@pytest.mark.parametrize('name', ['naive', 'pooled'])
def test_moments_with_count_zero_are_ignored(name, request):
  process = request.getfixturevalue(name)
  real = aggregators.layer_moments(2.0, np.array([3.0, 4]), np.array([5.0, 6]))
  empty = aggregators.layer_moments(
      0.0, np.array([1e9, 1e9]), np.array([1e9, 1e9])
  )
  (result,) = _aggregate(process, [[empty], [real], [empty]])
  assert result['count'] == 2
  np.testing.assert_allclose(result['mean'], [3, 4])
  np.testing.assert_allclose(result['variance'], [5, 6])

  (nothing,) = _aggregate(process, [[empty], [empty]])
  assert nothing['count'] == 0
  np.testing.assert_array_equal(nothing['mean'], [0, 0])
  np.testing.assert_array_equal(nothing['variance'], [0, 0])


def test_pooled_keeps_its_digits_in_float32_where_squares_would_cancel():
  process = aggregators.PooledMomentsFactory().create(_type(1, np.float32))
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
      result['variance'], np.concatenate(data).var(0), rtol=1e-3
  )


def test_each_layer_has_its_own_counts():
  process = aggregators.PooledMomentsFactory().create(_type(2))
  rng = np.random.default_rng(1)
  data = [
      [rng.normal(size=(n, 2)) for n in sizes] for sizes in ((3, 5), (7, 2))
  ]
  result = _aggregate(
      process, [[_moments_of(layer) for layer in client] for client in data]
  )
  for i, found in enumerate(result):
    union = np.concatenate([client[i] for client in data])
    assert found['count'] == len(union)
    np.testing.assert_allclose(found['variance'], union.var(0), rtol=1e-12)


@pytest.mark.parametrize(
    'factory',
    [aggregators.NaiveMomentsFactory, aggregators.PooledMomentsFactory],
)
def test_anything_but_moments_is_refused(factory):
  vector = tff.TensorType(np.float32, [2])
  for wrong in (vector, tff.to_type([vector]), tff.to_type([(vector, vector)])):
    with pytest.raises(TypeError, match='a list of <count, mean, variance>'):
      factory().create(wrong)
