"""Sorting networks against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.aggregators import order_statistics


@pytest.mark.parametrize('num_rows', [1, 2, 7, 33])
def test_sorting_networks_sort(num_rows):
  """Tests the unrolled network and the loop over comparators."""
  rng = np.random.default_rng(num_rows)
  values = rng.integers(0, 9, (num_rows, 5)).astype('float32')

  def rows(values):
    return order_statistics.map_ordered(
        values,
        tf.range(tf.shape(values)[0]),
        lambda ordered: ordered[0][0] + 100 * ordered[-1][-1],
    )

  expected = np.sort(values, axis=0)
  for shape in ([num_rows, 5], [None, 5]):
    traced = tf.function(
        rows, input_signature=[tf.TensorSpec(shape, tf.float32)]
    )
    np.testing.assert_array_equal(
        traced(values), expected[0] + 100 * expected[-1]
    )


def _ordered(values, ranks, most_rows, usual_ranks=None):
  """Returns the matrix that a statistic gets, for a known number of ranks."""
  seen = []

  def statistic(matrices):
    seen.append(np.concatenate(matrices))
    return matrices[0][0]

  order_statistics.map_ordered(
      tf.constant(values), tf.constant(ranks), statistic, most_rows, usual_ranks
  )
  return seen[0]


def _some_matrices(num_rows):
  rng = np.random.default_rng(num_rows)
  for values in (
      rng.normal(size=(num_rows, 3)),
      rng.integers(0, 3, (num_rows, 3)),
      np.sort(rng.normal(size=(num_rows, 3)), axis=0)[::-1],
      rng.choice([-3e38, 1e-37, 0, 3e38], (num_rows, 3)),
  ):
    yield values.astype('float32')


@pytest.mark.parametrize('most_rows', [33, 64, 100])
def test_networks_of_matrices_sort(most_rows, monkeypatch):
  """Known numbers of rows, of which some may be missing."""
  monkeypatch.setattr(order_statistics, '_MOST_SINGLE_ROWS', 32)

  @tf.function(
      input_signature=[
          tf.TensorSpec([None, 3], tf.float32),
          tf.TensorSpec([None], tf.int32),
      ]
  )
  def checksum(values, ranks):
    def statistic(matrices):
      ordered = tf.concat(matrices, axis=0)
      positions = tf.math.cumsum(tf.ones_like(ordered))
      return tf.reduce_sum(positions * ordered, axis=0)

    return order_statistics.map_ordered(values, ranks, statistic, most_rows)

  for num_rows in (1, most_rows // 2, most_rows):
    ranks = np.arange(num_rows)
    for values in _some_matrices(num_rows):
      expected = np.sort(values, axis=0)
      np.testing.assert_array_equal(
          _ordered(values, ranks, most_rows), expected
      )
      if np.abs(values).max() < 1e30:
        # The number of ranks is unknown.
        np.testing.assert_allclose(
            checksum(values, ranks),
            (np.arange(1, num_rows + 1)[:, np.newaxis] * expected).sum(axis=0),
            rtol=1e-4,
            atol=1e-3 * num_rows,
        )


@pytest.mark.parametrize(
    ('most_rows', 'most_single'),
    [
        *((33, 32), (33, 200)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product([20, 33, 66, 100], [32, 200])
            if case not in [(33, 32), (33, 200)]
        ),
    ],
)
def test_partition_at_ranks(most_rows, most_single, monkeypatch):
  monkeypatch.setattr(order_statistics, '_MOST_SINGLE_ROWS', most_single)
  for num_rows in (1, 2, most_rows // 2 + 1, most_rows - 3, most_rows):
    values = np.concatenate(list(_some_matrices(num_rows)), axis=1)
    expected = np.sort(values, axis=0)
    for low in sorted({0, num_rows // 5, num_rows // 2, num_rows - 1}):
      high = max(low, num_rows - 1 - low // 2)
      for usual_ranks in (low, high), (0, num_rows - 1), None:
        found = _ordered(values, [low, high], most_rows, usual_ranks)
        np.testing.assert_array_equal(found[0], expected[low])
        np.testing.assert_array_equal(found[-1], expected[high])
        np.testing.assert_array_equal(
            np.sort(found, axis=0), expected[low : high + 1]
        )


def test_ranks_need_fewer_comparators(monkeypatch):
  counts = []
  compare = order_statistics._compare

  def count(tensors, comparators):
    counts.append(len(comparators))
    compare(tensors, comparators)

  monkeypatch.setattr(order_statistics, '_compare', count)
  values = np.random.default_rng(0).normal(size=(20, 3))
  _ordered(values, [4, 15], 20, (4, 15))
  _ordered(values, [4, 14], 20, (4, 15))
  _ordered(values, [4, 15], 20)
  usual, *others = counts
  assert len(set(others)) == 1
  assert usual < others[0]
