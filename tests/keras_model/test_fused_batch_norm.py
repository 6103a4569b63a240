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


@pytest.mark.parametrize('shape', [(7, 3), (2, 3, 4, 5, 3)])
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


@pytest.fixture
def gpu_kernel(monkeypatch):
  """Lets the kernel give what it gives on a GPU: K/(K-1) is NaN for K = 1."""
  kernel = tf.raw_ops.FusedBatchNormV3

  def on_gpu(x, is_training, **kwargs):
    result = kernel(x=x, is_training=is_training, **kwargs)
    if not is_training:
      return result
    is_one = tf.equal(tf.reduce_prod(tf.shape(x)[:3]), 1)
    variance = result.batch_variance
    return result._replace(
        batch_variance=tf.where(
            is_one, tf.fill([x.shape[-1]], np.nan), variance
        )
    )

  monkeypatch.setattr(tf.raw_ops, 'FusedBatchNormV3', on_gpu)


@pytest.mark.usefixtures('gpu_kernel')
@pytest.mark.parametrize('is_static', [False, True])
def test_one_value_in_each_channel(is_static):
  x = _images(1, 1, 1, 3)
  shape = [1, 1, 1, 3] if is_static else [None, None, None, 3]
  layer = _layer((None, 1, 1, 3))

  @tf.function(input_signature=[tf.TensorSpec(shape)])
  def call(x):
    return fused_batch_norm.training(layer, x, None)

  _, old_variance = (w.numpy() for w in layer.non_trainable_weights)
  _assert_same_step(layer, x, lambda layer, x, _: call(x), True)
  np.testing.assert_array_equal(call(x), [[[layer.beta.numpy()]]])
  # The variance of a single value is 0.
  np.testing.assert_allclose(layer.moving_variance, 0.7 * old_variance, 1e-6)
  count, mean, variance = tf.function(
      fused_batch_norm.moments, input_signature=[tf.TensorSpec(shape)]
  )(x)
  assert count == 1
  np.testing.assert_allclose(mean, x[0, 0, 0], rtol=1e-6)
  np.testing.assert_array_equal(variance, np.zeros(3))


@pytest.mark.usefixtures('gpu_kernel')
@pytest.mark.parametrize('shape', [(2, 1, 1, 3), (1, 1, 2, 3)])
def test_two_values_in_each_channel(shape):
  layer = _layer((None, *shape[1:]))
  _assert_same_step(layer, _images(*shape), fused_batch_norm.training, True)


@pytest.fixture(scope='module')
def compiled():
  """Layers for training and inference, and what XLA computes of them."""
  layers = [_layer((None, 8, 8, 3)) for _ in range(2)]

  @tf.function(jit_compile=True)
  def compute(x, cotangent):
    results = []
    calls = (fused_batch_norm.training, fused_batch_norm.inference)
    for layer, call in zip(layers, calls):
      # As in a model with functions of its own.
      call = tf.function(call)
      with tf.GradientTape() as tape:
        tape.watch(x)
        output = call(layer, x, None)
        target = tf.reduce_sum(output * tf.cast(cotangent, output.dtype))
      results.append(
          (output, *tape.gradient(target, [x, *layer.trainable_weights]))
      )
    return results, fused_batch_norm.moments(x)

  return layers, compute


@pytest.mark.parametrize(('mean', 'deviation'), [(0, 1), (1e4, 0.1), (-1e4, 1)])
def test_xla_keeps_the_digits_of_pictures(compiled, mean, deviation):
  (layer, fixed), compute = compiled
  rng = np.random.default_rng(0)
  shape = (32, 8, 8, 3)
  x = rng.normal(mean, deviation, shape).astype(np.float32)
  cotangent = rng.normal(size=shape).astype(np.float32)
  exact, dy = x.astype(np.float64), cotangent.astype(np.float64)
  axes = (0, 1, 2)
  moments = exact.mean(axes), exact.var(axes)
  before = [np.float64(w) for w in layer.non_trainable_weights]
  for variable, value in zip(fixed.non_trainable_weights, moments):
    variable.assign(value)
  (training, inference), found = compute(x, cotangent)
  assert found.count == 32 * 8 * 8
  np.testing.assert_allclose(found.mean, moments[0], rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(found.variance, moments[1], rtol=1e-5)
  after = [0.7 * a + 0.3 * b for a, b in zip(before, moments)]
  for variable, value in zip(layer.non_trainable_weights, after):
    np.testing.assert_allclose(variable, value, rtol=1e-5, atol=1e-6)
  for each, results, (center, variance), is_training in (
      (layer, training, moments, True),
      (fixed, inference, map(np.float64, fixed.non_trainable_weights), False),
  ):
    gamma, beta = np.float64(each.gamma), np.float64(each.beta)
    r = 1 / np.sqrt(variance + each.epsilon)
    normalized = (exact - center) * r
    through_statistics = dy.mean(axes) + normalized * np.mean(
        dy * normalized, axes
    )
    expected = (
        normalized * gamma + beta,
        gamma * r * (dy - is_training * through_statistics),
        np.sum(dy * normalized, axes),
        np.sum(dy, axes),
    )
    for a, b in zip(results, expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_xla_in_16_bits():
  layer = _layer((None, 5, 4, 3), dtype='mixed_float16')
  # The squares exceed float16.
  x = _images(6, 5, 4, 3, mean=300.0, dtype='float16')

  @tf.function(jit_compile=True)
  def compute(x):
    outputs = fused_batch_norm.training(layer, x, None)
    normalized = fused_batch_norm.normalize_by(
        x, layer.gamma, layer.beta, *fused_batch_norm.moments(x)[1:], 1e-3
    )
    return outputs, normalized, fused_batch_norm.moments(x)

  outputs, normalized, moments = compute(x)
  assert outputs.dtype == normalized.dtype == tf.float16
  assert {each.dtype for each in moments} == {tf.float32}
  exact = tf.cast(x, tf.float64).numpy()
  variance = exact.var((0, 1, 2))
  np.testing.assert_allclose(moments.variance, variance, rtol=1e-5)
  expected = (exact - exact.mean((0, 1, 2))) / np.sqrt(variance + 1e-3)
  expected = expected * layer.gamma.numpy() + layer.beta.numpy()
  for found in (outputs, normalized):
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def test_no_gradient_flows_through_moments():
  x = _images(6, 5, 4, 3)
  with tf.GradientTape() as tape:
    tape.watch(x)
    target = tf.reduce_sum(fused_batch_norm.moments(x).variance)
  assert tape.gradient(target, x) is None


def test_inference_equals_keras_and_keeps_the_running_statistics():
  layer = _layer((None, 5, 4, 3))
  x = _images(6, 5, 4, 3)
  _assert_same_step(layer, x, fused_batch_norm.inference, False)
  model = keras.Sequential([keras.Input((5, 4, 3)), layer])
  before = model.get_weights()
  with batch_norm_calls.replaced(model, fused_batch_norm.inference):
    model(x, training=True)
  for a, b in zip(model.get_weights(), before):
    np.testing.assert_array_equal(a, b)


def _is_fused(layer):
  function = tf.function(
      lambda x: fused_batch_norm.training(layer, x, None)
  ).get_concrete_function(tf.TensorSpec((None, 5, 4, 3)))
  operations = {op.type for op in function.graph.get_operations()}
  return 'FusedBatchNormV3' in operations


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
