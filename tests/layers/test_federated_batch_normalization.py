"""The federated layer against NumPy and Keras, also with several replicas."""

import inspect
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
from tff_bn.layers import FederatedBatchNormalization

KerasLayer = keras.layers.BatchNormalization

_LAYERS = {
    'vectors': ([8, 3], dict()),
    'first_axis': ([6, 3, 5], dict(axis=1)),
    'sequences': ([4, 7, 3], dict(axis=-1)),
    'images': ([6, 5, 4, 3], dict()),
    'channels_first': ([6, 3, 4, 5], dict(axis=1)),
    'negative_axis': ([6, 3, 4, 5], dict(axis=-3)),
    'volumes': ([2, 3, 4, 5, 3], dict()),
    'volumes_channels_first': ([2, 3, 4, 5, 3], dict(axis=1)),
    'no_scale': ([8, 3], dict(scale=False)),
    'no_shift': ([6, 5, 4, 3], dict(center=False)),
    'neither': ([8, 3], dict(center=False, scale=False)),
    'epsilon': ([8, 3], dict(epsilon=0.3)),
    'small_epsilon': ([6, 5, 4, 3], dict(epsilon=1e-7)),
    'one_value': ([1, 3], dict()),
    'synchronized': ([6, 5, 4, 3], dict(synchronized=True)),
}
_parametrize = pytest.mark.parametrize(
    ('shape', 'arguments'), _LAYERS.values(), ids=_LAYERS
)


def _layer(shape, seed=1, **arguments):
  layer = FederatedBatchNormalization(**arguments)
  layer.build([None, *shape[1:]])
  random_values.randomize(layer, seed)
  return layer


class _Reference:
  """Algorithm 2 with one client, in NumPy.

  The statistics have the rank of the input.
  """

  def __init__(self, layer, rank):
    axis = layer.axis % rank
    self.reduced = tuple(i for i in range(rank) if i != axis)
    self.layer = layer

    def spread(variable, default):
      if variable is None:
        return default
      value = variable.numpy().astype(np.float64)
      return value.reshape([-1 if i == axis else 1 for i in range(rank)])

    self.gamma = spread(layer.gamma, 1.0)
    self.beta = spread(layer.beta, 0.0)
    self.mean = spread(layer.moving_mean, None)
    self.variance = spread(layer.moving_variance, None)

  def step(self, x, weights=1.0):
    """Returns the output, then updates the statistics."""
    output = (
        self.gamma
        * (x - self.mean)
        / np.sqrt(self.variance + self.layer.epsilon)
        + self.beta
    )
    weights = np.broadcast_to(weights, x.shape)
    count = weights.sum(self.reduced, keepdims=True)
    present = np.maximum(count, 1)
    mean = (weights * x).sum(self.reduced, keepdims=True) / present
    squares = weights * (x - mean) ** 2
    variance = squares.sum(self.reduced, keepdims=True) / present
    factor = np.where(count > 1, count / np.maximum(count - 1, 1), 1)
    momentum = np.where(count > 0, self.layer.momentum, 1)
    self.mean = momentum * self.mean + (1 - momentum) * mean
    self.variance = (
        momentum * self.variance + (1 - momentum) * factor * variance
    )
    return output

  def check(self, output, expected, tolerance=1e-12):
    np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance)
    for found, wanted in (
        (self.layer.moving_mean, self.mean),
        (self.layer.moving_variance, self.variance),
    ):
      np.testing.assert_allclose(
          found.numpy().ravel(), wanted.ravel(), rtol=tolerance, atol=tolerance
      )


@pytest.mark.parametrize('mode', ['eager', 'compiled'])
@_parametrize
def test_steps_equal_numpy(shape, arguments, mode):
  layer = _layer(shape, momentum=0.7, dtype='float64', **arguments)
  reference = _Reference(layer, len(shape))

  def step(x):
    return layer(x, training=True)

  if mode == 'compiled':
    step = tf.function(step, jit_compile=True)
  for seed in range(4):
    x = random_values.inputs(shape, seed)
    reference.check(step(tf.constant(x)), reference.step(x))


@_parametrize
def test_float32_equals_numpy(shape, arguments):
  layer = _layer(shape, momentum=0.7, **arguments)
  reference = _Reference(layer, len(shape))
  for seed in range(3):
    x = random_values.inputs(shape, seed)
    expected = reference.step(x.astype(np.float32).astype(np.float64))
    reference.check(layer(x, training=True), expected, 1e-5)


@pytest.mark.parametrize(
    ('shape', 'mask_shape', 'arguments'),
    [
        ([8, 3], [8], dict()),
        ([4, 7, 3], [4, 7], dict()),
        ([4, 7, 3], [4, 7], dict(axis=1)),
        ([4, 5, 6, 3], [4, 5, 6], dict()),
        ([4, 5, 6, 3], [4, 1, 6], dict()),
        ([4, 5, 6, 3], [4, 5, 6], dict(axis=2)),
        ([2, 3, 4, 5, 3], [2, 3, 4, 5], dict()),
    ],
)
def test_masks_equal_numpy(shape, mask_shape, arguments):
  layer = _layer(shape, momentum=0.7, dtype='float64', **arguments)
  reference = _Reference(layer, len(shape))
  for seed in range(3):
    x = random_values.inputs(shape, seed)
    mask = np.random.default_rng(seed).integers(0, 2, mask_shape).astype(bool)
    output = layer(x, training=True, mask=tf.constant(mask))
    reference.check(output, reference.step(x, mask[..., None]))


def test_mask_of_a_masking_layer_is_used():
  x = random_values.inputs([4, 7, 3])
  x[1:, 4:] = 0
  layer = FederatedBatchNormalization(momentum=0.0, dtype='float64')
  model = keras.Sequential(
      [
          keras.Input([7, 3], dtype='float64'),
          keras.layers.Masking(dtype='float64'),
          layer,
      ]
  )
  model(x, training=True)
  seen = x[(x != 0).any(-1)]
  assert len(seen) == 19
  np.testing.assert_allclose(layer.moving_mean, seen.mean(0), rtol=1e-12)
  np.testing.assert_allclose(
      layer.moving_variance, seen.var(0, ddof=1), rtol=1e-12
  )


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@_parametrize
def test_inference_and_frozen_layers_equal_keras(shape, arguments, dtype):
  ours = _layer(shape, dtype=dtype, **arguments)
  keras = KerasLayer(dtype=dtype, **arguments)
  keras.build([None, *shape[1:]])
  keras.set_weights(ours.get_weights())
  x = tf.constant(random_values.inputs(shape), dtype)
  expected = keras(x, training=False)
  before = ours.get_weights()
  np.testing.assert_array_equal(ours(x, training=False), expected)
  np.testing.assert_array_equal(ours(x), expected)
  # The same arithmetic in training.
  np.testing.assert_array_equal(ours(x, training=True), expected)
  ours.set_weights(before)
  ours.trainable = keras.trainable = False
  np.testing.assert_array_equal(ours(x, training=True), expected)
  for found, wanted in zip(ours.get_weights(), before):
    np.testing.assert_array_equal(found, wanted)
  assert not ours.trainable_weights
  assert len(ours.non_trainable_weights) == len(keras.non_trainable_weights)


@_parametrize
def test_statistics_are_constants_for_gradients(shape, arguments):
  layer = _layer(shape, momentum=0.7, dtype='float64', **arguments)
  reference = _Reference(layer, len(shape))
  x = tf.Variable(random_values.inputs(shape))
  dy = random_values.inputs(shape, 5)
  with tf.GradientTape() as tape:
    target = tf.reduce_sum(layer(x, training=True) * dy)
  gradients = tape.gradient(target, [x, *layer.trainable_weights])
  r = 1 / np.sqrt(reference.variance + layer.epsilon)
  expected = [dy * reference.gamma * r]
  if layer.scale:
    normalized = (x.numpy() - reference.mean) * r
    expected.append((dy * normalized).sum(reference.reduced))
  if layer.center:
    expected.append(dy.sum(reference.reduced))
  assert len(gradients) == len(expected)
  for found, wanted in zip(gradients, expected):
    np.testing.assert_allclose(
        np.ravel(found), np.ravel(wanted), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize('compiled', [False, True])
def test_empty_batch_changes_nothing(compiled):
  layer = _layer([None, 5, 4, 3])
  before = layer.get_weights()
  step = tf.function(lambda x: layer(x, training=True), jit_compile=compiled)
  assert step(tf.zeros([0, 5, 4, 3])).shape == [0, 5, 4, 3]
  for found, wanted in zip(layer.get_weights(), before):
    np.testing.assert_array_equal(found, wanted)


def test_everything_masked_changes_nothing():
  layer = _layer([4, 7, 3])
  before = layer.get_weights()
  layer(
      random_values.inputs([4, 7, 3]),
      training=True,
      mask=tf.zeros([4, 7], tf.bool),
  )
  for found, wanted in zip(layer.get_weights(), before):
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize('policy', ['mixed_float16', 'mixed_bfloat16'])
@pytest.mark.parametrize('shape', [[8, 3], [6, 5, 4, 3]])
def test_mixed_precision(policy, shape):
  layer = _layer(shape, momentum=0.7, dtype=policy)
  reference = _Reference(layer, len(shape))
  for seed in range(3):
    x = tf.cast(random_values.inputs(shape, seed), layer.compute_dtype)
    output = layer(x, training=True)
    expected = reference.step(tf.cast(x, tf.float64).numpy())
    assert output.dtype == layer.compute_dtype
    np.testing.assert_allclose(
        tf.cast(output, tf.float64), expected, rtol=2e-2, atol=2e-2
    )
    # The statistics have float32's accuracy.
    reference.check(0.0, 0.0, 1e-5)
  assert {v.dtype for v in layer.weights} == {'float32'}


def test_arguments_configuration_and_weights_equal_keras():
  ours = inspect.signature(FederatedBatchNormalization.__init__).parameters
  expected = inspect.signature(KerasLayer.__init__).parameters
  assert {n: p.default for n, p in ours.items()} == {
      n: p.default for n, p in expected.items() if not n.startswith('renorm')
  }
  arguments = dict(
      axis=1,
      momentum=0.8,
      epsilon=0.1,
      center=False,
      beta_initializer=keras.initializers.Constant(2.0),
      gamma_initializer='zeros',
      moving_mean_initializer='ones',
      moving_variance_initializer=keras.initializers.Constant(3.0),
      beta_regularizer='l1',
      gamma_regularizer=keras.regularizers.L2(0.1),
      beta_constraint='non_neg',
      gamma_constraint='unit_norm',
      name='norm',
      dtype='mixed_bfloat16',
      trainable=False,
  )
  for given in (dict(name='norm'), arguments):
    ours, theirs = FederatedBatchNormalization(**given), KerasLayer(**given)
    assert ours.get_config() == theirs.get_config()
    for layer in (
        ours,
        FederatedBatchNormalization.from_config(theirs.get_config()),
    ):
      layer.build([None, 4, 3])
      if not theirs.built:
        theirs.build([None, 4, 3])
      assert [v.name for v in layer.weights] == [v.name for v in theirs.weights]
      for found, wanted in zip(layer.get_weights(), theirs.get_weights()):
        np.testing.assert_array_equal(found, wanted)
  assert FederatedBatchNormalization().name.startswith(
      'federated_batch_normalization'
  )


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(renorm=True), 'renorm=True .* leave it out'),
        (dict(axis=[1]), r'axis=\[1\] must be one integer'),
        (dict(axis=(1, 2)), r'axis=\(1, 2\) must be one integer'),
        (dict(axis=1.0), r'axis=1\.0 must be one integer'),
        (dict(axis=None), 'axis=None must be one integer'),
        (dict(fused=True), "Unrecognized keyword .*'fused'"),
        (dict(virtual_batch_size=2), "Unrecognized .*'virtual_batch_size'"),
    ],
)
def test_wrong_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    FederatedBatchNormalization(**arguments)


def test_mask_of_another_rank_is_an_error():
  layer = _layer([4, 7, 3])
  with pytest.raises(ValueError, match='mask'):
    layer(random_values.inputs([4, 7, 3]), training=True, mask=np.ones([4]))


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_layers_with_16_bit_weights(dtype):
  layer = FederatedBatchNormalization(momentum=0.5, dtype=dtype)
  x = 1000 + 30 * np.random.default_rng(0).normal(size=[64, 100, 3])
  assert layer(x, training=True).dtype == dtype
  assert {v.dtype for v in layer.weights} == {dtype}
  x = np.array(tf.cast(tf.cast(x, dtype), tf.float64)).reshape(-1, 3)
  # A sum of all values overflows in float16 and stops growing in bfloat16.
  np.testing.assert_allclose(
      np.array(layer.moving_mean, 'float64'), 0.5 * x.mean(0), rtol=2**-8
  )
  np.testing.assert_allclose(
      np.array(layer.moving_variance, 'float64'),
      0.5 + 0.5 * x.var(0, ddof=1),
      rtol=2**-8,
  )


def test_is_a_registered_batch_norm_layer():
  layer = FederatedBatchNormalization()
  assert (
      keras.saving.get_registered_name(FederatedBatchNormalization)
      == 'tff_bn>FederatedBatchNormalization'
  )
  assert layers.is_batch_norm(layer)
  assert layers.batch_norm_layers(keras.Sequential([layer])) == [layer]


# All in one process, for the import takes seconds.
_DISTRIBUTED = """
    import keras
    import numpy as np
    import tensorflow as tf
    from tff_bn.layers import FederatedBatchNormalization

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices('CPU')[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])
    assert strategy.num_replicas_in_sync == 2

    # Replicas of different sizes, means and deviations; one without any data.
    rng = np.random.default_rng(0)
    for sizes, arguments, masked in [
        ((5, 3), dict(axis=1), False),
        ((5, 3), dict(), True),
        ((4, 0), dict(), True),
        ((0, 0), dict(), False),
    ]:
      parts = [
          rng.normal(10 * i, 1 + i, (n, 2, 3)) for i, n in enumerate(sizes)
      ]
      masks = [rng.integers(0, 2, (n, 2)).astype(bool) for n in sizes]
      with strategy.scope():
        layer = FederatedBatchNormalization(
            momentum=0.75, dtype='float64', **arguments
        )
        layer.build([None, 2, 3])
      alone = FederatedBatchNormalization(
          momentum=0.75, dtype='float64', **arguments
      )
      alone.build([None, 2, 3])

      def call(layer, x, mask):
        return layer(x, training=True, mask=mask if masked else None)

      def values(arrays):
        return strategy.experimental_distribute_values_from_function(
            lambda c: tf.constant(arrays[c.replica_id_in_sync_group])
        )

      @tf.function
      def step(x, mask):
        return strategy.run(call, (layer, x, mask))

      for _ in range(2):
        outputs = step(values(parts), values(masks))
        expected = call(
            alone, np.concatenate(parts), np.concatenate(masks)
        )
        np.testing.assert_allclose(
            np.concatenate(strategy.experimental_local_results(outputs)),
            expected, rtol=1e-12, atol=1e-12,
        )
      for found, wanted in zip(layer.weights, alone.weights):
        for value in strategy.experimental_local_results(found):
          np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)

    # Keras's own loop: batches of 8, the last one has 3 examples.
    def build():
      keras.utils.set_random_seed(0)
      model = keras.Sequential([
          keras.Input((6, 6, 1)),
          keras.layers.Conv2D(4, 3),
          FederatedBatchNormalization(momentum=0.5),
          keras.layers.Flatten(),
          keras.layers.Dense(1),
      ])
      model.compile(keras.optimizers.SGD(0.01), 'mse')
      return model

    with strategy.scope():
      model = build()
    alone = build()
    x = rng.normal(3, 2, (19, 6, 6, 1)).astype(np.float32)
    y = rng.normal(size=(19, 1)).astype(np.float32)
    for each in (model, alone):
      each.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for found, wanted in zip(model.get_weights(), alone.get_weights()):
      np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    model.save('model.keras')
    print('done')
"""


def test_replicas_equal_one_device_with_the_whole_batch(tmp_path):
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
