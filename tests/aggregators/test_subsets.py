"""Subsets by their rank against `itertools`."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.aggregators import eigenvalue_rules


@pytest.mark.parametrize(('n', 'left_out'), [(1, 0), (5, 0), (6, 2), (9, 4)])
def test_subsets_are_in_lexicographic_order(n, left_out):
  counts = eigenvalue_rules.counts_of_subsets(tf.constant(n), tf.constant(left_out))
  expected = list(itertools.combinations(range(n), n - left_out))
  assert counts[n, left_out] == len(expected)
  found = eigenvalue_rules.subsets_of_ranks(
      counts, tf.constant(left_out), tf.range(len(expected), dtype=tf.int64)
  )
  assert [tuple(np.flatnonzero(row)) for row in found.numpy()] == expected


def test_numbers_of_subsets_do_not_overflow():
  counts = eigenvalue_rules.counts_of_subsets(tf.constant(300), tf.constant(140))
  assert counts[30, 15] == 155117520
  assert counts[300, 140] == 2**60
