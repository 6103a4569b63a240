"""Moments of batches against NumPy, also where digits could cancel."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.layers import batch_moments


def _random(shape, seed=0):
  return np.random.default_rng(seed).normal(2, 3, shape)


def _reference(x, axis, weights=None):
  """Computes count, mean and variance in a loop over the channels."""
  if weights is None:
    weights = np.ones(1)
  included = np.moveaxis(np.broadcast_to(weights, x.shape) > 0, axis, 0)
  results = []
  for values, is_included in zip(np.moveaxis(x, axis, 0), included):
    values = values[is_included]
    n = len(values)
    mean = sum(values) / n if n else 0.0
    variance = sum((values - mean) ** 2) / n if n else 0.0
    results.append((n, mean, variance))
  return [np.array(each) for each in zip(*results)]


@pytest.mark.parametrize(
    ('shape', 'axis', 'compiled'),
    [
        ([7], 0, False),
        ([8, 3], -1, False),
        ([8, 3], 0, False),
        ([4, 7, 3], -1, False),
        ([6, 5, 4, 3], 3, True),
        ([6, 3, 4, 5], -3, True),
        ([2, 3, 4, 5, 3], 1, False),
    ],
)
def test_equals_numpy(shape, axis, compiled):
  x = _random(shape)
  function = batch_moments.batch_moments
  if compiled:
    function = tf.function(function, jit_compile=True)
  found = function(tf.constant(x), axis)
  count, mean, variance = _reference(x, axis)
  assert found.count.shape == []
  assert {each.dtype for each in found} == {tf.float64}
  np.testing.assert_array_equal(count, found.count)
  np.testing.assert_allclose(found.mean, mean, rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(found.variance, variance, rtol=1e-12, atol=1e-12)
  assert found.mean.shape == found.variance.shape == mean.shape


@pytest.mark.parametrize(
    ('shape', 'axis', 'mask_shape', 'scalar'),
    [
        ([8, 3], -1, [8], True),
        ([4, 7, 3], -1, [4, 7], True),
        ([4, 7, 3], -1, [1, 7], True),
        ([4, 7, 3], -1, [7], True),
        ([4, 5, 6, 3], -1, [4, 5, 6], True),
        ([4, 7, 3], 1, [4, 1], True),
        ([4, 7, 3], 1, [4, 7], False),
    ],
)
def test_masked_values_are_excluded(shape, axis, mask_shape, scalar):
  x = _random(shape)
  mask = np.random.default_rng(1).integers(0, 2, mask_shape).astype(bool)
  count, mean, variance = _reference(x, axis, mask[..., None])
  for given in (mask, mask.astype(np.float64), mask.astype(np.int32)):
    found = batch_moments.batch_moments(x, axis, given)
    assert (found.count.shape.rank == 0) == scalar
    np.testing.assert_array_equal(
        np.broadcast_to(found.count, count.shape), count
    )
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.variance, variance, rtol=1e-12, atol=1e-12)


def test_excluded_values_may_be_anything():
  x = _random([4, 7, 3])
  mask = np.ones([4, 7])
  mask[1, 2] = 0
  expected = batch_moments.batch_moments(x, -1, mask)
  for value in (np.nan, np.inf, 1e300):
    x[1, 2] = value
    found = batch_moments.batch_moments(x, -1, mask)
    np.testing.assert_array_equal(found.mean, expected.mean)
    np.testing.assert_array_equal(found.variance, expected.variance)


@pytest.mark.parametrize(
    ('shape', 'axis', 'compiled'),
    [
        ([50, 16, 16, 8], -1, False),
        ([50, 16, 16, 8], -1, True),
        ([64, 8, 40], 1, True),
    ],
)
def test_large_mean_does_not_cancel(shape, axis, compiled):
  x = np.random.default_rng(0).normal(1000, 0.1, shape).astype(np.float32)
  function = batch_moments.batch_moments
  if compiled:
    function = tf.function(function, jit_compile=True)
  found = function(tf.constant(x), axis)
  _, mean, variance = _reference(x.astype(np.float64), axis)
  assert {each.dtype for each in found} == {tf.float32}
  np.testing.assert_allclose(found.mean, mean, rtol=1e-5)
  np.testing.assert_allclose(found.variance, variance, rtol=2e-2)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_16_bit_inputs_are_computed_in_float32(dtype):
  # The sum and the squares exceed float16.
  x = tf.cast(_random([40, 30, 3]) * 1000, dtype)
  _, mean, variance = _reference(tf.cast(x, tf.float64).numpy(), -1)
  found = batch_moments.batch_moments(x)
  assert {each.dtype for each in found} == {tf.float32}
  np.testing.assert_allclose(found.mean, mean, rtol=1e-5)
  np.testing.assert_allclose(found.variance, variance, rtol=1e-5)


@pytest.mark.parametrize(
    ('shape', 'axis', 'compiled'),
    [
        ([0, 3], -1, True),
        ([0, 4, 5, 3], -1, False),
        ([2, 0, 3], -1, False),
        ([0, 3, 2], 1, False),
    ],
)
def test_empty_batch_has_zeros(shape, axis, compiled):
  function = batch_moments.batch_moments
  if compiled:
    function = tf.function(function, jit_compile=True)
  found = function(tf.zeros(shape), axis)
  for each in found:
    np.testing.assert_array_equal(each, np.zeros(each.shape))


def test_unknown_sizes():
  @tf.function(input_signature=[tf.TensorSpec([None, None, 3], tf.float64)])
  def function(x):
    mask = tf.reduce_any(x > 0, -1)
    return batch_moments.batch_moments(x), batch_moments.batch_moments(
        x, -1, mask
    )

  for length in (2, 5):
    x = _random([4, length, 3])
    masks = [None, (x > 0).any(-1)[..., None]]
    for found, mask in zip(function(x), masks):
      count, mean, variance = _reference(x, -1, mask)
      np.testing.assert_array_equal(count, found.count)
      np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
      np.testing.assert_allclose(found.variance, variance, rtol=1e-12)


def test_graphs_of_tensorflow_1():
  x = _random([4, 7, 3])
  with tf.Graph().as_default():
    placeholder = tf.compat.v1.placeholder(tf.float64, [None, None, 3])
    moments = batch_moments.batch_moments(placeholder)
    merged = batch_moments.merge_moments(moments, moments)
    with tf.compat.v1.Session() as session:
      found = session.run([*moments, *merged], {placeholder: x})
  count, mean, variance = _reference(x, -1)
  for a, b in zip(
      found, [count[0], mean, variance, 2 * count[0], mean, variance]
  ):
    np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize('axis', [-1, 1])
def test_no_gradient(axis):
  x = tf.Variable(_random([5, 3, 2]))
  with tf.GradientTape() as tape:
    found = batch_moments.batch_moments(x, axis)
    target = tf.reduce_sum(found.mean + found.variance)
  assert tape.gradient(target, x) is None


@pytest.mark.parametrize('axis', [2, -3])
def test_wrong_axis_is_an_error(axis):
  with pytest.raises(ValueError, match=r'axis=.* rank 2; .* from -2 to 1'):
    batch_moments.batch_moments(tf.zeros([2, 3]), axis)


def test_unknown_rank_is_an_error():
  @tf.function(input_signature=[tf.TensorSpec(None)])
  def function(x):
    return batch_moments.batch_moments(x)

  with pytest.raises(ValueError, match='known rank'):
    function.get_concrete_function()


def test_merged_moments_equal_moments_of_all_values():
  x = np.concatenate([_random([20, 3]), _random([7, 3], 1) + 5])
  for first in (0, 1, 13, 27):
    merged = batch_moments.merge_moments(
        batch_moments.batch_moments(x[:first]),
        batch_moments.batch_moments(x[first:]),
    )
    assert merged.count == 27
    np.testing.assert_allclose(merged.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(merged.variance, x.var(0), rtol=1e-12)


def test_merging_empty_batches():
  empty = batch_moments.batch_moments(np.zeros([0, 3]))
  for each in batch_moments.merge_moments(empty, empty):
    np.testing.assert_array_equal(each, np.zeros(each.shape))


def test_merging_does_not_cancel():
  x = np.random.default_rng(0).normal(1000, 0.1, [600, 3]).astype(np.float32)
  merged = batch_moments.batch_moments(x[:100])
  for i in range(100, 600, 100):
    merged = batch_moments.merge_moments(
        merged, batch_moments.batch_moments(x[i : i + 100])
    )
  variance = x.astype(np.float64).var(0)
  np.testing.assert_allclose(merged.variance, variance, rtol=1e-3)
