"""Batch renormalization against NumPy, forward and backward, and Keras."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn import layers
from tff_bn.layers import BatchRenormalization

KerasLayer = keras.layers.BatchNormalization

_LAYERS = {
    'vectors': ([8, 3], dict()),
    'images': ([6, 5, 4, 3], dict()),
    'channels_first': ([6, 3, 4, 5], dict(axis=1)),
    'negative_axis': ([6, 3, 4, 5], dict(axis=-3)),
    'no_scale': ([8, 3], dict(scale=False)),
    'no_shift': ([6, 5, 4, 3], dict(center=False)),
    'neither': ([8, 3], dict(center=False, scale=False)),
    'epsilon': ([8, 3], dict(epsilon=0.3, momentum=0.6)),
    'clipped': ([8, 3], dict(r_max=1.1, d_max=0.1)),
    'batch_only': ([6, 5, 4, 3], dict(r_max=1, d_max=0)),
    'unclipped': ([8, 3], dict(r_max=1e6, d_max=1e6)),
    'one_value': ([1, 3], dict()),
    'synchronized': ([6, 5, 4, 3], dict(synchronized=True)),
}
_parametrize = pytest.mark.parametrize(
    ('shape', 'arguments'), _LAYERS.values(), ids=_LAYERS
)


def _layer(shape, seed=1, **arguments):
  layer = BatchRenormalization(**arguments)
  layer.build([None, *shape[1:]])
  random_values.randomize(layer, seed)
  return layer


class _Reference:
  """The layer in NumPy; all vectors have the rank of the input."""

  def __init__(self, layer, rank):
    axis = layer.axis % rank
    self.reduced = tuple(i for i in range(rank) if i != axis)
    self.layer = layer

    def spread(variable, default=None):
      if variable is None:
        return default
      value = np.array(variable, np.float64)
      return value.reshape([-1 if i == axis else 1 for i in range(rank)])

    self.gamma = spread(layer.gamma, 1.0)
    self.beta = spread(layer.beta, 0.0)
    self.mean = spread(layer.moving_mean)
    self.variance = spread(layer.moving_variance)

  def _sum(self, values):
    return values.sum(self.reduced, keepdims=True)

  def forward(self, x, mask=True):
    epsilon = self.layer.epsilon
    self.weights = np.broadcast_to(mask, x.shape).astype(np.float64)
    self.count = self._sum(self.weights)
    self.batch_mean = self._sum(self.weights * x) / self.count
    self.x = x
    deviation = self.weights * (x - self.batch_mean) ** 2
    self.batch_variance = self._sum(deviation) / self.count
    self.sigma = np.sqrt(self.batch_variance + epsilon)
    moving_sigma = np.sqrt(self.variance + epsilon)
    r_max, d_max = self.layer.r_max, self.layer.d_max
    self.r = np.clip(self.sigma / moving_sigma, 1 / r_max, r_max)
    self.d = np.clip(
        (self.batch_mean - self.mean) / moving_sigma, -d_max, d_max
    )
    self.normalized = self.r * (x - self.batch_mean) / self.sigma + self.d
    return self.gamma * self.normalized + self.beta

  def moved(self):
    """Returns the moving statistics after the batch."""
    momentum = self.layer.momentum
    return [
        np.ravel(momentum * old + (1 - momentum) * new)
        for old, new in (
            (self.mean, self.batch_mean),
            (self.variance, self.batch_variance),
        )
    ]

  def backward(self, dy):
    """Returns the gradients of x, γ and β, with r and d as constants."""
    upstream = dy * self.gamma * self.r
    deviation = self.x - self.batch_mean
    d_mean = -self._sum(upstream) / self.sigma
    d_variance = -0.5 * self._sum(upstream * deviation) / self.sigma**3
    share = self.weights / self.count
    return (
        upstream / self.sigma + share * (d_mean + 2 * deviation * d_variance),
        self._sum(dy * self.normalized),
        self._sum(dy),
    )


def _check(layer, x, dy, mask=None, tolerance=1e-12):
  reference = _Reference(layer, x.ndim)
  expected = reference.forward(
      x.astype(np.float64), True if mask is None else mask[..., None]
  )
  inputs = tf.Variable(x)
  with tf.GradientTape() as tape:
    output = layer(
        inputs, training=True, mask=None if mask is None else tf.constant(mask)
    )
    target = tf.reduce_sum(output * dy)
  dx, *others = tape.gradient(target, [inputs, *layer.trainable_variables])
  found = dict(zip([v.name for v in layer.trainable_variables], others), x=dx)
  np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance)
  gradients = dict(zip(('x', 'gamma', 'beta'), reference.backward(dy)))
  assert found.keys() <= gradients.keys()
  for name, value in found.items():
    np.testing.assert_allclose(
        np.ravel(value),
        np.ravel(gradients[name]),
        rtol=tolerance,
        atol=tolerance * np.abs(gradients[name]).max(),
        err_msg=name,
    )
  for variable, moved in zip(
      layer.non_trainable_variables, reference.moved(), strict=True
  ):
    np.testing.assert_allclose(variable, moved, rtol=tolerance)


@_parametrize
def test_forward_and_backward_equal_numpy(shape, arguments):
  for seed in range(3):
    layer = _layer(shape, seed, dtype='float64', **arguments)
    dy = random_values.inputs(shape, seed + 5)
    _check(layer, random_values.inputs(shape, seed), dy)


@pytest.mark.parametrize(
    ('shape', 'mask_shape', 'arguments'),
    [
        ([8, 3], [8], dict()),
        ([4, 7, 3], [4, 7], dict()),
        ([4, 7, 3], [4, 7], dict(axis=1)),
        ([4, 5, 6, 3], [4, 1, 6], dict(r_max=1.1)),
    ],
)
def test_masks_equal_numpy(shape, mask_shape, arguments):
  layer = _layer(shape, dtype='float64', **arguments)
  mask = np.random.default_rng(4).integers(0, 2, mask_shape).astype(bool)
  x, dy = (random_values.inputs(shape, seed) for seed in (0, 5))
  _check(layer, x, dy, mask)


@_parametrize
def test_float32_equals_numpy(shape, arguments):
  layer = _layer(shape, **arguments)
  x, dy = (random_values.inputs(shape, seed).astype('f') for seed in (0, 5))
  _check(layer, x, dy, tolerance=2e-4)


def test_unclipped_output_is_normalized_by_the_moving_statistics():
  layer = _layer([8, 3], dtype='float64', r_max=1e6, d_max=1e6)
  x = random_values.inputs([8, 3])
  expected = layer(x, training=False)
  np.testing.assert_allclose(layer(x, training=True), expected, rtol=1e-10)


@pytest.mark.parametrize('mean', [-100.0, 100.0])
@pytest.mark.parametrize('variance', [1e-4, 1e4])
def test_limits_on_both_sides(mean, variance):
  layer = BatchRenormalization(dtype='float64', epsilon=1e-9)
  layer.build([None, 1])
  layer.moving_mean.assign([mean])
  layer.moving_variance.assign([variance])
  # The batch has mean 0 and variance 1.
  output = layer(np.array([[-1.0], [1.0]]), training=True)
  r = 3 if variance < 1 else 1 / 3
  d = np.clip(-mean / np.sqrt(variance), -5, 5)
  np.testing.assert_allclose(output, [[d - r], [d + r]], rtol=1e-6)


def test_without_corrections_training_equals_keras():
  ours = _layer([6, 5, 4, 3], dtype='float64', r_max=1, d_max=0, momentum=0.7)
  theirs = KerasLayer(dtype='float64', momentum=0.7)
  theirs.build([None, 5, 4, 3])
  theirs.set_weights(ours.get_weights())
  for seed in range(3):
    x = random_values.inputs([6, 5, 4, 3], seed)
    np.testing.assert_allclose(
        ours(x, training=True), theirs(x, training=True), rtol=1e-10
    )
  for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@_parametrize
def test_inference_and_frozen_layers_equal_keras(shape, arguments, dtype):
  ours = _layer(shape, dtype=dtype, **arguments)
  others = {k: v for k, v in arguments.items() if k not in ('r_max', 'd_max')}
  theirs = KerasLayer(dtype=dtype, **others)
  theirs.build([None, *shape[1:]])
  theirs.set_weights(ours.get_weights())
  x = tf.constant(random_values.inputs(shape), dtype)
  expected = theirs(x, training=False)
  np.testing.assert_array_equal(ours(x, training=False), expected)
  np.testing.assert_array_equal(ours(x), expected)
  ours.trainable = False
  np.testing.assert_array_equal(ours(x, training=True), expected)
  assert not ours.trainable_weights


@pytest.mark.parametrize('compiled', [False, True])
def test_batches_without_values_use_the_moving_statistics(compiled):
  layer = _layer([4, 7, 3], dtype='float64')
  before = layer.get_weights()
  call = tf.function(
      lambda x, mask: layer(x, training=True, mask=mask), jit_compile=compiled
  )
  x = tf.constant(random_values.inputs([4, 7, 3]))
  output = call(x, tf.zeros([4, 7], tf.bool))
  np.testing.assert_allclose(output, layer(x), rtol=1e-12)
  assert call(x[:0], tf.zeros([0, 7], tf.bool)).shape == [0, 7, 3]
  for a, b in zip(layer.get_weights(), before, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-15)


def test_mask_of_another_rank_is_an_error():
  layer = _layer([4, 7, 3])
  with pytest.raises(ValueError, match='mask has the shape'):
    layer(random_values.inputs([4, 7, 3]), training=True, mask=np.ones([4]))


@pytest.mark.parametrize('policy', ['mixed_float16', 'mixed_bfloat16'])
def test_mixed_precision(policy):
  layer = _layer([8, 3], dtype=policy)
  x = tf.cast(100 + random_values.inputs([8, 3]), layer.compute_dtype)
  layer.moving_mean.assign([100.0] * 3)
  expected = _Reference(layer, 2).forward(tf.cast(x, tf.float64).numpy())
  output = layer(x, training=True)
  assert output.dtype == layer.compute_dtype
  np.testing.assert_allclose(
      tf.cast(output, tf.float64), expected, rtol=2e-2, atol=2e-2
  )
  assert {v.dtype for v in layer.weights} == {'float32'}


def test_arguments_and_configuration():
  default = BatchRenormalization(name='n').get_config()
  assert default == {
      **KerasLayer(name='n').get_config(),
      'r_max': 3.0,
      'd_max': 5.0,
  }
  assert BatchRenormalization(1, 0.5).axis == 1
  arguments = dict(
      axis=1,
      momentum=0.8,
      epsilon=0.1,
      center=False,
      scale=True,
      beta_initializer='ones',
      gamma_initializer='zeros',
      moving_mean_initializer='ones',
      moving_variance_initializer='zeros',
      beta_regularizer=keras.regularizers.L1(0.1),
      gamma_regularizer=keras.regularizers.L2(0.1),
      beta_constraint='non_neg',
      gamma_constraint='unit_norm',
      synchronized=True,
      name='norm',
      dtype='mixed_bfloat16',
      trainable=False,
  )
  layer = BatchRenormalization(**arguments, r_max=2, d_max=1)
  assert layer.get_config() == {
      **KerasLayer(**arguments).get_config(),
      'r_max': 2.0,
      'd_max': 1.0,
  }
  again = BatchRenormalization.from_config(layer.get_config())
  assert again.get_config() == layer.get_config()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(renorm=True), 'renorm=True .* BatchRenormalization'),
        (dict(axis=[1]), r'axis=\[1\] must be one integer'),
        (dict(r_max=0.9), 'r_max=0.9 must be a number, at least 1'),
        (dict(r_max=float('nan')), 'r_max=nan'),
        (dict(r_max=float('inf')), 'r_max=inf'),
        (dict(d_max=-0.1), 'd_max=-0.1 must be a number, at least 0'),
        (dict(d_max=float('nan')), 'd_max=nan'),
        (dict(d_max=float('inf')), 'd_max=inf'),
    ],
)
def test_wrong_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    BatchRenormalization(**arguments)


def test_is_a_registered_batch_norm_layer():
  layer = BatchRenormalization()
  assert (
      keras.saving.get_registered_name(BatchRenormalization)
      == 'tff_bn>BatchRenormalization'
  )
  assert layers.batch_norm_layers(keras.Sequential([layer])) == [layer]


_DISTRIBUTED = """
    import numpy as np
    import tensorflow as tf
    from tff_bn.layers import BatchRenormalization

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices('CPU')[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])
    rng = np.random.default_rng(0)
    parts = [rng.normal(3 * i, 1 + i, (n, 2, 3)) for i, n in enumerate((5, 3))]
    with strategy.scope():
      layer = BatchRenormalization(synchronized=True, dtype='float64')
      layer.build([None, 2, 3])
    alone = BatchRenormalization(dtype='float64')
    alone.build([None, 2, 3])
    run = tf.function(
        lambda x: strategy.run(lambda x: layer(x, training=True), (x,))
    )
    output = run(strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant(parts[c.replica_id_in_sync_group])
    ))
    np.testing.assert_allclose(
        np.concatenate(strategy.experimental_local_results(output)),
        alone(np.concatenate(parts), training=True), rtol=1e-10,
    )
    for a, b in zip(layer.weights, alone.weights):
      np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-10)
    print('done')
"""


@pytest.mark.slow
def test_synchronized_replicas_equal_one_device_with_the_whole_batch(tmp_path):
  result = subprocess.run(
      [sys.executable, '-c', textwrap.dedent(_DISTRIBUTED)],
      env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'},
      capture_output=True,
      text=True,
      check=False,
      cwd=tmp_path,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.endswith('done\n')
