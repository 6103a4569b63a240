"""The algebra of moments: pooling in any order is the union of the data."""

import functools

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn.aggregators import moments_summary
from tff_bn.layers import batch_moments

_D = 2


@st.composite
def _parts(draw):
  """Some sets of values, of which some are empty."""
  sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=7))
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  offset = draw(st.floats(-1e4, 1e4))
  return [
      rng.normal(offset + rng.normal(), rng.uniform(0, 3), (size, _D))
      for size in sizes
  ]


def _moments(x):
  if not len(x):
    # Moments with count 0 are ignored, whatever they are.
    nothing = np.full(_D, 1e30)
    return batch_moments.Moments(np.float64(0), nothing, nothing)
  return batch_moments.Moments(
      np.float64(len(x)), x.mean(axis=0), x.var(axis=0)
  )


def _merge(a, b):
  merged = batch_moments.merge_moments(
      *(batch_moments.Moments(*map(tf.constant, moments)) for moments in (a, b))
  )
  return batch_moments.Moments(*(value.numpy() for value in merged))


@functools.cache
def _layers():
  kind = aggregators.layer_moments_type(_D, np.float64)
  (layers,) = moments_summary.joined_by_dtype(tff.to_type([kind]))
  return layers


def _summary(moments):
  """The summary of a client with these moments."""
  return _layers().of_client([moments], lambda count: count)


def _pooled(summary):
  return batch_moments.Moments(
      summary.count.numpy()[0],
      summary.mean.numpy(),
      (summary.within + summary.between).numpy(),
  )


def _assert_are_moments_of(moments, x):
  assert moments.count == len(x)
  if not len(x):
    return
  size = np.abs(x).max()
  np.testing.assert_allclose(moments.mean, x.mean(axis=0), atol=1e-12 * size)
  np.testing.assert_allclose(
      moments.variance, x.var(axis=0), rtol=1e-9, atol=1e-10 * size
  )
  assert np.all(moments.variance >= 0)


def _in_a_random_tree(values, merge, rng):
  """Merges values two by two in a random order."""
  values = list(values)
  while len(values) > 1:
    a, b = (values.pop(rng.integers(len(values))) for _ in range(2))
    values.append(merge(a, b))
  return values[0]


@hypothesis.given(parts=_parts(), seed=st.integers(0, 2**32))
def test_merged_moments_are_those_of_the_union_in_any_order(parts, seed):
  merged = _in_a_random_tree(
      # The function has no special case for moments without values.
      [_moments(part) for part in parts if len(part)]
      or [batch_moments.Moments(np.float64(0), np.zeros(_D), np.zeros(_D))],
      _merge,
      np.random.default_rng(seed),
  )
  _assert_are_moments_of(merged, np.concatenate(parts))


@hypothesis.given(parts=_parts(), seed=st.integers(0, 2**32))
def test_summaries_are_those_of_the_union_in_any_order(parts, seed):
  merged = _in_a_random_tree(
      [_summary(_moments(part)) for part in parts],
      _layers().merge,
      np.random.default_rng(seed),
  )
  _assert_are_moments_of(_pooled(merged), np.concatenate(parts))


@hypothesis.given(parts=_parts())
def test_nobody_is_the_neutral_element(parts):
  summary = _summary(_moments(parts[0]))
  for pair in (
      (summary, _layers().of_nobody()),
      (_layers().of_nobody(), summary),
  ):
    for found, expected in zip(_layers().merge(*pair), summary, strict=True):
      np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize('count', [np.nan, 0.0, -0.0])
@hypothesis.given(parts=_parts(), bad=st.floats())
def test_counts_of_zero_or_nan_are_left_out(count, parts, bad):
  expected = _summary(_moments(parts[0]))
  spoiled = batch_moments.Moments(
      np.float64(count), np.full(_D, bad), np.full(_D, bad)
  )
  for pair in ((expected, _summary(spoiled)), (_summary(spoiled), expected)):
    for found, value in zip(_layers().merge(*pair), expected, strict=True):
      np.testing.assert_array_equal(found, value)
