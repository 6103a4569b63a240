"""Fused operations compute the same as Keras's batch normalization."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm

_RNG = np.random.default_rng(0)


def _layer(shape, **kwargs):
  layer = keras.layers.BatchNormalization(momentum=0.7, **kwargs)
  layer.build(shape)
  for weight in layer.weights:
    weight.assign(_RNG.uniform(0.5, 2.0, weight.shape))
  return layer


def _images(*shape, mean=3.0, dtype='float32'):
  return tf.cast(_RNG.normal(mean, 2.0, shape), dtype)


def _step(layer, x, call):
  """Output, gradients for a random cotangent, and the new statistics."""
  before = [weight.numpy() for weight in layer.weights]
  cotangent = tf.cast(np.random.default_rng(1).normal(size=x.shape), x.dtype)
  with tf.GradientTape() as tape:
    tape.watch(x)
    output = call(x)
    target = tf.reduce_sum(output * cotangent)
  gradients = tape.gradient(target, [x, *layer.trainable_weights])
  statistics = [weight.numpy() for weight in layer.non_trainable_weights]
  for weight, value in zip(layer.weights, before):
    weight.assign(value)
  return output, gradients, statistics


def _assert_same_step(layer, x, training_call, training, tolerance=2e-5):
  expected = _step(layer, x, lambda x: layer(x, training=training))
  found = _step(layer, x, lambda x: training_call(layer, x, None))
  for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
    assert a.dtype == b.dtype
    a, b = (np.asarray(tf.cast(value, tf.float64)) for value in (a, b))
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'axis': 3},
        {'axis': 1},
        {'scale': False},
        {'center': False},
        {'epsilon': 1e-6},
        {'epsilon': 0.5},
        {'synchronized': True},
        {'renorm': True},
    ],
    ids=str,
)
def test_training_equals_keras(options):
  layer = _layer((None, 5, 4, 3), **options)
  x = _images(6, 5, 4, 3)
  _assert_same_step(layer, x, fused_batch_norm.training, True)


@pytest.mark.parametrize('shape', [(7, 3), (4, 5, 3), (2, 3, 4, 5, 3)])
def test_training_without_images(shape):
  layer = _layer((None, *shape[1:]))
  _assert_same_step(layer, _images(*shape), fused_batch_norm.training, True)


@pytest.mark.parametrize(
    ('dtype', 'policy', 'tolerance'),
    [
        ('float16', 'mixed_float16', 2e-2),
        ('bfloat16', 'mixed_bfloat16', 1.2e-1),
        ('float64', 'float64', 1e-14),
    ],
)
def test_training_in_other_dtypes(dtype, policy, tolerance):
  layer = _layer((None, 5, 4, 3), dtype=policy)
  x = _images(6, 5, 4, 3, dtype=dtype)
  _assert_same_step(layer, x, fused_batch_norm.training, True, tolerance)


def test_no_digits_cancel():
  """The variance is exact for a mean much larger than the deviation."""
  layer = _layer((None, 8, 8, 2))
  x = _RNG.normal(size=(16, 8, 8, 2)) + 1000.0
  x = x.astype(np.float32)
  fused_batch_norm.training(layer, tf.constant(x), None)
  before = layer.moving_variance.numpy()
  layer.moving_variance.assign(np.zeros(2))
  fused_batch_norm.training(layer, tf.constant(x), None)
  variance = x.astype(np.float64).var(axis=(0, 1, 2))
  np.testing.assert_allclose(layer.moving_variance, 0.3 * variance, rtol=1e-3)
  assert np.all(np.isfinite(before))


def test_moments():
  x = _RNG.normal(50.0, [0.5, 3.0], (16, 8, 8, 2)).astype(np.float32)
  count, mean, variance = fused_batch_norm.moments(tf.constant(x))
  exact = x.astype(np.float64)
  assert count == 16 * 8 * 8
  np.testing.assert_allclose(mean, exact.mean((0, 1, 2)), rtol=1e-6)
  np.testing.assert_allclose(variance, exact.var((0, 1, 2)), rtol=1e-4)


def test_no_gradient_flows_through_moments():
  x = _images(6, 5, 4, 3)
  with tf.GradientTape() as tape:
    tape.watch(x)
    target = tf.reduce_sum(fused_batch_norm.moments(x).variance)
  assert tape.gradient(target, x) is None


def test_inference_equals_keras():
  layer = _layer((None, 5, 4, 3))
  x = _images(6, 5, 4, 3)
  _assert_same_step(layer, x, fused_batch_norm.inference, False)


def test_inference_uses_and_keeps_the_running_statistics():
  layer = _layer((None, 5, 4, 3))
  model = keras.Sequential([keras.Input((5, 4, 3)), layer])
  before = model.get_weights()
  x = _images(6, 5, 4, 3)
  with batch_norm_calls.replaced(model, fused_batch_norm.inference):
    found = model(x, training=True)
  np.testing.assert_allclose(
      found, model(x, training=False), rtol=1e-5, atol=1e-6
  )
  for a, b in zip(model.get_weights(), before):
    np.testing.assert_array_equal(a, b)


def _is_fused(layer):
  function = tf.function(
      lambda x: fused_batch_norm.training(layer, x, None)
  ).get_concrete_function(tf.TensorSpec((None, 5, 4, 3)))
  operations = {op.type for op in function.graph.get_operations()}
  return 'FusedBatchNormV3' in operations


def test_fused_operations_are_used_for_images():
  assert _is_fused(_layer((None, 5, 4, 3)))


class _OwnMoments(keras.layers.BatchNormalization):

  def _moments(self, inputs, mask):
    mean, variance = super()._moments(inputs, mask)
    return mean, variance + 1.0


class _Renamed(keras.layers.BatchNormalization):
  """Computes the same as Keras's layer."""


@pytest.mark.parametrize('layer_class', [_OwnMoments, _Renamed])
def test_subclasses(layer_class):
  layer = layer_class(momentum=0.7)
  layer.build((None, 5, 4, 3))
  x = _images(6, 5, 4, 3)
  _assert_same_step(layer, x, fused_batch_norm.training, True)
  assert _is_fused(layer) == (layer_class is _Renamed)


def test_masks_are_left_to_keras():
  layer = _layer((None, 5, 4, 3))
  x = _images(6, 5, 4, 3)
  mask = tf.constant(_RNG.integers(0, 2, (6, 5, 4)), tf.bool)
  expected = _step(layer, x, lambda x: layer(x, training=True, mask=mask))
  found = _step(layer, x, lambda x: fused_batch_norm.training(layer, x, mask))
  for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
    np.testing.assert_array_equal(a, b)


def test_by_batch_leaves_renorm_out():
  x = _images(6, 5, 5, 3)
  layer, plain = _layer(x.shape, renorm=True), _layer(x.shape)
  plain.set_weights(layer.get_weights()[:4])
  before = layer.get_weights()

  found = fused_batch_norm.by_batch(layer, x, None)

  np.testing.assert_array_equal(found, plain(x, training=True))
  for a, b in zip(layer.get_weights()[4:], before[4:], strict=True):
    np.testing.assert_array_equal(a, b)
  assert np.any(layer(x, training=True) != found)  # With renorm again.
