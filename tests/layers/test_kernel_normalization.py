"""Kernel normalization against NumPy, which visits the units one by one."""

import itertools

import keras
import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn.layers import KernelNormalization


def _reference(x, sizes, strides, padding, epsilon):
  """Returns the normalized units side by side."""
  axes = range(1, x.ndim - 1)
  if padding == 'same':
    pads = [(0, 0)]
    for axis, size, stride in zip(axes, sizes, strides, strict=True):
      units = -(-x.shape[axis] // stride)
      zeros = max(0, (units - 1) * stride + size - x.shape[axis])
      pads.append((zeros // 2, zeros - zeros // 2))
    x = np.pad(x, [*pads, (0, 0)])
  counts = [
      (x.shape[axis] - size) // stride + 1
      for axis, size, stride in zip(axes, sizes, strides, strict=True)
  ]
  shape = [n * size for n, size in zip(counts, sizes, strict=True)]
  out = np.zeros([len(x), *shape, x.shape[-1]])
  for example in range(len(x)):
    for unit in itertools.product(*map(range, counts)):
      read = tuple(
          slice(n * stride, n * stride + size)
          for n, size, stride in zip(unit, sizes, strides, strict=True)
      )
      written = tuple(
          slice(n * size, (n + 1) * size)
          for n, size in zip(unit, sizes, strict=True)
      )
      values = x[(example, *read)]
      out[(example, *written)] = (values - values.mean()) / np.sqrt(
          values.var() + epsilon
      )
  return out


@pytest.mark.parametrize(
    ('shape', 'size', 'strides', 'padding'),
    [
        ([2, 5, 7, 3], (3, 2), (1, 1), 'valid'),
        ([2, 5, 7, 3], (3, 3), (1, 1), 'same'),
        ([2, 5, 7, 3], (3, 2), (2, 3), 'same'),
        ([2, 6, 4, 3], (3, 2), (3, 2), 'valid'),
        ([2, 3, 2, 3], (1, 1), (1, 1), 'valid'),
        ([2, 1, 1, 3], (3, 3), (1, 1), 'same'),
        ([2, 2, 1, 3], (5, 5), (2, 2), 'same'),
        ([2, 6, 3], (4,), (2,), 'valid'),
        ([4, 5], (), (), 'valid'),
    ],
)
@pytest.mark.parametrize('training', [False, True])
def test_equals_numpy(shape, size, strides, padding, training):
  layer = KernelNormalization(
      size or 3, strides or 1, padding, dropout_rate=0, dtype='float64'
  )
  x = random_values.inputs(shape)
  expected = _reference(x, size, strides, padding, 1e-5)
  found = layer(x, training=training)
  np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
  assert layer.compute_output_shape((None, *shape[1:])) == (
      None,
      *expected.shape[1:],
  )
  assert not layer.weights


def test_gradient_equals_finite_differences():
  layer = KernelNormalization(2, dropout_rate=0, epsilon=0.1, dtype='float64')
  x, dy = (random_values.inputs(s) for s in ([1, 3, 3, 2], [1, 4, 4, 2]))
  variable = tf.Variable(x)
  with tf.GradientTape() as tape:
    target = tf.reduce_sum(layer(variable, training=True) * dy)
  gradient = tape.gradient(target, variable).numpy()

  def loss(values):
    return np.sum(_reference(values, (2, 2), (1, 1), 'valid', 0.1) * dy)

  for index in np.ndindex(x.shape):
    step = np.zeros_like(x)
    step[index] = 1e-6
    slope = (loss(x + step) - loss(x - step)) / 2e-6
    np.testing.assert_allclose(gradient[index], slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('training', [False, True])
def test_dropout_changes_the_statistics_only(training):
  """All values of a unit have the statistics of some dropped values."""
  layer = KernelNormalization(dropout_rate=0.5, seed=3, dtype='float64')
  x = random_values.inputs([50, 6])
  found = layer(x, training=training).numpy()
  # (x - mean) / deviation is a line through the values of the unit.
  for values, normalized in zip(x, found, strict=True):
    slope, offset = np.polyfit(values, normalized, 1)
    np.testing.assert_allclose(slope * values + offset, normalized, atol=1e-6)
    candidates = np.array(list(itertools.product([0, 2], repeat=6))) * values
    slopes = 1 / np.sqrt(candidates.var(1) + 1e-5)
    offsets = -candidates.mean(1) * slopes
    distance = np.hypot(slopes / slope - 1, offsets - offset)
    assert distance.min() < 1e-5


def test_inference_drops_the_same_values_of_all_examples():
  x = random_values.inputs([5, 4, 4, 2])
  expected = KernelNormalization(2, 2, dropout_rate=0.5, seed=1)(x)
  layer = KernelNormalization(2, 2, dropout_rate=0.5, seed=2)
  layer(x, training=True)
  # Alone, first or last, and whatever was drawn before.
  for number in range(len(x)):
    found = layer(x[number : number + 1])[0]
    np.testing.assert_allclose(found, expected[number], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(
      layer(x[::-1]), expected[::-1], rtol=1e-4, atol=1e-6
  )
  # Equal units have different dropped values at different places.
  slopes = layer(np.tile(x[:1, :2, :2], (1, 2, 2, 1))).numpy()
  assert not np.allclose(slopes[0, :2, :2], slopes[0, 2:, 2:])


def test_inference_sees_the_values_of_training():
  """Also where all values of a unit are alike, so that dropout is all."""
  layer = KernelNormalization(3, 3, seed=0)
  x = 0.5 + 0.001 * random_values.inputs([2, 300, 300, 1])
  training, inference = (
      np.asarray(layer(x, training=drawn)) for drawn in (True, False)
  )
  for moment in (np.mean, np.std):
    np.testing.assert_allclose(moment(inference), moment(training), rtol=0.05)
  assert np.std(training) > 1


def test_draws_depend_on_the_seed_alone():
  x = random_values.inputs([5, 4, 4, 2])

  def twice(seed):
    layer = KernelNormalization(2, seed=seed)
    return np.stack([layer(x, training=True) for _ in range(2)])

  first, same, other = twice(1), twice(1), twice(2)
  np.testing.assert_array_equal(first, same)
  for a, b in ((first[0], first[1]), (first, other)):
    assert not np.allclose(a, b)


@pytest.mark.parametrize('training', [False, True])
def test_sizes_that_are_not_static(training):
  layer = KernelNormalization(3, padding='same', dropout_rate=0)
  inputs = keras.Input((None, None, 2))
  model = keras.Model(inputs, layer(inputs))
  assert model.output_shape == (None, None, None, 2)
  for shape in ([2, 4, 5, 2], [3, 2, 1, 2]):
    x = random_values.inputs(shape).astype(np.float32)
    expected = _reference(x, (3, 3), (1, 1), 'same', 1e-5)
    np.testing.assert_allclose(
        model(x, training=training), expected, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize('policy', ['mixed_float16', 'mixed_bfloat16'])
def test_mixed_precision(policy):
  layer = KernelNormalization(2, dropout_rate=0, dtype=policy)
  # In 16 bits, the variance would be lost.
  x = 1000 + 30 * random_values.inputs([4, 3, 3, 2])
  x = tf.cast(x, layer.compute_dtype)
  output = layer(x)
  assert output.dtype == layer.compute_dtype
  expected = _reference(tf.cast(x, tf.float64).numpy(), (2, 2), (1, 1), '', 0)
  np.testing.assert_allclose(
      tf.cast(output, tf.float64), expected, rtol=2e-2, atol=2e-2
  )


@pytest.mark.parametrize(
    ('arguments', 'shape', 'message'),
    [
        (dict(kernel_size=0), [], 'kernel_size=0 must be a positive integer'),
        (dict(strides=(1, 0.5)), [], r'strides=\(1, 0.5\) must be a positive'),
        (dict(padding='full'), [], "padding='full' must be 'valid' or 'same'"),
        (dict(dropout_rate=1), [], 'dropout_rate=1 must be .* less than 1'),
        (
            dict(kernel_size=3),
            [2, 2, 4, 1],
            r'kernel_size=\(3,\) is larger than .*\(2, 2, 4, 1\); use padding=',
        ),
        (
            dict(kernel_size=(3, 3)),
            [2, 5, 1],
            r'kernel_size=\(3, 3\) has 2 numbers, .* have 1 axes',
        ),
        ({}, [2, 3, 4, 3, 1], r'is for images, .* shape \(2, 3, 4, 3, 1\)'),
    ],
)
def test_wrong_arguments(arguments, shape, message):
  with pytest.raises(ValueError, match=message):
    KernelNormalization(**arguments)(np.zeros(shape or [2, 4, 4, 1]))


def test_strides_with_padding_need_a_static_size():
  with pytest.raises(ValueError, match='needs inputs of a known size'):
    KernelNormalization(3, 2, 'same')(keras.Input((None, 4, 1)))
