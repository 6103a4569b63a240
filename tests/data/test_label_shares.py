"""Splits with chosen shares of the classes."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np

from tff_bn.data import label_shares


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(
        st.tuples(*[st.integers(0, 30)] * 3), min_size=1, max_size=6
    ).filter(np.any),
    labels=st.lists(st.integers(0, 2), max_size=60),
    seed=st.integers(0, 9),
)
def test_is_proportional_up_to_one_sample(counts, labels, seed):
  counts, labels = np.array(counts), np.array(labels, int)
  parts = label_shares.split_in_proportion(
      counts, labels, np.random.default_rng(seed)
  )
  chosen = np.concatenate(parts)
  held = np.flatnonzero(counts.sum(axis=0))
  np.testing.assert_array_equal(
      np.sort(chosen), np.flatnonzero(np.isin(labels, held))
  )
  got = np.array([np.bincount(labels[part], minlength=3) for part in parts])[
      :, held
  ]
  exact = counts[:, held] / counts[:, held].sum(axis=0)
  exact = exact * np.bincount(labels, minlength=3)[held]
  assert (np.abs(got - exact) < 1 + 1e-9).all()


def test_remainders_go_to_different_clients():
  # Each class has one sample for two clients: who gets it is drawn.
  counts = np.ones((2, 200), int)
  parts = label_shares.split_in_proportion(
      counts, np.arange(200), np.random.default_rng(0)
  )
  np.testing.assert_allclose([len(part) for part in parts], 100, atol=30)


def test_largest_remainder_is_rounded_up():
  # The clients' exact shares of three samples are 0.6 and 2.4.
  parts = label_shares.split_in_proportion(
      np.array([[1], [4]]), np.zeros(3, int), np.random.default_rng(0)
  )
  assert [len(part) for part in parts] == [1, 2]
