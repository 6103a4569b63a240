"""Bucketing, and static and adaptive clipping before a rule."""

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
  for seed in range(100):
    for bucket in _buckets(7, 3, seed):
      for i in bucket:
        for j in bucket - {i}:
          together[i, j] += 1
  # 6 of the 21 pairs share a bucket.
  off_diagonal = together[~np.eye(7, dtype=bool)] / 100
  assert np.all(np.abs(off_diagonal - 6 / 21) < 0.2)
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


def test_one_or_two_buckets_are_refused():
  rule = aggregators.CoordinateMedian(0)
  for size, num_clients, num_buckets, advice in (
      (100, 10, 1, 'a size of at most 4'),
      (5, 10, 2, 'a size of at most 4'),
      (2, 4, 2, 'a size of at most 1'),
      (1, 2, 2, 'more clients'),
  ):
    with pytest.raises(
        ValueError,
        match=f'^bucket_size={size} makes too few .* {num_clients} clients'
        rf' \({num_buckets}\): .* use {advice}.$',
    ):
      aggregators.Bucketing(rule, size, num_clients=num_clients)
  for size, num_clients in ((4, 10), (2, 5), (1, 3)):
    aggregators.Bucketing(rule, size, num_clients=num_clients)


def _changed(step, x, num_byzantine=0):
  found = step.change(tf.constant(x), tf.constant(num_byzantine))
  assert found.dtype == x.dtype
  return found.numpy()


def _static(max_norm):
  return aggregators.StaticClipping(aggregators.Mean(), max_norm)


def _arc(num_byzantine):
  return aggregators.AdaptiveRobustClipping(aggregators.Mean(), num_byzantine)


def test_examples_of_the_docstrings():
  x = np.array([[0, 0.5], [3, 4]])
  np.testing.assert_allclose(_changed(_static(1.0), x), [[0, 0.5], [0.6, 0.8]])
  x = np.array([[1.0, 0], [0, 2], [3, 4]])
  np.testing.assert_allclose(
      _changed(_arc(1), x, 1), [[1, 0], [0, 2], [1.2, 1.6]]
  )


def test_examples_of_byzfl():
  x = np.arange(1.0, 10).reshape(3, 3)
  np.testing.assert_allclose(
      _changed(_static(2.0), x)[:, 0],
      [0.53452248, 0.91168461, 1.00514142],
      rtol=1e-8,
  )
  np.testing.assert_allclose(
      _changed(_arc(1), x, 1)[2], [4.41004009, 5.04004582, 5.67005155]
  )


@pytest.mark.parametrize('n', [3, 10, 33])
def test_number_of_clipped_values(n):
  x = np.random.default_rng(n).normal(size=(n, 4))
  norms = np.linalg.norm(x, axis=1)
  for f in range((n + 1) // 2):
    num_clipped = int(2 * f * (n - f) / n + 1e-9)
    clipped = _changed(_arc(f), x, f)
    is_same = np.all(clipped == x, axis=1)
    assert np.sum(~is_same) == num_clipped
    threshold = np.sort(norms)[n - 1 - num_clipped]
    np.testing.assert_allclose(
        np.linalg.norm(clipped, axis=1), np.minimum(norms, threshold)
    )


@pytest.mark.parametrize('max_norm', [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize('scale', [1e-38, 1e-25, 1.0, 1e25, 1e37])
def test_float32_values_of_all_sizes(scale, max_norm):
  rng = np.random.default_rng(0)
  x = (scale * rng.normal(size=(5, 1000))).astype(np.float32)
  x[2] = 0
  exact = x.astype(np.float64)
  norms = np.linalg.norm(exact, axis=1, keepdims=True)
  with np.errstate(divide='ignore'):
    expected = exact * np.minimum(1, max_norm / norms)
  # Numbers below the smallest normal number have fewer digits.
  tolerance = {'rtol': 2e-6, 'atol': 2e-38}
  np.testing.assert_allclose(
      _changed(_static(max_norm), x), expected, **tolerance
  )
  threshold = np.sort(norms.ravel())[2]
  with np.errstate(divide='ignore'):
    expected = exact * np.minimum(1, threshold / norms)
  np.testing.assert_allclose(_changed(_arc(2), x, 2), expected, **tolerance)


def test_float64_values_of_all_sizes():
  x = np.array([[3e130, 4e130], [3e-140, 4e-140], [0, 0]])
  found = _changed(_static(1e-30), x)
  np.testing.assert_allclose(found, [[6e-31, 8e-31], [3e-140, 4e-140], [0, 0]])


def test_short_values_keep_their_bits():
  x = np.random.default_rng(0).normal(size=(6, 100)).astype(np.float32)
  np.testing.assert_array_equal(_changed(_static(1e3), x), x)
  np.testing.assert_array_equal(_changed(_arc(0), x), x)


def test_most_values_are_0():
  x = np.zeros((7, 3), np.float32)
  x[0] = 5
  np.testing.assert_array_equal(_changed(_arc(1), x, 1), np.zeros((7, 3)))


def test_state_and_dropped_clients_of_the_rule():
  rule = aggregators.AdaptiveRobustClipping(
      aggregators.StaticClipping(aggregators.CenteredClipping(1.0), 100.0), 1
  )
  state = None
  for length in (1, 2):
    x = np.full((4, 1), 5.0)
    x[0] = 1e9
    result, state = rule_calls.aggregate(rule, x, state=state)
    np.testing.assert_allclose(result, [length])
  # Once the attacker is dropped, no value is clipped.
  rule = aggregators.AdaptiveRobustClipping(aggregators.Mean(), 1)
  x = np.array([[1.0], [2], [6]])
  np.testing.assert_allclose(rule_calls.aggregate(rule, x)[0], [5 / 3])
  np.testing.assert_allclose(rule_calls.aggregate(rule, x, 1)[0], [3])
