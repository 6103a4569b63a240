"""BNGuard, against NumPy."""

import collections
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn.aggregators import bn_guard

_CHANNELS = (3, 2)


def _features(means, variances):
  return np.stack(
      [
          means.mean(1),
          means.var(1, ddof=1),
          variances.mean(1),
          variances.var(1, ddof=1),
      ],
      axis=1,
  )


def _larger_cluster(points):
  """Tries all ways to divide the points in two."""
  best = None
  for choice in itertools.product([False, True], repeat=len(points)):
    chosen = np.array(choice)
    if chosen.sum() * 2 <= len(points) or chosen.all():
      continue
    squares = sum(
        ((part - part.mean(0)) ** 2).sum()
        for part in (points[chosen], points[~chosen])
    )
    if best is None or squares < best[0]:
      best = squares, chosen
  return best[1]


def test_features_are_those_of_the_authors_code():
  rng = np.random.default_rng(0)
  means, variances = rng.normal(size=(2, 4, 5)).astype(np.float32)
  found = bn_guard.features(tf.constant(means), tf.constant(variances))
  np.testing.assert_allclose(found, _features(means, variances), rtol=1e-5)
  # One channel has no variance.
  found = bn_guard.features(tf.constant([[2.0]]), tf.constant([[3.0]]))
  np.testing.assert_array_equal(found, [[2, 0, 3, 0]])
  largest = tf.constant([[1e300, -1e300, 1e300]], tf.float64)
  points = bn_guard.features(largest, largest)
  assert np.isfinite(tf.reduce_sum(tf.square(points)))


@pytest.mark.parametrize('seed', range(4))
def test_the_larger_cluster_has_the_least_squares(seed):
  rng = np.random.default_rng(seed)
  num_others = rng.integers(1, 5)
  points = rng.normal(size=(9, 4))
  points[:num_others] += rng.normal(size=4) * 6
  points = rng.permutation(points)
  expected = _larger_cluster(points)
  assert expected.sum() == 9 - num_others
  found = bn_guard.larger_cluster(tf.constant(points))
  np.testing.assert_array_equal(found, expected)


def _selected(*rows):
  points = tf.constant(rows, tf.float64)
  return bn_guard.larger_cluster(points).numpy().tolist()


def test_clusters_without_a_majority():
  assert _selected([0], [0.1], [5], [5.1]) == [True] * 4
  assert _selected([0], [5]) == [True] * 2
  assert _selected([7], [7], [7]) == [True] * 3
  assert _selected([7]) == [True]
  nobody = bn_guard.larger_cluster(tf.zeros([0, 4], tf.float64))
  assert nobody.shape == [0]


def test_there_are_two_clusters_however_far_points_are():
  # One attacker hides another one, and an honest point is left out.
  assert _selected([1e60], [1e9], [0], [1], [2]) == [False] + [True] * 4
  assert _selected([0], [1], [1.1], [1.2]) == [False] + [True] * 3


def test_centers_move_until_no_point_changes_its_cluster():
  # The point 4 is nearer to 0 than to 10, but then nearer to the mean of the
  # rest.
  points = [[0], [4], [7], [8], [9], [10]]
  expected = _larger_cluster(np.array(points, float))
  assert _selected(*points) == expected.tolist()


def _client(rng, weight, shift=0.0):
  return collections.OrderedDict(
      trainable=[rng.normal(size=2), np.float64(rng.normal())],
      statistics=[
          aggregators.layer_moments(
              float(weight) * size,
              rng.normal(size=size) / 10 + shift * (place == 0),
              rng.uniform(0.9, 1.1, size),
          )
          for place, size in enumerate(_CHANNELS)
      ],
      other_state=[np.float64(rng.normal())],
  )


_TYPE = tff.to_type(
    collections.OrderedDict(
        trainable=[
            tff.TensorType(np.float64, [2]),
            tff.TensorType(np.float64),
        ],
        statistics=[
            aggregators.layer_moments_type(size, np.float64)
            for size in _CHANNELS
        ],
        other_state=[tff.TensorType(np.float64)],
    )
)
_WEIGHT_TYPE = tff.TensorType(np.float32)


def _with_infinity(client):
  client['trainable'][0] = np.array([np.inf, 0])
  return client


def test_the_rest_is_averaged_as_without_a_filter(in_process_runtime):
  rng = np.random.default_rng(1)
  attackers = [_client(rng, 9, shift=4), _client(rng, 5, shift=4.2)]
  honest = [_client(rng, weight) for weight in (1, 2, 3)]
  clients = [
      *(attackers[0], honest[0], _client(rng, 0, shift=-9)),
      *(honest[1], attackers[1], _with_infinity(_client(rng, 1))),
      *(honest[2], _client(rng, np.nan)),
  ]
  weights = [9.0, 1.0, 0.0, 2.0, 5.0, 1.0, 3.0, np.nan]
  pooled = aggregators.PooledMomentsFactory()
  process = aggregators.BnGuardFactory(pooled).create(_TYPE, _WEIGHT_TYPE)
  plain = aggregators.ModelUpdateFactory(
      aggregators.WeightedMeanFactory(), pooled
  ).create(_TYPE, _WEIGHT_TYPE)

  output = process.next(process.initialize(), clients, weights)
  expected = plain.next(plain.initialize(), honest, [1.0, 2.0, 3.0]).result

  assert output.measurements == dict(num_filtered_clients=2)
  assert output.result['num_participants'] == 3
  assert output.result['num_dropped'] == 2
  for name in ('trainable', 'statistics', 'other_state'):
    for a, b in zip(
        tf.nest.flatten(output.result[name]), tf.nest.flatten(expected[name])
    ):
      np.testing.assert_allclose(a, b, rtol=1e-14)
  # By hand.
  np.testing.assert_allclose(
      output.result['trainable'][0],
      sum(w * c['trainable'][0] for w, c in zip((1, 2, 3), honest)) / 6,
  )
  assert process.next.type_signature.result.result == (
      plain.next.type_signature.result.result
  )

  nobody = process.next(output.state, clients[2:3], [0.0])
  assert nobody.result['num_participants'] == 0
  assert nobody.measurements['num_filtered_clients'] == 0
  np.testing.assert_array_equal(nobody.result['trainable'][0], [0, 0])


def test_what_it_needs():
  factory = aggregators.BnGuardFactory()
  trainable = collections.OrderedDict(trainable=[tff.TensorType(np.float32)])
  without = collections.OrderedDict(trainable, statistics=[])
  for update in (trainable, without):
    with pytest.raises(ValueError, match='client_filter=bnguard .* send none'):
      factory.create(tff.to_type(update), _WEIGHT_TYPE)
  with pytest.raises(
      TypeError, match='statistics_aggregator .*a UnweightedMean'
  ):
    aggregators.BnGuardFactory(tff.aggregators.UnweightedMeanFactory())
  with pytest.raises(ValueError, match='has the rule CoordinateMedian'):
    aggregators.BnGuardFactory(
        aggregators.PooledMomentsFactory(aggregators.CoordinateMedian(1))
    )
