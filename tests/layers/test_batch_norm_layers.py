"""Tests of the batch normalization layers against NumPy and Keras.

The files with the name of a layer test what only this layer does.
"""

import inspect
import os
import subprocess
import sys
import textwrap

import batch_norm_references
import keras
import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn import layers
from tff_bn.layers import BatchRenormalization
from tff_bn.layers import FederatedBatchNormalization
from tff_bn.layers import HybridBatchNormalization

KerasLayer = keras.layers.BatchNormalization

_KINDS = (
    FederatedBatchNormalization,
    BatchRenormalization,
    HybridBatchNormalization,
)
_each_kind = pytest.mark.parametrize(
    'kind', _KINDS, ids=lambda kind: kind.__name__
)

_LAYERS = {
    'vectors': ([8, 3], dict(epsilon=0.3)),
    'images': ([6, 5, 4, 3], dict(epsilon=1e-7)),
    'channels_first': ([6, 3, 4, 5], dict(axis=1)),
    'negative_axis': ([6, 3, 4, 5], dict(axis=-3)),
    'volumes': ([2, 3, 4, 5, 3], dict()),
    'no_scale': ([8, 3], dict(scale=False)),
    'no_shift': ([6, 5, 4, 3], dict(center=False)),
    'one_value': ([1, 3], dict()),
    'synchronized': ([6, 5, 4, 3], dict(synchronized=True)),
}
_CASES = {
    **{
        f'{kind.__name__}-{name}': (kind, *case)
        for kind in _KINDS
        for name, case in _LAYERS.items()
    },
    'clipped': (BatchRenormalization, [8, 3], dict(r_max=1.1, d_max=0.1)),
    'batch_only': (BatchRenormalization, [6, 4, 3], dict(r_max=1, d_max=0)),
    'unclipped': (BatchRenormalization, [8, 3], dict(r_max=1e6, d_max=1e6)),
}
_parametrize = pytest.mark.parametrize(
    ('kind', 'shape', 'arguments'), _CASES.values(), ids=_CASES
)


def _layer(kind, shape, seed=1, **arguments):
  layer = kind(**{'momentum': 0.7, **arguments})
  layer.build([None, *shape[1:]])
  random_values.randomize(layer, seed)
  if kind is HybridBatchNormalization:
    rng = np.random.default_rng(seed)
    layer.mixing.assign(rng.normal(0, 2, layer.mixing.shape))
  return layer


def _check(layer, x, dy, mask=None, tolerance=1e-12, compiled=False):
  """Compares the output, all gradients and the statistics after a step."""
  reference = batch_norm_references.reference(layer, x, mask)
  variables = layer.trainable_variables

  def step(x, mask):
    with tf.GradientTape() as tape:
      tape.watch(x)
      output = layer(x, training=True, mask=mask)
      target = tf.reduce_sum(output * dy)
    return output, tape.gradient(target, [x, *(v.value for v in variables)])

  if compiled:
    step = tf.function(step, jit_compile=True)
  given = None if mask is None else tf.constant(mask)
  output, gradients = step(tf.constant(x), given)
  np.testing.assert_allclose(
      output, reference.output, rtol=tolerance, atol=tolerance
  )
  expected = reference.gradients(dy)
  for name, found in zip(
      ['x', *(v.name for v in variables)], gradients, strict=True
  ):
    np.testing.assert_allclose(
        np.ravel(found),
        np.ravel(expected[name]),
        rtol=tolerance,
        atol=tolerance * np.abs(expected[name]).max(),
        err_msg=name,
    )
  for variable, moved in zip(
      (layer.moving_mean, layer.moving_variance),
      reference.statistics(),
      strict=True,
  ):
    np.testing.assert_allclose(
        variable, np.ravel(moved), rtol=tolerance, atol=tolerance
    )


@_parametrize
def test_steps_equal_numpy(kind, shape, arguments):
  layer = _layer(kind, shape, dtype='float64', **arguments)
  # The second step begins with the statistics after the first one.
  for seed in range(2):
    x, dy = (random_values.inputs(shape, s) for s in (seed, seed + 5))
    _check(layer, x, dy)


@_each_kind
@pytest.mark.parametrize('shape', [[8, 3], [6, 5, 4, 3]])
def test_float32_equals_numpy(kind, shape):
  layer = _layer(kind, shape)
  x, dy = (random_values.inputs(shape, seed).astype('f') for seed in (0, 5))
  is_exact = kind is FederatedBatchNormalization
  _check(layer, x, dy, tolerance=2e-5 if is_exact else 2e-4)


@_each_kind
@pytest.mark.parametrize(
    ('shape', 'mask_shape', 'arguments'),
    [
        ([8, 3], [8], dict()),
        ([4, 7, 3], [4, 7], dict()),
        ([4, 7, 3], [4, 7], dict(axis=1)),
        ([4, 5, 6, 3], [4, 1, 6], dict()),
        ([4, 5, 6, 3], [4, 5, 6], dict(axis=2)),
        ([2, 3, 4, 5, 3], [2, 3, 4, 5], dict()),
    ],
)
def test_masks_equal_numpy(kind, shape, mask_shape, arguments):
  layer = _layer(kind, shape, dtype='float64', **arguments)
  mask = np.random.default_rng(0).integers(0, 2, mask_shape).astype(bool)
  x, dy = (random_values.inputs(shape, seed) for seed in (0, 5))
  # XLA takes a second to compile.
  for compiled in (False, True)[: 1 + (mask_shape == [4, 7])]:
    _check(layer, x, dy, mask, compiled=compiled)


@_each_kind
def test_mask_of_a_masking_layer_is_used(kind):
  x = random_values.inputs([4, 7, 3])
  x[1:, 4:] = 0
  layer, alone = (_layer(kind, [4, 7, 3], dtype='float64') for _ in range(2))
  masking = keras.layers.Masking(dtype='float64')
  model = keras.Sequential(
      [keras.Input([7, 3], dtype='float64'), masking, layer]
  )
  found = model(x, training=True)
  mask = (x != 0).any(-1)
  assert mask.sum() == 19
  expected = alone(x, training=True, mask=tf.constant(mask))
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  for a, b in zip(layer.get_weights(), alone.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)


@_each_kind
@pytest.mark.parametrize(
    ('arguments', 'dtype'),
    [
        (dict(), 'float32'),
        (dict(axis=1, epsilon=0.3, center=False), 'float64'),
        (dict(scale=False), 'float64'),
    ],
)
def test_inference_and_frozen_layers_equal_keras(kind, arguments, dtype):
  shape = [6, 3, 4, 5]
  ours = _layer(kind, shape, dtype=dtype, **arguments)
  theirs = KerasLayer(dtype=dtype, **arguments)
  theirs.build([None, *shape[1:]])
  for variable in theirs.weights:
    variable.assign(getattr(ours, variable.name))
  x = tf.constant(random_values.inputs(shape), dtype)
  expected = theirs(x, training=False)
  before = ours.get_weights()
  np.testing.assert_array_equal(ours(x, training=False), expected)
  np.testing.assert_array_equal(ours(x), expected)
  ours.trainable = False
  np.testing.assert_array_equal(ours(x, training=True), expected)
  for a, b in zip(ours.get_weights(), before, strict=True):
    np.testing.assert_array_equal(a, b)
  assert not ours.trainable_weights


@pytest.mark.parametrize(
    ('kind', 'compiled'),
    [*((kind, False) for kind in _KINDS), (BatchRenormalization, True)],
)
def test_batches_without_values_use_and_keep_the_statistics(kind, compiled):
  layer = _layer(kind, [4, 7, 3], dtype='float64')
  before = layer.get_weights()

  def step(x, mask):
    with tf.GradientTape() as tape:
      output = layer(x, training=True, mask=mask)
      target = tf.reduce_sum(output)
    variables = [v.value for v in layer.trainable_variables]
    return output, tape.gradient(target, variables)

  step = tf.function(step, jit_compile=compiled)
  x = tf.constant(random_values.inputs([4, 7, 3]))
  output, gradients = step(x, tf.zeros([4, 7], tf.bool))
  np.testing.assert_allclose(output, layer(x), rtol=1e-12)
  assert all(np.isfinite(gradient).all() for gradient in gradients)
  output, gradients = step(x[:0], tf.zeros([0, 7], tf.bool))
  assert output.shape == [0, 7, 3]
  for gradient in gradients:
    np.testing.assert_array_equal(gradient, np.zeros(3))
  for a, b in zip(layer.get_weights(), before, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-15)


@_each_kind
def test_mask_of_another_rank_is_an_error(kind):
  layer = _layer(kind, [4, 7, 3])
  with pytest.raises(ValueError, match='mask'):
    layer(random_values.inputs([4, 7, 3]), training=True, mask=np.ones([4]))


@_each_kind
@pytest.mark.parametrize('policy', ['mixed_float16', 'mixed_bfloat16'])
def test_mixed_precision(kind, policy):
  shape = [6, 5, 4, 3]
  layer = _layer(kind, shape, dtype=policy)
  layer.moving_mean.assign([100.0] * 3)
  for seed in range(2):
    x = tf.cast(100 + random_values.inputs(shape, seed), layer.compute_dtype)
    reference = batch_norm_references.reference(
        layer, tf.cast(x, tf.float64).numpy()
    )
    output = layer(x, training=True)
    assert output.dtype == layer.compute_dtype
    np.testing.assert_allclose(
        tf.cast(output, tf.float64), reference.output, rtol=2e-2, atol=2e-2
    )
    # The statistics have float32's accuracy.
    for variable, moved in zip(
        (layer.moving_mean, layer.moving_variance), reference.statistics()
    ):
      np.testing.assert_allclose(variable, np.ravel(moved), rtol=1e-5)
  assert {v.dtype for v in layer.weights} == {'float32'}


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize(
    'kind', [FederatedBatchNormalization, HybridBatchNormalization]
)
def test_layers_with_16_bit_weights(kind, dtype):
  layer = kind(momentum=0.5, dtype=dtype)
  layer.build([None, 100, 3])
  # A sum of all values overflows in float16 and stops growing in bfloat16.
  x = 1000 + 30 * np.random.default_rng(0).normal(size=[64, 100, 3])
  x = tf.cast(x, dtype)
  reference = batch_norm_references.reference(
      layer, tf.cast(x, tf.float64).numpy()
  )
  output = layer(x, training=True)
  assert output.dtype == dtype
  assert {v.dtype for v in layer.weights} == {dtype}
  found = [output, layer.moving_mean.value, layer.moving_variance.value]
  mean, variance = map(np.ravel, reference.statistics())
  for a, b in zip(found, (reference.output, mean, variance), strict=True):
    np.testing.assert_allclose(tf.cast(a, tf.float64), b, rtol=2**-7)


@_each_kind
def test_arguments_configuration_and_weights_equal_keras(kind):
  own = {}
  if kind is BatchRenormalization:
    own = dict(r_max=3.0, d_max=5.0)
  else:
    ours = inspect.signature(kind.__init__).parameters
    expected = inspect.signature(KerasLayer.__init__).parameters
    assert {n: p.default for n, p in ours.items()} == {
        n: p.default for n, p in expected.items() if not n.startswith('renorm')
    }
  arguments = dict(
      axis=1,
      momentum=0.8,
      epsilon=0.1,
      center=False,
      scale=True,
      beta_initializer=keras.initializers.Constant(2.0),
      gamma_initializer='zeros',
      moving_mean_initializer='ones',
      moving_variance_initializer=keras.initializers.Constant(3.0),
      beta_regularizer='l1',
      gamma_regularizer=keras.regularizers.L2(0.1),
      beta_constraint='non_neg',
      gamma_constraint='unit_norm',
      synchronized=True,
      name='norm',
      dtype='mixed_bfloat16',
      trainable=False,
  )
  for given in (dict(name='norm'), arguments):
    theirs = KerasLayer(**given)
    theirs.build([None, 4, 3])
    config = theirs.get_config()
    for layer in (kind(**given), kind.from_config(config)):
      assert layer.get_config() == {**config, **own}
      again = kind.from_config(layer.get_config())
      assert again.get_config() == layer.get_config()
      layer.build([None, 4, 3])
      shared = [v for v in layer.weights if v.name != 'mixing']
      for found, wanted in zip(shared, theirs.weights, strict=True):
        assert found.name == wanted.name
        np.testing.assert_array_equal(found, wanted)
  assert kind(1).axis == 1
  assert layers.batch_norm_layers(keras.Sequential([layer])) == [layer]


@_each_kind
@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(renorm=True), 'renorm=True .* {name}.* leave it out'),
        (dict(axis=(1, 2)), r'axis=\(1, 2\) must be one integer'),
        (dict(axis=1.0), r'axis=1\.0 must be one integer'),
        (dict(fused=True), "Unrecognized keyword .*'fused'"),
    ],
)
def test_wrong_arguments(kind, arguments, message):
  with pytest.raises(ValueError, match=message.format(name=kind.__name__)):
    kind(**arguments)


# All in one process, for the import takes seconds.
_DISTRIBUTED = """
    import keras
    import numpy as np
    import tensorflow as tf
    from tff_bn import layers

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices('CPU')[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])
    assert strategy.num_replicas_in_sync == 2

    def values(arrays):
      return strategy.experimental_distribute_values_from_function(
          lambda c: tf.constant(arrays[c.replica_id_in_sync_group])
      )

    def step(layer, x, dy, mask):
      with tf.GradientTape() as tape:
        tape.watch(x)
        output = layer(x, training=True, mask=mask)
        target = tf.reduce_sum(output * dy)
      variables = [v.value for v in layer.trainable_variables]
      dx, *others = tape.gradient(target, [x, *variables])
      return output, dx, others

    def check(found, wanted):
      np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)

    def check_replicas(build, sizes, is_masked):
      parts = [
          rng.normal(10 * i, 1 + i, (n, 2, 3)) for i, n in enumerate(sizes)
      ]
      dys = [rng.normal(size=part.shape) for part in parts]
      masks = [rng.integers(0, 2, (n, 2)).astype(bool) for n in sizes]
      with strategy.scope():
        layer = build()
        layer.build([None, 2, 3])
      alone = build()
      alone.build([None, 2, 3])

      @tf.function
      def distributed(*args):
        output, dx, others = strategy.run(
            lambda x, dy, mask: step(layer, x, dy, mask if is_masked else None),
            args,
        )
        total = [
            strategy.reduce(tf.distribute.ReduceOp.SUM, g, axis=None)
            for g in others
        ]
        return output, dx, total

      for _ in range(2):
        *found, total = distributed(values(parts), values(dys), values(masks))
        x, dy, mask = map(np.concatenate, (parts, dys, masks))
        *wanted, expected = step(
            alone, tf.constant(x), dy, mask if is_masked else None
        )
        for a, b in zip(found, wanted):
          check(np.concatenate(strategy.experimental_local_results(a)), b)
        for a, b in zip(total, expected):
          check(a, b)
      for a, b in zip(layer.weights, alone.weights):
        for value in strategy.experimental_local_results(a):
          check(value, b)

    # Replicas of different sizes, means and deviations; one without any data.
    rng = np.random.default_rng(0)
    for kind, is_synchronized in (
        (layers.FederatedBatchNormalization, False),  # It always is.
        (layers.BatchRenormalization, True),
        (layers.HybridBatchNormalization, True),
    ):
      for sizes, axis, is_masked in (((5, 3), 1, False), ((4, 0), -1, True)):
        check_replicas(
            lambda: kind(
                axis, 0.75, dtype='float64', synchronized=is_synchronized
            ),
            sizes,
            is_masked,
        )
    print('done')
"""


@pytest.mark.slow
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
