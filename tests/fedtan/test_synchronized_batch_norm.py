"""Tests of batch normalization with the statistics of all clients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn.fedtan import synchronized_batch_norm
from tff_bn.fedtan.synchronized_batch_norm import Answer
from tff_bn.keras_model import batch_norm_calls
from tff_bn.layers.batch_moments import Moments

_LAYERS = {
    'images': ([6, 5, 4, 3], dict()),
    'images_in_float64': ([6, 5, 4, 3], dict(dtype='float64')),
    'images_in_bfloat16': ([6, 5, 4, 3], dict(dtype='mixed_bfloat16')),
    'small_epsilon': ([6, 5, 4, 3], dict(epsilon=1e-7)),
    'vectors': ([8, 3], dict()),
    'sequences': ([4, 7, 3], dict()),
    'first_axis': ([6, 3, 5], dict(axis=1)),
    'channels_first': ([6, 3, 4, 5], dict(axis=1)),
    'no_scale': ([8, 3], dict(scale=False)),
    'no_shift': ([6, 5, 4, 3], dict(center=False)),
    'momentum': ([6, 5, 4, 3], dict(momentum=0.4, epsilon=0.1)),
    'synchronized': ([6, 5, 4, 3], dict(synchronized=True)),
}


def _layer(shape, arguments):
  layer = keras.layers.BatchNormalization(**arguments)
  layer.build([None, *shape[1:]])
  rng = np.random.default_rng(1)
  for variable in layer.weights:
    variable.assign(rng.uniform(0.5, 2, variable.shape))
  return layer


def _alone(kind, value, sound):
  """Answers for a single client."""
  assert sound
  if kind is Answer.POOLED_MOMENTS:
    assert isinstance(value, Moments)
  return value


def _output_and_gradients(layer, x, cotangent, mask=None):
  x = tf.cast(x, layer.compute_dtype)
  with tf.GradientTape() as tape:
    tape.watch(x)
    arguments = {} if mask is None else dict(mask=mask)
    output = layer(x, training=True, **arguments)
    target = tf.reduce_sum(output * tf.cast(cotangent, output.dtype))
  gradients = tape.gradient(target, [x, *layer.trainable_weights])
  return [output, *gradients, *layer.non_trainable_weights]


def _synchronized(layer, ask=_alone, weight=1.0, **options):
  return batch_norm_calls.replaced(
      keras.Sequential([layer]),
      synchronized_batch_norm.SynchronizedBatchNorm(
          keras.Sequential([layer]),
          ask,
          tf.constant(weight),
          **{
              'fused_moments': False,
              'synchronize_backward': True,
              **options,
          },
      ),
  )


def _assert_close(found, expected, rtol):
  for a, b in zip(found, expected, strict=True):
    a, b = (tf.cast(t, tf.float64).numpy() for t in (a, b))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


@pytest.mark.parametrize(
    ('name', 'fused_moments', 'synchronize_backward'),
    [
        *((name, True, True) for name in _LAYERS),
        *((name, False, True) for name in ('images_in_float64', 'vectors')),
        ('images', True, False),
        ('vectors', False, False),
    ],
)
def test_a_single_client_computes_the_same_as_keras(
    name, fused_moments, synchronize_backward
):
  shape, arguments = _LAYERS[name]
  rng = np.random.default_rng(0)
  x, cotangent = rng.normal(3, 2, shape), rng.normal(1, 1, shape)
  expected = _output_and_gradients(_layer(shape, arguments), x, cotangent)
  layer = _layer(shape, arguments)
  with _synchronized(
      layer,
      weight=float(shape[0]),
      fused_moments=fused_moments,
      synchronize_backward=synchronize_backward,
  ):
    found = _output_and_gradients(layer, x, cotangent)
  rtol = dict(float64=1e-12, bfloat16=3e-2).get(layer.compute_dtype, 3e-5)
  _assert_close(found, expected, rtol)
  assert found[0].dtype == expected[0].dtype


@pytest.mark.parametrize('fused_moments', [False, True])
def test_a_mask(fused_moments):
  shape = [4, 7, 3]
  rng = np.random.default_rng(0)
  x, cotangent = rng.normal(3, 2, shape), rng.normal(1, 1, shape)
  mask = tf.constant(rng.random([4, 7]) < 0.6)
  arguments = dict(dtype='float64')
  expected = _output_and_gradients(_layer(shape, arguments), x, cotangent, mask)
  layer = _layer(shape, arguments)
  with _synchronized(layer, fused_moments=fused_moments):
    found = _output_and_gradients(layer, x, cotangent, mask)
  _assert_close(found, expected, 1e-12)


def test_messages_of_one_of_two_clients():
  """They follow the closed forms in the module's docstring."""
  rng = np.random.default_rng(3)
  x, cotangent = rng.normal(3, 2, [5, 2]), rng.normal(1, 1, [5, 2])
  mean, variance = np.array([1.0, 2.0]), np.array([3.0, 0.5])
  other = Moments(7.0, mean, variance)
  other_sums = dict(scale=np.array([0.3, -2.0]), shift=np.array([1.0, 5.0]))
  layer = _layer([5, 2], dict(dtype='float64'))
  gamma, beta = layer.gamma.numpy(), layer.beta.numpy()
  asked = []

  count = 5 + 7.0
  mean = (5 * x.mean(0) + 7 * other.mean) / count
  variance = (
      5 * (x.var(0) + (x.mean(0) - mean) ** 2)
      + 7 * (other.variance + (other.mean - mean) ** 2)
  ) / count

  def ask(kind, value, sound):
    assert sound
    asked.append((kind, value))
    if kind is Answer.POOLED_MOMENTS:
      return Moments(tf.constant(count, tf.float64), mean, variance)
    return {name: value[name] + other_sums[name] for name in value}

  weight = 5.0
  with _synchronized(layer, ask, weight, fused_moments=True):
    output, dx, *_ = _output_and_gradients(layer, x, cotangent)
  r = 1 / np.sqrt(variance + layer.epsilon)
  normalized = (x - mean) * r
  (kind, sent), (backward, sums) = asked
  assert (kind, backward) == (Answer.POOLED_MOMENTS, Answer.SUM)
  assert sent.count == 5
  np.testing.assert_allclose(sent.mean, x.mean(0), rtol=1e-12)
  np.testing.assert_allclose(sent.variance, x.var(0), rtol=1e-12)
  np.testing.assert_allclose(output, gamma * normalized + beta, rtol=1e-12)
  shift, scale = cotangent.sum(0), (cotangent * normalized).sum(0)
  np.testing.assert_allclose(sums['shift'], weight * shift, rtol=1e-12)
  np.testing.assert_allclose(sums['scale'], weight * scale, rtol=1e-12)
  # The form in the paper, with the gradients of the statistics.
  shift_sum = weight * shift + other_sums['shift']
  scale_sum = weight * scale + other_sums['scale']
  to_mean = -gamma * r * shift_sum
  to_variance = -gamma * r**2 * scale_sum / 2
  expected = cotangent * gamma * r + (
      to_mean + 2 * (x - mean) * to_variance
  ) / (count * weight)
  np.testing.assert_allclose(dx, expected, rtol=1e-11)


def test_equal_weights():
  """The truth is the gradient of the mean loss of two clients."""
  rng = np.random.default_rng(4)
  xs = [rng.normal(3, 2, [size, 2]) for size in (5, 7)]
  cotangents = [rng.normal(1, 1, x.shape) for x in xs]
  layer = _layer([5, 2], dict(dtype='float64'))
  gamma, beta = layer.gamma.numpy(), layer.beta.numpy()
  with tf.GradientTape() as tape:
    own = tf.constant(xs[0])
    tape.watch(own)
    inputs = [own, xs[1]]
    means = [tf.reduce_mean(x, 0) for x in inputs]
    mean = sum(means) / 2
    variance = sum(tf.reduce_mean((x - mean) ** 2, 0) for x in inputs) / 2
    r = tf.math.rsqrt(variance + layer.epsilon)
    normalized = [(x - mean) * r for x in inputs]
    loss = sum(
        tf.reduce_sum(c * (gamma * n + beta))
        for c, n in zip(cotangents, normalized)
    )
  sums = [
      ((c * n).numpy().sum(0), c.sum(0)) for c, n in zip(cotangents, normalized)
  ]
  kinds = []

  def ask(kind, value, sound):
    assert sound
    kinds.append(kind)
    if kind is Answer.POOLED_MOMENTS:
      return Moments(tf.constant(12.0, tf.float64), mean, variance)
    # The client's weight in the loss does not matter.
    np.testing.assert_allclose(value['scale'], sums[0][0], rtol=1e-12)
    np.testing.assert_allclose(value['shift'], sums[0][1], rtol=1e-12)
    scale, shift = np.mean(sums, axis=0)
    return dict(scale=tf.constant(scale), shift=tf.constant(shift))

  with _synchronized(
      layer, ask, weight=9.0, fused_moments=True, equal_weights=True
  ):
    output, dx, *_ = _output_and_gradients(layer, xs[0], cotangents[0])
  assert kinds == [Answer.POOLED_MOMENTS, Answer.MEAN]
  np.testing.assert_allclose(output, gamma * normalized[0] + beta, rtol=1e-12)
  # The server averages the gradients of both clients.
  np.testing.assert_allclose(dx, tape.gradient(loss, own), rtol=1e-10)


def _sound_questions(x, cotangent, shape, fused_moments=False):
  """Returns whether each question of a client with these values is sound."""
  layer = _layer(shape, {})
  found = []

  def ask(kind, value, sound):
    del kind
    found.append(bool(sound))
    # As if the values of other clients were finite.
    return tf.nest.map_structure(tf.ones_like, value)

  with _synchronized(layer, ask, fused_moments=fused_moments):
    _output_and_gradients(
        layer,
        np.broadcast_to(np.float32(x), shape),
        np.broadcast_to(np.float32(cotangent), shape),
    )
  return found


@pytest.mark.parametrize('fused_moments', [False, True])
@pytest.mark.parametrize('shape', [[4, 2], [4, 3, 3, 2]])
def test_useless_statistics_are_not_sound(shape, fused_moments):
  for value in (
      np.nan,
      np.inf,
      # Its square overflows, so the variance does, too.
      3e19,
      # Only sums over many clients would overflow.
      1e19,
  ):
    assert not _sound_questions(value, 1.0, shape, fused_moments)[0]
  assert all(_sound_questions(1e12, 1.0, shape, fused_moments))


@pytest.mark.parametrize('shape', [[4, 2], [4, 3, 3, 2]])
def test_useless_gradients_are_not_sound(shape):
  for value in (np.nan, np.inf, 1e38):
    *forward, backward = _sound_questions(1.0, value, shape)
    assert all(forward)
    assert not backward


def test_running_statistics_stay_without_data():
  layer = _layer([4, 2], {})
  before = [v.numpy() for v in layer.non_trainable_weights]

  def ask(kind, value, sound):
    del kind, sound
    return tf.nest.map_structure(tf.zeros_like, value)

  with _synchronized(layer, ask, weight=0.0):
    layer(np.ones([1, 2], np.float32), training=True)
  for found, expected in zip(layer.non_trainable_weights, before):
    np.testing.assert_array_equal(found, expected)
