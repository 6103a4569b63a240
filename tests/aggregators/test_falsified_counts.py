"""Clients that lie about their counts and weights, or abstain."""

import functools

import numpy as np
import pytest
import rule_calls
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn.aggregators import attacks
from tff_bn.aggregators import gathering
from tff_bn.catalog import rules

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_BETA = 0.1
_MOMENTS_TYPE = tff.to_type(
    [aggregators.layer_moments_type(4), aggregators.layer_moments_type(2)]
)
_UPDATE_TYPE = tff.TensorType(np.float32, [5])
_WEIGHT_TYPE = tff.TensorType(np.float32)


_NNM_MEDIAN = aggregators.NearestNeighborMixing(
    aggregators.CoordinateMedian(num_byzantine=3), num_byzantine=3
)


@functools.cache
def _fbn(rule):
  factory = aggregators.FbnMomentsFactory(1 - _BETA, rule)
  return factory.create(_MOMENTS_TYPE)


def _client(seed, count=32.0):
  rng = np.random.default_rng(seed)
  return [
      aggregators.layer_moments(
          np.float32(count * (layer + 1)),
          rng.normal(size=size).astype(np.float32),
          rng.uniform(4, 5, size).astype(np.float32),
      )
      for layer, size in enumerate((4, 2))
  ]


def _with_count(client, count):
  return [
      aggregators.layer_moments(np.float32(count), layer.mean, layer.variance)
      for layer in client
  ]


def _aggregate(process, clients):
  return process.next(process.initialize(), clients).result


def test_counts_hardly_change_the_statistics():
  """Three of ten clients falsify nothing but their counts."""
  honest = [_client(seed) for seed in range(10)]

  def check(process, counts, expected, rtol):
    for count in counts:
      found = _aggregate(
          process, [_with_count(c, count) for c in honest[:3]] + honest[3:]
      )
      for a, b in zip(found, expected, strict=True):
        assert 7 * 32 <= a.count <= 37 * 64
        np.testing.assert_allclose(a.mean, b.mean, rtol=1e-6)
        np.testing.assert_allclose(a.variance, b.variance, rtol=rtol)

  process = _fbn(_NNM_MEDIAN)
  # N/(N-1) is all that the number of values N has an influence on.
  counts = (3.4e38, 1e20, 1.0, 1e-3)
  check(process, counts, _aggregate(process, honest), 5e-3)
  # Clients without values take no part.
  rule = aggregators.CoordinateMedian(num_byzantine=3)
  process = _fbn(rule)
  counts = (0.0, -149.0, -1e38)
  check(process, counts, _aggregate(process, honest[3:]), 1e-6)


@pytest.mark.parametrize('rule', [None, aggregators.CoordinateMedian()])
def test_few_values_do_not_make_the_variance_explode(rule):
  process = _fbn(rule)
  for total in (1.0, 1.0000001, 1.5, 0.5, 2.0):
    clients = [_with_count(_client(seed), total / 3) for seed in range(3)]
    for layer in _aggregate(process, clients):
      # 5 is the largest variance, and the means are a few units apart.
      assert np.all(layer.variance >= 4)
      assert np.all(layer.variance < 5 + 2 / _BETA * 10)


_RULES = {
    **{
        name: rule_calls.build(
            name, 1 if name in ('bulyan', 'bucketing+median') else 3
        )
        for name in (
            *rules.RULES,
            *('clipping+median', 'arc+krum', 'nnm+krum', 'bucketing+median'),
        )
    },
    'multi_krum of 4': aggregators.MultiKrum(3, num_selected=4),
}


def _updates(num_clients):
  return np.random.default_rng(3).normal(1, 0.1, (num_clients, 5))


@pytest.mark.parametrize('name', _RULES)
def test_attackers_that_abstain_do_not_stop_a_round(name):
  """Three of ten clients abstain, and seven are left."""
  rule, honest = _RULES[name], _updates(7).astype(np.float32)

  @tff.tensorflow.computation(gathering.gathered_type(_UPDATE_TYPE))
  def aggregate(gathered):
    state = rule.initial_state(5, tf.float32)
    return rule.aggregate_gathered(gathered, state)[0]

  result = aggregate(dict(values=honest, num_dropped=0, num_abstained=3))
  # Clipping shortens values.
  if 'clipping' not in name and 'arc' not in name:
    assert np.all(result >= honest.min(axis=0) - 1e-6)
    assert np.all(result <= honest.max(axis=0) + 1e-6)


def test_how_many_that_abstain_are_taken_for_attackers():
  rule = aggregators.Krum(num_byzantine=3)  # Needs 2 f + 3.

  def presumed(num_rows, num_dropped=0, num_abstained=5):
    return int(
        rule.presumed_attackers(
            tf.constant(num_rows),
            tf.constant(num_dropped),
            tf.constant(num_abstained),
        )
    )

  assert [presumed(n) for n in (12, 9, 8, 7, 6, 5, 3, 2)] == [
      *(0, 0, 1, 1, 2, 2, 3, 3),
  ]
  assert [presumed(n, num_dropped=2) for n in (9, 6, 5, 4, 3)] == [
      *(0, 0, 0, 1, 1),
  ]
  assert [presumed(6, num_abstained=n) for n in (0, 1, 2, 3)] == [0, 1, 2, 2]
  mixing = aggregators.NearestNeighborMixing(rule, num_byzantine=3)
  assert int(mixing.needed_clients(tf.constant(1))) == 7
  assert mixing.needed_clients(0) == 9
  bucketing = aggregators.Bucketing(aggregators.Krum(num_byzantine=1), 3)
  assert bucketing.needed_clients(0) == 13  # Five buckets.


def test_attackers_that_abstain_leave_fewer_to_tolerate():
  # Were the three still expected among the others, three would be trimmed on
  # both sides.
  rule = aggregators.TrimmedMean(num_byzantine=3)
  process = rule.create_participating(_UPDATE_TYPE, _WEIGHT_TYPE)
  updates = _updates(8).astype(np.float32)
  weights = [np.float32(w) for w in [0, -1, 0, 1, 1, 1, 1, 1]]
  found = process.next(process.initialize(), list(updates), weights).result
  # Five clients tolerate two.
  np.testing.assert_allclose(
      found, np.sort(updates[3:], axis=0)[2:3].mean(axis=0), rtol=1e-6
  )


# The attacks.


@pytest.mark.parametrize('count', [3.4e38, np.nan])
def test_an_attack_with_falsified_counts(count):
  attack = attacks.FalsifiedCounts(attacks.SignFlipping(), count)
  attacked = aggregators.Attacked(_NNM_MEDIAN, attack, num_attackers=3)
  clients = [_client(seed) for seed in range(10)]
  process = _fbn(attacked)
  found = _aggregate(process, clients)

  means = [np.stack([c[i].mean for c in clients[3:]]) for i in range(2)]
  sent = [
      [
          aggregators.layer_moments(
              np.float32(count),
              -means[i].mean(axis=0),
              np.stack([c[i].variance for c in clients[3:]]).mean(axis=0),
          )
          for i in range(2)
      ]
  ] * 3
  plain = _fbn(_NNM_MEDIAN)
  for a, b in zip(found, _aggregate(plain, sent + clients[3:])):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize(
    ('count', 'num_left'), [(1e30, 7), (0, 4), (np.nan, 4)]
)
def test_an_attack_with_falsified_weights(count, num_left):
  attack = attacks.FalsifiedCounts(attacks.FallOfEmpires(3.0), count)
  rule = aggregators.Attacked(
      aggregators.CoordinateMedian(num_byzantine=3), attack, num_attackers=3
  )
  process = rule.create_participating(_UPDATE_TYPE, _WEIGHT_TYPE)
  updates = _updates(7).astype(np.float32)
  found = process.next(
      process.initialize(), list(updates), [np.float32(1)] * 7
  ).result
  honest = updates[3:]
  sent = honest
  if num_left == 7:
    sent = np.concatenate([[-2 * honest.mean(axis=0)] * 3, honest])
  np.testing.assert_allclose(found, np.median(sent, axis=0), rtol=1e-5)
