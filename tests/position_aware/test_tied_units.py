"""Tests of finding the hidden units that can be permuted."""

import functools

import keras
import numpy as np
import pytest
import random_models
import tensorflow as tf
import unit_models

import tff_bn
from tff_bn import layers
from tff_bn import models
from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units

_layers = keras.layers
# The numbers of hidden units; the blocks of a residual stage count once.
_NUM_UNITS = {
    'mlp3': 30,
    'mlp4': 3 * 1024,
    'small_cnn': 16 + 32 + 32,
    'digits_cnn': 64 + 64 + 128 + 2048 + 512,
    'fbn_cnn': 64 + 64 + 128 + 128 + 128,
    'vgg9': 32 + 64 + 128 + 128 + 256 + 256 + 512 + 512,
    'resnet20': 4 * 16 + 4 * 32 - 16 + 4 * 64 - 32,
}


def _assert_same_outputs(model, other, jit_compile=False):
  x = random_models.inputs(model, 3)
  if jit_compile:
    run = tf.function(model, jit_compile=True)
    expected = run(x).numpy()
    model.set_weights(other.get_weights())
    found = run(x)
  else:
    expected, found = np.asarray(model(x)), other(x)
  scale = np.abs(expected).max()
  assert scale > 1e-3
  # Samples differ, so the outputs are not constants.
  assert np.abs(expected[0] - expected[1]).max() > 1e-3 * scale
  assert np.abs(found - expected).max() <= 1e-5 * scale


def _assert_all_moved(model, shuffled, fixed=('logits/bias',)):
  """Checks that no unit stays in place, as with probability 1."""
  for weight, other in zip(model.weights, shuffled.weights, strict=True):
    assert weight.path == other.path
    before, after = weight.numpy(), other.numpy()
    np.testing.assert_array_equal(
        np.sort(before, axis=None), np.sort(after, axis=None)
    )
    if weight.path in fixed:
      np.testing.assert_array_equal(before, after)
    elif weight.path.startswith('logits'):
      assert (before != after).all()
    else:
      units = (-1, before.shape[-1])
      assert (before.reshape(units) != after.reshape(units)).any(axis=0).all()


# Tests must leave these models as they are.
_build = functools.cache(random_models.build)
_groups = functools.cache(tied_units.unit_groups)


def _sizes(model):
  return {group.name: group.size for group in _groups(model)}


def _occurrences(model, name):
  """Returns the positions by the weight's name and axis."""
  (group,) = (g for g in _groups(model) if g.name == name)
  return {
      (model.weights[o.weight].path, o.axis): o.positions.tolist()
      for o in group.occurrences
  }


def test_groups_of_a_plain_network():
  model = _build('small_cnn')
  assert list(_sizes(model).items()) == [
      ('conv_1', 16),
      ('conv_2', 32),
      ('conv_3', 32),
  ]
  rows = [[i] for i in range(16)]
  assert _occurrences(model, 'conv_1') == {
      ('conv_1/kernel', 3): rows,
      ('norm_1/gamma', 0): rows,
      ('norm_1/beta', 0): rows,
      ('norm_1/moving_mean', 0): rows,
      ('norm_1/moving_variance', 0): rows,
      ('conv_2/kernel', 2): rows,
  }


def test_units_that_are_flattened_occur_once_for_each_pixel():
  model = _build('fbn_cnn')
  found = _occurrences(model, 'conv_4')
  assert found['conv_4/kernel', 3] == [[i] for i in range(128)]
  assert found['conv_4/bias', 0] == [[i] for i in range(128)]
  assert found['dense/kernel', 0] == [
      [i, 128 + i, 256 + i, 384 + i] for i in range(128)
  ]


def test_groups_of_a_residual_network():
  model = _build('resnet20')
  inner = {
      f'stage_{stage}_block_{block}_1_conv': channels
      for stage, channels in ((1, 16), (2, 32), (3, 64))
      for block in (1, 2, 3)
  }
  assert _sizes(model) == {
      **inner,
      'stem_conv': 16,
      'stage_2_block_1_2_conv': 16,
      'stage_3_block_1_2_conv': 32,
  }
  # The channels of the units in each stage.
  channels = {
      'stem_conv': [
          [*range(0, 16)],
          [*range(8, 24)],
          [*range(24, 40)],
      ],
      'stage_2_block_1_2_conv': [
          [],
          [*range(0, 8), *range(24, 32)],
          [*range(16, 24), *range(40, 48)],
      ],
      'stage_3_block_1_2_conv': [[], [], [*range(0, 16), *range(48, 64)]],
  }
  for name, of_stages in channels.items():
    found = _occurrences(model, name)
    for stage, expected in enumerate(of_stages, start=1):
      expected = [[i] for i in expected]
      prefix = f'stage_{stage}_block'
      for block in (1, 2, 3):
        for key in (
            (f'{prefix}_{block}_2_conv/kernel', 3),
            (f'{prefix}_{block}_2_norm/moving_variance', 0),
        ):
          assert found.get(key, []) == expected
        if block > 1:
          assert found.get((f'{prefix}_{block}_1_conv/kernel', 2), []) == (
              expected
          )
      if stage < 3:
        following = (f'stage_{stage + 1}_block_1_1_conv/kernel', 2)
        assert found.get(following, []) == expected
    assert found['logits/kernel', 0] == [[i] for i in of_stages[-1]]


def test_group_normalization_permutes_within_its_groups():
  model = _build('mlp3', 'group3')
  assert _sizes(model) == {f'hidden[{i}]': 10 for i in range(3)}
  for i in range(3):
    rows = [[j] for j in range(10 * i, 10 * i + 10)]
    assert _occurrences(model, f'hidden[{i}]') == {
        ('hidden/kernel', 1): rows,
        ('norm/gamma', 0): rows,
        ('norm/beta', 0): rows,
        ('logits/kernel', 0): rows,
    }
  # A single group, or one group per unit, treats all units equally.
  for normalization in ('group1', 'group30'):
    assert _sizes(_build('mlp3', normalization)) == {'hidden': 30}


@pytest.mark.parametrize(
    ('name', 'normalization'),
    [
        *((name, 'batch') for name in ('small_cnn', 'mlp3', 'fbn_cnn')),
        ('resnet20', 'batch'),
        *(
            ('small_cnn', normalization)
            for normalization in ('none', 'group1', 'group2', 'layer')
        ),
        ('small_cnn', 'weight_standardization'),
        ('mlp3', 'static_batch'),
        ('mlp3', 'feature'),
        ('fbn_cnn', 'kernel'),
        *(
            pytest.param(name, normalization, marks=pytest.mark.slow)
            for name, normalization in (
                *((name, 'batch') for name in ('mlp4', 'digits_cnn', 'vgg9')),
                *(('resnet20', 'group2'), ('resnet20', 'batch_renorm')),
            )
        ),
    ],
)
def test_outputs_of_models_stay(name, normalization):
  model = _build(name, normalization)
  assert sum(_sizes(model).values()) == _NUM_UNITS[name]
  shuffled = permutation.shuffle_units(model, 1.0, 5)
  _assert_all_moved(model, shuffled)
  for layer in [*model.layers, *shuffled.layers]:
    # Dropped values have places, and do not move with the units.
    if isinstance(layer, layers.KernelNormalization):
      layer.dropout_rate = 0
  _assert_same_outputs(model, shuffled)


_SAME_FOR_EACH_UNIT = (
    *('absolute', 'celu', 'cos', 'elu', 'exp', 'expm1', 'gelu', 'hard_shrink'),
    *('hard_sigmoid', 'hard_silu', 'hard_tanh', 'leaky_relu', 'log', 'log1p'),
    *('log_sigmoid', 'log_softmax', 'negative', 'reciprocal', 'relu', 'relu6'),
    *('rsqrt', 'selu', 'sigmoid', 'sign', 'silu', 'sin', 'soft_shrink'),
    *('softmax', 'softplus', 'softsign', 'sparse_plus', 'sparse_sigmoid'),
    *('sparsemax', 'sqrt', 'square', 'squareplus', 'stop_gradient', 'tanh'),
    'tanh_shrink',
)


@pytest.mark.parametrize(
    'build', unit_models.BUILDERS, ids=lambda f: f.__name__
)
def test_outputs_of_other_models_stay(build):
  keras.utils.set_random_seed(3)
  inputs, x, sizes = build()
  outputs = _layers.Dense(3, name='logits')(x)
  model = keras.Model(inputs, outputs)
  random_models.randomize(model)
  assert _sizes(model) == sizes
  shuffled = permutation.shuffle_units(model, 1.0, 5)
  assert any(
      (a != b).any()
      for a, b in zip(model.get_weights(), shuffled.get_weights(), strict=True)
  )
  # Without oneDNN, TensorFlow supports channels_first on the CPU only in
  # compiled functions.
  _assert_same_outputs(
      model, shuffled, jit_compile=build is unit_models.channels_first
  )


def test_outputs_of_elementwise_functions_stay():
  inputs = keras.Input((4,))
  x = _layers.Dense(5, 'sigmoid', name='a')(inputs)
  functions = [
      *(getattr(keras.ops, name) for name in _SAME_FOR_EACH_UNIT),
      lambda x: keras.ops.cast(x, 'float16'),
      lambda x: keras.ops.threshold(x, 0.1, 0),
      lambda x: x**2,
  ]
  outputs = [_layers.Dense(2)(function(x)) for function in functions]
  model = keras.Model(inputs, outputs)
  assert _sizes(model) == {'a': 5}
  x = random_models.inputs(model, 3)
  found, expected = permutation.shuffle_units(model, 1.0, 5)(x), model(x)
  np.testing.assert_allclose(found, expected, 1e-5, 1e-5)


@pytest.mark.parametrize(
    'function',
    [
        lambda x: x[:, ::-1],
        lambda x: x + np.ones(6, np.float32),
        lambda x: keras.ops.multiply(tf.range(6.0), x),
        lambda x: x @ np.ones((6, 6), np.float32),
        lambda x: keras.ops.reshape(x, (-1, 6)),
        lambda x: keras.ops.cumsum(x, axis=1),
        keras.activations.glu,
    ],
    ids=['index', 'add', 'multiply', 'matmul', 'reshape', 'cumsum', 'glu'],
)
def test_unsupported_functions(function):
  inputs = keras.Input((4,))
  x = function(_layers.Dense(6)(inputs))
  model = keras.Model(inputs, _layers.Dense(2)(x))
  with pytest.raises(
      ValueError,
      match='the operation .*(not known|called with a constant).*Supported are',
  ):
    tied_units.unit_groups(model)


@pytest.mark.slow
def test_a_residual_network_of_keras():
  model = keras.applications.ResNet50(
      weights=None,
      input_shape=(32, 32, 3),
      classes=10,
      classifier_activation=None,
  )
  sizes = _sizes(model)
  # 16 blocks have two inner convolutions each. Their outputs are one group in
  # each of four stages, and the first convolution has its own.
  assert len(sizes) == 16 * 2 + 4 + 1
  assert sizes['conv1_conv'] == 64
  assert sizes['conv5_block3_2_conv'] == 512
  assert sizes['conv5_block1_0_conv'] == 2048
  random_models.randomize(model)
  _assert_same_outputs(model, permutation.shuffle_units(model, 1.0, 5))


def test_unsupported_low_rank_adapters():
  model = keras.Sequential(
      [
          keras.Input((4,)),
          _layers.Dense(5, name='a'),
          _layers.Dense(2),
      ]
  )
  model.get_layer('a').enable_lora(2)
  with pytest.raises(ValueError, match="layer 'a' .* enable_lora"):
    tied_units.unit_groups(model)


def test_outputs_of_federated_batch_normalization_stay():
  model = tff_bn.convert_batch_norm(_build('small_cnn'))
  shuffled = permutation.shuffle_units(model, 1.0, 5)
  _assert_all_moved(model, shuffled)
  _assert_same_outputs(model, shuffled)


def test_every_output_of_a_model_stays():
  inputs = keras.Input((4,))
  x = _layers.Dense(5, 'relu', name='a')(inputs)
  y = _layers.Dense(6, 'relu', name='b')(x)
  model = keras.Model(inputs, [_layers.Dense(2)(y), x])
  assert _sizes(model) == {'b': 6}


def test_mixed_precision():
  model = models.build_model_fn(
      'small_cnn', (8, 8, 1), 10, precision='mixed_bfloat16'
  )()
  assert _sizes(model) == _sizes(_build('small_cnn'))


class _Standardized(_layers.Conv2D):

  def call(self, inputs):
    return super().call(inputs)


@pytest.mark.parametrize(
    ('layer', 'message'),
    [
        (_layers.DepthwiseConv2D(1, name='other'), 'its effect on units'),
        (_layers.Reshape((2, 48), name='other'), 'its effect on units'),
        (_layers.Lambda(abs, name='other'), 'its effect on units'),
        (_layers.Permute((2, 1, 3), name='other'), 'its effect on units'),
        (_Standardized(6, 1, name='other'), 'its effect on units'),
        (random_models.Subclassed(), 'its effect on units'),
        (_layers.Conv2D(6, 1, groups=2, name='other'), 'it has groups=2'),
        (_layers.Activation(tf.sin, name='other'), "is none of Keras's"),
        (
            _layers.Conv2D(6, 1, activation=abs, name='other'),
            "is none of Keras's",
        ),
        (
            _layers.LayerNormalization([-1, 1], name='other'),
            r'axis=\[3, 1\] are not in ascending order',
        ),
        (
            _layers.GlobalMaxPooling2D(
                data_format='channels_first', name='other'
            ),
            'it expects the units of its input on axis 1, but they are on ax',
        ),
        (
            _layers.MaxPooling2D(1, data_format='channels_first', name='other'),
            'axis 1',
        ),
    ],
)
def test_unsupported_layers(layer, message):
  inputs = keras.Input((4, 4, 2))
  x = layer(unit_models.conv(6, 'a')(inputs))
  model = keras.Model(inputs, _layers.Dense(3)(_layers.Flatten()(x)))
  name = layer.name
  with pytest.raises(
      ValueError, match=f"the layer '{name}' .*{message}.*Supported are Dense"
  ):
    tied_units.unit_groups(model)


def test_unsupported_recurrent_layers_and_constants():
  inputs = keras.Input((5, 4))
  model = keras.Model(inputs, _layers.Dense(2)(_layers.LSTM(3)(inputs)))
  with pytest.raises(ValueError, match=r"the layer 'lstm.*' \(LSTM\)"):
    tied_units.unit_groups(model)
  x = _layers.Add()([_layers.Dense(3)(inputs), tf.ones([1, 5, 3])])
  model = keras.Model(inputs, _layers.Dense(2)(x))
  with pytest.raises(ValueError, match='is called with a constant'):
    tied_units.unit_groups(model)


def test_merged_units_need_the_same_axis_and_number():
  inputs = keras.Input((3,))
  x = _layers.Dense(4, name='a')(inputs)
  y = _layers.Dense(1, name='b')(inputs)
  model = keras.Model(inputs, _layers.Dense(2)(_layers.Add()([x, y])))
  with pytest.raises(ValueError, match='inputs have the different shapes'):
    tied_units.unit_groups(model)


def test_flattened_units_need_a_known_number():
  inputs = keras.Input((None, 4, 2))
  outputs = _layers.Flatten(name='flat')(unit_models.conv(3, 'a')(inputs))
  with pytest.raises(ValueError, match="layer 'flat' .* an unknown size"):
    tied_units.unit_groups(keras.Model(inputs, outputs))


def test_unsupported_models():
  with pytest.raises(TypeError, match='must be a keras.Model, but is a D'):
    tied_units.unit_groups(_layers.Dense(3))
  with pytest.raises(ValueError, match="'mine' .* is not a functional model"):
    tied_units.unit_groups(random_models.Subclassed())
  with pytest.raises(ValueError, match='is not a functional model'):
    tied_units.unit_groups(keras.Sequential([_layers.Dense(2)]))
  only_outputs = keras.Sequential([keras.Input((3,)), _layers.Dense(2)])
  assert tied_units.unit_groups(only_outputs) == []
  with pytest.raises(ValueError, match='no hidden units that can be'):
    permutation.shuffle_units(only_outputs, 0.1, 0)
  # A single unit has no other to trade places with.
  single = keras.Sequential(
      [keras.Input((3,)), _layers.Dense(1), _layers.Dense(2)]
  )
  assert tied_units.unit_groups(single) == []
  inputs = keras.Input((3,))
  x = _layers.Dense(4)(inputs)
  two = keras.Model(inputs, [_layers.Dense(2)(x), _layers.Dense(2)(x)])
  with pytest.raises(ValueError, match='has 2 outputs'):
    permutation.shuffle_error(two, np.ones([1, 3]), 0.1, 0)
