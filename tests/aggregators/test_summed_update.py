"""Tests that sums give the same as the aggregation of each part."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn.aggregators import summed_update

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SIZES = (2, 3)
_TYPE = tff.to_type(
    collections.OrderedDict(
        trainable=[tff.TensorType(np.float64, [2])],
        statistics=[
            aggregators.layer_moments_type(size, np.float64) for size in _SIZES
        ],
        other_state=[tff.TensorType(np.float64)],
    )
)
_WEIGHT = tff.TensorType(np.float32)
_FACTORIES = {
    'naive': aggregators.NaiveMomentsFactory(),
    'pooled': aggregators.PooledMomentsFactory(),
    'fbn': aggregators.FbnMomentsFactory([0.9, 0.5]),
    'fbn_equal_weights': aggregators.FbnMomentsFactory(0.9, pooled=False),
}


def _clients(rng, counts):
  """Clients with counts of moments; NaN if they are dropped."""
  return [
      collections.OrderedDict(
          trainable=[rng.normal(size=2)],
          statistics=[
              aggregators.layer_moments(
                  float(count), rng.normal(5, 2, size), rng.uniform(1, 4, size)
              )
              for size in _SIZES
          ],
          other_state=[rng.normal()],
      )
      for count in counts
  ]


def _references(rng):
  return [
      (rng.normal(5, 1, size), rng.uniform(0.0, 3, size)) for size in _SIZES
  ]


def _sum(clients, weights, references, moments, factory, value_type=_TYPE):
  summed = aggregators.SummedUpdate(factory, moments, value_type, _WEIGHT)
  return summed.next(
      summed.initialize(),
      clients,
      weights,
      [references] * len(clients),
      references,
  )


def _plain_sums():
  return summed_update.of_round(tff.aggregators.SumFactory())


class _Fixed(aggregators.RoundSums):
  """Plain sums with a fixed number of clients."""

  def __init__(self, num_clients, smallest_variance=0.0):
    self.num_clients = num_clients
    self.smallest_variance = smallest_variance

  def exchange_factories(self, num_exchanges):
    raise NotImplementedError

  def update_factory(self, num_exchanges):
    return tff.aggregators.SumFactory()


def _assert_close(found, expected, **tolerance):
  for a, b in zip(
      tff.structure.flatten(tff.structure.from_container(found, True)),
      tff.structure.flatten(tff.structure.from_container(expected, True)),
      strict=True,
  ):
    np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize('name', _FACTORIES)
def test_the_result_is_the_one_of_each_part(name):
  rng = np.random.default_rng(0)
  weights = [2.0, np.nan, 0.0, 5.0, 1.0]
  clients = _clients(rng, [20, np.nan, 0, 10, 1])
  moments = _FACTORIES[name]
  process = aggregators.ModelUpdateFactory(
      aggregators.WeightedMeanFactory(), moments
  ).create(_TYPE, _WEIGHT)
  expected = process.next(process.initialize(), clients, weights)

  found = _sum(clients, weights, _references(rng), moments, _plain_sums())

  assert list(found.result) == list(expected.result)
  _assert_close(found.result, expected.result, rtol=1e-12)
  assert found.result['num_participants'] == 3
  assert found.result['num_dropped'] == 1


def test_values_of_a_client_without_weight_may_be_anything():
  rng = np.random.default_rng(1)
  clients = _clients(rng, [4, np.nan])
  references = _references(rng)
  alone = _sum(
      clients[:1], [3.0], references, _FACTORIES['pooled'], _plain_sums()
  )
  clients[1]['trainable'] = [np.array([np.inf, np.nan])]
  clients[1]['statistics'] = [
      aggregators.layer_moments(np.nan, m.mean * np.nan, m.variance * np.inf)
      for m in clients[1]['statistics']
  ]

  both = _sum(
      clients, [3.0, np.nan], references, _FACTORIES['pooled'], _plain_sums()
  )

  _assert_close(
      {**both.result, 'num_dropped': 0}, {**alone.result, 'num_dropped': 0}
  )


def test_without_clients_all_is_zero_and_counts_nobody():
  rng = np.random.default_rng(2)
  found = _sum(
      _clients(rng, [0]),
      [0.0],
      _references(rng),
      _FACTORIES['naive'],
      _plain_sums(),
  )
  assert found.result['num_participants'] == 0
  np.testing.assert_array_equal(found.result['trainable'][0], [0, 0])
  assert found.result['statistics'][0].count == 0


def test_fixed_number_of_clients():
  rng = np.random.default_rng(3)
  clients = _clients(rng, [7, 0, 2])
  references = _references(rng)
  found = _sum(
      clients, [5.0, 0.0, 2.0], references, _FACTORIES['pooled'], _Fixed(4)
  )

  total = clients[0]['trainable'][0] + clients[2]['trainable'][0]
  np.testing.assert_allclose(found.result['trainable'][0], total / 4)
  assert found.result['num_participants'] == 4
  assert found.result['num_dropped'] == 0
  for layer, (mean, variance) in enumerate(references):
    ones, twos = (clients[i]['statistics'][layer] for i in (0, 2))
    # The clients that are missing count as the running statistics.
    means = np.stack([ones.mean, twos.mean, mean, mean])
    expected = means.mean(axis=0)
    within = variance + (ones.variance + twos.variance - 2 * variance) / 4
    moments = found.result['statistics'][layer]
    np.testing.assert_allclose(moments.mean, expected)
    np.testing.assert_allclose(
        moments.variance, within + means.var(axis=0), rtol=1e-9
    )
    assert moments.count > 1e300


def test_a_variance_keeps_a_share_of_the_running_one():
  clients = [
      collections.OrderedDict(
          trainable=[np.zeros(2)],
          statistics=[
              aggregators.layer_moments(1.0, np.zeros(size), np.zeros(size))
              for size in _SIZES
          ],
          other_state=[0.0],
      )
  ]
  references = [(np.zeros(size), np.full(size, 8.0)) for size in _SIZES]
  found = _sum(clients, [1.0], references, _FACTORIES['naive'], _Fixed(1, 0.25))
  np.testing.assert_allclose(found.result['statistics'][1].variance, [2] * 3)


class _NegatedSums(tff.aggregators.UnweightedAggregationFactory):
  """As if noise had made the sums negative, that of the weights too."""

  def create(self, value_type):
    process = tff.aggregators.SumFactory().create(value_type)

    @tff.tensorflow.computation(value_type)
    def negated(value):
      return tf.nest.map_structure(tf.negative, value)

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      return process.next(state, tff.federated_map(negated, value))

    return tff.templates.AggregationProcess(process.initialize, next_fn)


def test_a_negative_sum_of_weights_changes_nothing():
  rng = np.random.default_rng(5)
  references = _references(rng)
  found = _sum(
      _clients(rng, [4, 2]),
      [4.0, 2.0],
      references,
      _FACTORIES['naive'],
      summed_update.of_round(_NegatedSums()),
  )
  np.testing.assert_array_equal(found.result['trainable'][0], [0, 0])
  for moments, (mean, variance) in zip(found.result['statistics'], references):
    np.testing.assert_allclose(moments.mean, mean)
    np.testing.assert_allclose(moments.variance, variance)


@pytest.mark.parametrize(
    'factory',
    [
        tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
            noise_multiplier=0.0, clients_per_round=2, clip=1e6
        ),
        tff.aggregators.SecureSumFactory(200.0),
    ],
    ids=['differentially_private', 'secure'],
)
@pytest.mark.filterwarnings('ignore:Secure aggregation:UserWarning')
def test_factories_of_tff(factory):
  rng = np.random.default_rng(4)
  clients = tf.nest.map_structure(np.float32, _clients(rng, [3, 5]))
  arguments = (
      clients,
      [3.0, 5.0],
      tf.nest.map_structure(np.float32, _references(rng)),
      _FACTORIES['naive'],
  )
  value_type = tff.types.tensorflow_to_type(
      tf.nest.map_structure(
          lambda v: tf.TensorSpec(np.shape(v), np.float32), clients[0]
      )
  )
  found, expected = (
      dict(_sum(*arguments, sums, value_type).result)
      for sums in (summed_update.of_round(factory), _plain_sums())
  )
  # TFF's factory of differential privacy returns means, also of the counts.
  for value in (found, expected):
    value['statistics'] = [m[1:] for m in value['statistics']]
  _assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rules_need_more_than_sums():
  with pytest.raises(ValueError, match='NaiveMomentsFactory has the rule'):
    aggregators.NaiveMomentsFactory(aggregators.CoordinateMedian()).sums(
        _TYPE['statistics']
    )
