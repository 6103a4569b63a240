"""The buckets of `Bucketing`."""

import itertools

import numpy as np
import pytest
import rule_calls
import tensorflow as tf

from tff_bn import aggregators


class _Observed(aggregators.Rule):
  """The mean; it remembers the rows of the last eager call."""

  def __init__(self):
    super().__init__(0)
    self.rows = None

  def aggregate(self, values, num_dropped, state):
    self.rows = values.numpy()
    return tf.reduce_mean(values, axis=0), state


def _buckets(n, bucket_size, seed=0, round_num=0, order=None):
  """Returns the sets of rows in the buckets."""
  observed = _Observed()
  rule = aggregators.Bucketing(observed, bucket_size, seed)
  state = rule.initial_state(2, tf.float64)
  state['round_num'] += round_num
  x = np.array([[2.0**i, 1 / (1 + i)] for i in range(n)])
  _, after = rule_calls.aggregate(
      rule, x if order is None else x[order], state=state
  )
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
  # 6 of the 21 pairs share a bucket.
  off_diagonal = together[~np.eye(7, dtype=bool)] / 300
  assert np.all(np.abs(off_diagonal - 6 / 21) < 0.12)
  np.testing.assert_allclose(off_diagonal.mean(), 6 / 21)


def test_buckets_depend_on_the_round_but_not_on_the_order():
  rounds = {frozenset(_buckets(9, 2, round_num=r)) for r in range(20)}
  assert len(rounds) > 17
  order = np.random.default_rng(0).permutation(9)
  assert _buckets(9, 2, 5, 3) == _buckets(9, 2, 5, 3)
  assert _buckets(9, 2, 5, 3) == _buckets(9, 2, 5, 3, order)
  assert _buckets(9, 1) == {frozenset([i]) for i in range(9)}
  assert _buckets(3, 5) == {frozenset(range(3))}


@pytest.mark.parametrize('are_equal', [False, True])
def test_buckets_do_not_depend_on_the_similarity_of_values(are_equal):
  x = np.array([[1], [1], [2], [2]], np.float32)
  if not are_equal:
    x = np.nextafter(x, np.array([[0], [3], [0], [3]], np.float32))
  observed = _Observed()
  rule = aggregators.Bucketing(observed, 2)
  apart = 0
  for round_num in range(60):
    state = rule.initial_state(1, tf.float32)
    state['round_num'] += round_num
    rule_calls.aggregate(rule, x, state=state)
    apart += np.all(np.abs(observed.rows - 1.5) < 0.1)
  assert 28 <= apart <= 52  # Expected: 40.


def test_buckets_keep_the_rules_state():
  rule = aggregators.Bucketing(aggregators.CenteredClipping(1.0), 2)
  state = None
  for length in (1, 2, 3):
    result, state = rule_calls.aggregate(
        rule, np.full((4, 2), 5.0), state=state
    )
    np.testing.assert_allclose(result, np.full(2, length / np.sqrt(2)))
    np.testing.assert_allclose(state['rule'], result)


def test_buckets_count_as_clients():
  aggregators.Bucketing(aggregators.TrimmedMean(2), 2, num_clients=9)
  with pytest.raises(
      ValueError, match='bucket_size=2.* 8 clients.*4 buckets.*num_byzantine'
  ):
    aggregators.Bucketing(aggregators.TrimmedMean(2), 2, num_clients=8)
  rule = aggregators.Bucketing(aggregators.TrimmedMean(2), 2)
  assert rule.num_byzantine == 2
  rule_calls.aggregate(rule, np.zeros((9, 2)))
  with pytest.raises(tf.errors.InvalidArgumentError, match='TrimmedMean'):
    rule_calls.aggregate(rule, np.zeros((8, 2)))


@pytest.mark.parametrize(
    ('bucket_size', 'num_clients', 'message'),
    [
        (
            100,
            10,
            r'makes too few .* 10 clients \(1\): .* use a size of at most 4.$',
        ),
        (
            5,
            10,
            r'makes too few .* 10 clients \(2\): .* use a size of at most 4.$',
        ),
        (
            2,
            4,
            r'makes too few .* 4 clients \(2\): .* use a size of at most 1.$',
        ),
        (1, 2, r'makes too few .* 2 clients \(2\): .* use more clients.$'),
    ],
)
def test_one_or_two_buckets_are_refused(bucket_size, num_clients, message):
  rule = aggregators.CoordinateMedian(0)
  with pytest.raises(ValueError, match=f'^bucket_size={bucket_size} {message}'):
    aggregators.Bucketing(rule, bucket_size, num_clients=num_clients)


@pytest.mark.parametrize(
    ('bucket_size', 'num_clients'), [(4, 10), (2, 5), (1, 3)]
)
def test_three_buckets_are_allowed(bucket_size, num_clients):
  rule = aggregators.CoordinateMedian(0)
  aggregators.Bucketing(rule, bucket_size, num_clients=num_clients)
