"""Tests of permuting hidden units and of what it does to the outputs."""

import collections
import itertools

import keras
import numpy as np
import pytest
import random_models
import tensorflow as tf

import tff_bn
from tff_bn import models
from tff_bn.layers import PositionEncoding
from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units

_layers = keras.layers
# Hidden units: those of a residual stage's blocks count once.
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
  def run(m):
    if jit_compile:
      m = tf.function(m, jit_compile=True)
    return np.asarray(m(random_models.inputs(model, 3)))

  expected = run(model)
  scale = np.abs(expected).max()
  assert scale > 1e-3
  # Samples differ, so the outputs are not constants.
  assert np.abs(expected[0] - expected[1]).max() > 1e-3 * scale
  assert np.abs(run(other) - expected).max() <= 1e-5 * scale


def _assert_all_moved(model, shuffled, fixed=('logits/bias',)):
  """With probability 1 no unit stays where it was."""
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


def _sizes(model):
  return {group.name: group.size for group in tied_units.unit_groups(model)}


def _occurrences(model, name):
  """(name of the weight, axis) -> positions."""
  (group,) = (g for g in tied_units.unit_groups(model) if g.name == name)
  return {
      (model.weights[o.weight].path, o.axis): o.positions.tolist()
      for o in group.occurrences
  }


# ---- Permutations ----


def _swap_rows(matrix, a, b):
  matrix = matrix.copy()
  matrix[[a, b]] = matrix[[b, a]]
  return matrix


def _distribution(num_units, probability):
  """Every outcome of algorithm 1, with matrices: bytes -> its probability."""
  outcomes = [(np.eye(num_units), 1.0)]
  for j in range(num_units - 1):
    following = []
    for matrix, p in outcomes:
      following.append((matrix, p * (1 - probability)))
      for i in range(j + 1, num_units):
        share = probability / (num_units - 1 - j)
        following.append((_swap_rows(matrix, j, i), p * share))
    outcomes = following
  result = collections.Counter()
  for matrix, p in outcomes:
    result[matrix.tobytes()] += p
  return result


def _expected_matrix(num_units, probability):
  """The mean of the permutation matrix: a product, as steps are independent."""
  result = np.eye(num_units)
  for j in range(num_units - 1):
    step = (1 - probability) * np.eye(num_units)
    for i in range(j + 1, num_units):
      step += (
          probability
          / (num_units - 1 - j)
          * _swap_rows(np.eye(num_units), j, i)
      )
    result = step @ result
  return result


def _expected_kept(num_units, probability):
  """In closed form, of one permutation.

  A unit that was swapped away never returns. Unit j stays if none of those
  before it is swapped with it, and it isn't itself; the last one has no turn.
  """
  stay = [
      np.prod([1 - probability / (num_units - 1 - k) for k in range(j)])
      * (1 - probability if j < num_units - 1 else 1)
      for j in range(num_units)
  ]
  return np.mean(stay)


def test_all_permutations_have_their_probability():
  rng = np.random.default_rng(0)
  num = 20_000
  counts = collections.Counter(
      np.eye(4)[permutation.random_permutation(4, 0.6, rng)].tobytes()
      for _ in range(num)
  )
  expected = _distribution(4, 0.6)
  assert set(counts) <= set(expected)
  for matrix, p in expected.items():
    assert abs(counts[matrix] / num - p) < 4.5 * np.sqrt(p * (1 - p) / num)


def test_permutations_without_and_with_certain_swaps():
  rng = np.random.default_rng(0)
  np.testing.assert_array_equal(
      permutation.random_permutation(9, 0.0, rng), np.arange(9)
  )
  np.testing.assert_array_equal(permutation.random_permutation(1, 1.0, rng), 0)
  for _ in range(20):
    # Sattolo's algorithm: one cycle through all.
    p = permutation.random_permutation(9, 1.0, rng)
    unit, visited = 0, []
    for _ in range(9):
      visited.append(unit)
      unit = p[unit]
    assert sorted(visited) == list(range(9))
    assert permutation.kept_share(p) == 0


def test_kept_share():
  assert permutation.kept_share([0, 1, 2, 3]) == 1
  assert permutation.kept_share([0, 2, 1, 3, 4]) == 0.6
  assert permutation.kept_share(np.array([1, 0])) == 0


@pytest.mark.parametrize('probability', [0.1, 0.5, 1.0])
@pytest.mark.parametrize('num_units', [2, 5, 40])
def test_mean_kept_share_of_one_permutation(num_units, probability):
  expected = np.mean(np.diag(_expected_matrix(num_units, probability)))
  assert expected == pytest.approx(_expected_kept(num_units, probability))
  found = permutation.mean_kept_share(num_units, probability, repeats=1000)
  # No share deviates by more than 1/2 on average.
  assert found == pytest.approx(expected, abs=4.5 * 0.5 / 1000**0.5)


def test_mean_kept_share_is_the_papers():
  for seed in range(3):
    assert 0.80 <= permutation.mean_kept_share(1024, 0.1, seed=seed) <= 0.86
  local = dict(num_steps=50, repeats=200)
  # Section 5.2: about 84 % are kept for 1, and 3.8 % misaligned for 0.2.
  assert permutation.mean_kept_share(
      256, 0.1, num_shuffles=1, **local
  ) == pytest.approx(0.84, abs=0.03)
  assert permutation.mean_kept_share(
      256, 0.1, num_shuffles=0.2, **local
  ) == pytest.approx(0.962, abs=0.02)


@pytest.mark.parametrize(
    ('num_shuffles', 'num_steps'), [(0.3, 4), (2, 4), (4, 4), (3.5, 10)]
)
def test_mean_kept_share_of_several_permutations(num_shuffles, num_steps):
  # The mean of a product of independent matrices is that of their means.
  share = num_shuffles / num_steps
  step = (1 - share) * np.eye(6) + share * _expected_matrix(6, 0.3)
  expected = np.mean(np.diag(np.linalg.matrix_power(step, num_steps)))
  found = permutation.mean_kept_share(
      6, 0.3, num_shuffles=num_shuffles, num_steps=num_steps, repeats=3000
  )
  assert found == pytest.approx(expected, abs=4.5 * 0.4 / 3000**0.5)


def test_mean_kept_share_never_and_always():
  share = permutation.mean_kept_share
  assert share(5, 1.0, num_shuffles=0, num_steps=3) == 1
  # Two swaps of the same two units, in each of two steps.
  assert share(2, 1.0, num_shuffles=2, num_steps=2) == 1
  assert share(2, 1.0, num_shuffles=3, num_steps=3) == 0
  assert share(50, 0.5, seed=1) == share(50, 0.5, seed=1)
  assert share(50, 0.5, seed=1) != share(50, 0.5, seed=2)


# ---- Groups of units ----


def test_groups_of_a_plain_network():
  model = random_models.build('small_cnn')
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
  model = random_models.build('fbn_cnn')
  found = _occurrences(model, 'conv_4')
  assert found['conv_4/kernel', 3] == [[i] for i in range(128)]
  assert found['conv_4/bias', 0] == [[i] for i in range(128)]
  assert found['dense/kernel', 0] == [
      [i, 128 + i, 256 + i, 384 + i] for i in range(128)
  ]


def test_groups_of_a_residual_network():
  model = random_models.build('resnet20')
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
  # In which channels of the stages the units are.
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
  model = random_models.build('mlp3', 'group3')
  assert _sizes(model) == {f'hidden[{i}]': 10 for i in range(3)}
  for i in range(3):
    rows = [[j] for j in range(10 * i, 10 * i + 10)]
    assert _occurrences(model, f'hidden[{i}]') == {
        ('hidden/kernel', 1): rows,
        ('norm/gamma', 0): rows,
        ('norm/beta', 0): rows,
        ('logits/kernel', 0): rows,
    }
  # One of all units, and those of one unit each, treat all alike.
  for normalization in ('group1', 'group30'):
    assert _sizes(random_models.build('mlp3', normalization)) == {'hidden': 30}


# ---- What permuting changes, and what it doesn't ----


@pytest.mark.parametrize(
    ('name', 'normalization'),
    [
        *((name, 'batch') for name in random_models.SHAPES),
        *(
            (name, normalization)
            for name in ('mlp3', 'small_cnn')
            for normalization in ('none', 'group1', 'group2', 'layer')
        ),
        ('resnet20', 'none'),
        ('resnet20', 'group2'),
        ('mlp4', 'layer'),
        ('fbn_cnn', 'group2'),
        ('vgg9', 'none'),
    ],
)
def test_outputs_of_models_stay(name, normalization):
  model = random_models.build(name, normalization)
  assert sum(_sizes(model).values()) == _NUM_UNITS[name]
  shuffled = permutation.shuffle_units(model, 1.0, 5)
  _assert_all_moved(model, shuffled)
  _assert_same_outputs(model, shuffled)


def test_position_encodings_change_no_permutation():
  model = random_models.build('small_cnn')
  shuffled = permutation.shuffle_units(model, 1.0, 5)
  off = tff_bn.add_position_encodings(model, 'multiply', 0)
  assert any(isinstance(layer, PositionEncoding) for layer in off.layers)
  for a, b in zip(
      permutation.shuffle_units(off, 1.0, 5).get_weights(),
      shuffled.get_weights(),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def _conv(filters, name, size=3, **kwargs):
  kwargs = {'padding': 'same', **kwargs}
  return _layers.Conv2D(filters, size, name=name, **kwargs)


def _projections():
  """A residual block with a projection, one without, and a mean."""
  inputs = keras.Input((7, 6, 3))
  x = _conv(6, 'stem', activation='relu')(inputs)
  y = _conv(8, 'a', strides=2)(x)
  y = _layers.BatchNormalization()(y)
  y = _layers.LeakyReLU()(y)
  y = _conv(8, 'b', use_bias=False)(y)
  x = _layers.Add()([_conv(8, 'projection', 1, strides=2)(x), y])
  x = _layers.ELU()(x)
  x = _layers.Add()([x, _conv(8, 'c', activation=tf.nn.relu)(x)])
  x = _layers.GlobalMaxPooling2D()(x)
  return inputs, x, {'stem': 6, 'projection': 8, 'a': 8}


def _flattened_sum():
  """What is flattened is added to as many units of a dense layer."""
  inputs = keras.Input((4, 6, 2))
  x = _conv(5, 'a', strides=2)(inputs)
  x = _layers.Flatten()(x)
  y = _layers.Dense(30, 'tanh', name='b')(_layers.Flatten()(inputs))
  x = _layers.Maximum()([y, x])
  x = _layers.LayerNormalization()(x)
  return inputs, _layers.Dense(4, 'softmax', name='c')(x), {'b': 5, 'c': 4}


def _flattened_channels_first():
  inputs = keras.Input((4, 6, 2))
  x = _conv(5, 'a', strides=2)(inputs)
  x = _layers.Flatten('channels_first')(x)
  return inputs, _layers.BatchNormalization()(x), {'a': 5}


def _channels_first():
  inputs = keras.Input((2, 5, 7))
  kwargs = dict(data_format='channels_first')
  x = _layers.Conv2D(4, 3, activation='relu', name='a', **kwargs)(inputs)
  x = _layers.BatchNormalization(1)(x)
  x = _layers.ZeroPadding2D(1, **kwargs)(x)
  # Not as many channels as the width: Keras 3.15 then adds the bias along the
  # width (`keras.ops.add` of its TensorFlow backend).
  x = _layers.Conv2D(5, 2, name='b', **kwargs)(x)
  x = _layers.MaxPooling2D(2, 1, **kwargs)(x)
  y = _layers.GlobalAveragePooling2D(**kwargs)(x)
  y = _layers.Dense(5, name='c')(y)
  x = _layers.Dense(5, name='d')(_layers.Flatten(**kwargs)(x))
  x = _layers.Dense(60, name='e')(_layers.Average()([y, x]))
  y = _layers.Conv2D(3, 1, name='f', **kwargs)(inputs)
  y = _layers.Conv2D(4, (2, 3), name='g', **kwargs)(y)
  # Flattened as they are, channels change slowest.
  y = _layers.Flatten()(_layers.MaxPooling2D((1, 2), **kwargs)(y))
  y = _layers.Dense(60, name='h')(y)
  sizes = {'a': 4, 'b': 5, 'c': 5, 'f': 3, 'g': 4, 'e': 60}
  return inputs, _layers.Add()([x, y]), sizes


def _flattened_by_axis():
  inputs = keras.Input((3, 4, 2))
  x = _conv(6, 'a')(inputs)
  x = _layers.Flatten()(x)
  # Groups of 9 values: the first has pixel 1 and half of pixel 2, so that
  # channels 0 to 2 differ from 3 to 5.
  x = _layers.GroupNormalization(8)(x)
  return inputs, x, {'a[0]': 3, 'a[1]': 3}


def _normalizations_along_other_axes():
  inputs = keras.Input((4, 5, 2))
  x = _conv(6, 'a', activation='relu')(inputs)
  x = _layers.LayerNormalization([1, 2, 3])(x)
  x = _layers.LayerNormalization([1, 3])(x)
  x = _layers.LayerNormalization(2)(x)
  x = _layers.BatchNormalization(1)(x)
  x = _layers.GroupNormalization(2, axis=1)(x)
  x = _layers.UnitNormalization(3)(x)
  x = _layers.Softmax()(x)
  x = _layers.Dense(7, name='b')(x)
  x = _layers.AveragePooling2D((2, 3), 1)(_layers.SpatialDropout2D(0.3)(x))
  return inputs, _layers.Flatten()(x), {'a': 6, 'b': 7}


def _squeeze_and_excitation():
  inputs = keras.Input((4, 5, 2))
  x = _conv(6, 'a', activation='swish')(inputs)
  y = _layers.GlobalAveragePooling2D(keepdims=True)(x)
  y = _layers.Dense(3, 'relu', name='b')(y)
  y = _layers.Dense(6, 'sigmoid', name='c')(y)
  x = _layers.Multiply()([x, y])
  x = _layers.ZeroPadding2D(((1, 0), (2, 1)))(x)
  return inputs, _layers.Flatten()(x), {'a': 6, 'b': 3}


def _shared():
  """Layers that are called twice, one of them after itself."""
  inputs = keras.Input((5,))
  dense = _layers.Dense(6, name='a')
  again = _layers.Dense(6, 'tanh', name='b')
  norm = _layers.BatchNormalization()
  x = norm(again(norm(again(dense(inputs)))))
  y = _layers.Dense(6, 'tanh', name='c')(inputs)
  y = again(y)
  return inputs, _layers.Subtract()([x, y]), {'a': 6}


def _shared_with_inputs():
  """Units that a layer takes in the place of inputs stay."""
  inputs = keras.Input((6,))
  dense = _layers.Dense(6, 'tanh', name='a')
  norm = _layers.LayerNormalization()
  x = norm(_layers.Dense(6, 'tanh', name='b')(norm(inputs)))
  y = _layers.Dense(6, 'tanh', name='c')(dense(inputs))
  y = _layers.Add()([_layers.Dense(6, name='d')(y), inputs])
  z = _layers.Dense(6, name='e')(dense(dense(inputs)))
  return inputs, _layers.Average()([x, y, z]), {'c': 6}


def _shifted():
  """Padded in two ways for the same kernel, whose inputs overlap."""
  inputs = keras.Input((3, 4, 2))
  kernel = _conv(7, 'b')

  def pad(x, before, after):
    return _layers.ZeroPadding2D(
        ((0, 0), (before, after)), data_format='channels_first'
    )(x)

  x = _conv(4, 'a', activation='relu')(inputs)
  x = _layers.Add()([kernel(pad(x, 0, 4)), kernel(pad(x, 2, 2))])
  return inputs, _layers.Flatten()(x), {'a': 2, 'b': 7}


def _operations():
  """With functions of `keras.ops` and operators instead of layers."""
  ops = keras.ops
  inputs = keras.Input((4, 5, 2))
  x = ops.relu(_conv(6, 'a')(inputs))
  y = _layers.Dense(7, activation=ops.silu, name='b')(x)
  y = _layers.BatchNormalization(-1)(y / 2)
  x = ops.maximum(x, 0.1 * x) + _conv(6, 'c')(y)
  x = keras.activations.relu(x, max_value=6) ** np.float32(2) - 1
  y = keras.activations.softmax(_layers.Dense(6, name='d')(x))
  x = ops.sqrt(ops.abs(x * ops.cast(y, 'float32')) + ops.ones(()))
  return inputs, _layers.Flatten()(-x), {'a': 6, 'b': 7}


def _nested():
  inner_inputs = keras.Input((4,))
  y = _layers.Dense(5, 'relu', name='a')(inner_inputs)
  inner = keras.Model(inner_inputs, [y, _layers.Dense(4, name='b')(y)])
  sequential = keras.Sequential(
      [keras.Input((5,)), _layers.Dense(6, 'gelu', name='c')]
  )
  inputs = keras.Input((4,))
  y, x = inner(inputs)
  y2, x = inner(_layers.ReLU()(x))
  x = _layers.Add()([sequential(_layers.Add()([y, y2])), sequential(y)])
  return inputs, x, {'a': 5, 'c': 6}


_MODELS = [
    _projections,
    _flattened_sum,
    _flattened_channels_first,
    _channels_first,
    _flattened_by_axis,
    _normalizations_along_other_axes,
    _squeeze_and_excitation,
    _shared,
    _shared_with_inputs,
    _shifted,
    _operations,
    _nested,
]
_SAME_FOR_EACH_UNIT = (
    *('absolute', 'celu', 'cos', 'elu', 'exp', 'expm1', 'gelu', 'hard_shrink'),
    *('hard_sigmoid', 'hard_silu', 'hard_tanh', 'leaky_relu', 'log', 'log1p'),
    *('log_sigmoid', 'log_softmax', 'negative', 'reciprocal', 'relu', 'relu6'),
    *('rsqrt', 'selu', 'sigmoid', 'sign', 'silu', 'sin', 'soft_shrink'),
    *('softmax', 'softplus', 'softsign', 'sparse_plus', 'sparse_sigmoid'),
    *('sparsemax', 'sqrt', 'square', 'squareplus', 'stop_gradient', 'tanh'),
    'tanh_shrink',
)


@pytest.mark.parametrize('build', _MODELS, ids=lambda f: f.__name__)
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
  # Without oneDNN, TensorFlow convolves channels_first on the CPU only when it
  # is compiled.
  _assert_same_outputs(model, shuffled, jit_compile=build is _channels_first)


@pytest.mark.parametrize(
    'function',
    [
        *(
            pytest.param(getattr(keras.ops, name), id=name)
            for name in _SAME_FOR_EACH_UNIT
        ),
        pytest.param(lambda x: keras.ops.cast(x, 'float16'), id='cast'),
        pytest.param(lambda x: keras.ops.threshold(x, 0.1, 0), id='threshold'),
        pytest.param(lambda x: x**2, id='power'),
    ],
)
def test_functions_that_are_the_same_for_each_unit(function):
  inputs = keras.Input((4,))
  x = function(_layers.Dense(5, 'sigmoid', name='a')(inputs))
  model = keras.Model(inputs, _layers.Dense(2, name='logits')(x))
  assert _sizes(model) == {'a': 5}
  x = random_models.inputs(model, 3)
  np.testing.assert_allclose(
      permutation.shuffle_units(model, 1.0, 5)(x), model(x), 1e-5, 1e-5
  )


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
def test_functions_that_are_not_supported(function):
  inputs = keras.Input((4,))
  x = function(_layers.Dense(6)(inputs))
  model = keras.Model(inputs, _layers.Dense(2)(x))
  with pytest.raises(
      ValueError,
      match='the operation .*(not known|called with a constant).*Supported are',
  ):
    tied_units.unit_groups(model)


def _resnet50():
  return keras.applications.ResNet50(
      weights=None,
      input_shape=(32, 32, 3),
      classes=10,
      classifier_activation=None,
  )


def test_groups_of_a_residual_network_of_keras():
  sizes = _sizes(_resnet50())
  # 16 blocks have two inner convolutions each. Their outputs are one group in
  # each of four stages, and the first convolution has its own.
  assert len(sizes) == 16 * 2 + 4 + 1
  assert sizes['conv1_conv'] == 64
  assert sizes['conv5_block3_2_conv'] == 512
  assert sizes['conv5_block1_0_conv'] == 2048


@pytest.mark.slow
def test_outputs_of_a_residual_network_of_keras_stay():
  model = _resnet50()
  random_models.randomize(model)
  _assert_same_outputs(model, permutation.shuffle_units(model, 1.0, 5))


def test_a_network_of_keras_with_depthwise_convolutions():
  model = keras.applications.MobileNetV2(
      weights=None, input_shape=(32, 32, 3), classes=10
  )
  with pytest.raises(
      ValueError, match=r"'expanded_conv_depthwise' \(DepthwiseConv2D\)"
  ):
    tied_units.unit_groups(model)


def test_adapters_of_low_rank_are_not_supported():
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
  model = tff_bn.convert_batch_norm(random_models.build('small_cnn'))
  shuffled = permutation.shuffle_units(model, 1.0, 5)
  _assert_all_moved(model, shuffled)
  _assert_same_outputs(model, shuffled)


def test_units_that_inputs_are_added_to_stay():
  inputs = keras.Input((4,))
  x = _layers.Dense(5, 'relu', name='a')(inputs)
  x = _layers.Add()([_layers.Dense(4, name='b')(x), inputs])
  assert _sizes(keras.Model(inputs, _layers.Dense(2)(x))) == {'a': 5}


def test_every_output_of_a_model_stays():
  inputs = keras.Input((4,))
  x = _layers.Dense(5, 'relu', name='a')(inputs)
  y = _layers.Dense(6, 'relu', name='b')(x)
  model = keras.Model(inputs, [_layers.Dense(2)(y), x])
  assert _sizes(model) == {'b': 6}


def _perceptron(seed=0):
  model = keras.Sequential(
      [
          keras.Input((3,)),
          _layers.Dense(4, 'relu', name='a'),
          _layers.Dense(3, 'relu', name='b'),
          _layers.Dense(2, name='c'),
      ]
  )
  rng = np.random.default_rng(seed)
  model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  return model


def _perceptron_outputs(weights, x, encode=lambda h: h):
  """In NumPy; `encode` is what becomes of a hidden layer before the ReLU."""
  w1, b1, w2, b2, w3, b3 = (w.astype(np.float64) for w in weights)
  h = np.maximum(encode(x @ w1 + b1), 0)
  h = np.maximum(encode(h @ w2 + b2), 0)
  return h @ w3 + b3


def test_a_known_permutation():
  model = _perceptron()
  before = [w.copy() for w in model.get_weights()]
  w1, b1, w2, b2, w3, b3 = before
  permuted = permutation.permute_units(
      model, {'a': [2, 0, 3, 1], 'b': np.array([1, 2, 0])}
  )
  # Equation 1: unit 0 of `a` becomes what unit 2 was, and so on. Rows of the
  # paper's matrices are columns of Keras's.
  first = np.eye(4)[[2, 0, 3, 1]]
  second = np.eye(3)[[1, 2, 0]]
  expected = [
      (first @ w1.T).T,
      first @ b1,
      (second @ w2.T @ first.T).T,
      second @ b2,
      (w3.T @ second.T).T,
      b3,
  ]
  for found, known in zip(permuted.get_weights(), expected, strict=True):
    np.testing.assert_array_equal(found, known.astype(np.float32))
  assert permuted.get_weights()[1][0] == b1[2]
  # The model itself stays, and one can be left out.
  only_b = permutation.permute_units(model, {'b': [1, 2, 0]}).get_weights()
  np.testing.assert_array_equal(only_b[0], w1)
  np.testing.assert_array_equal(only_b[2], w2[:, [1, 2, 0]])
  for found, known in zip(model.get_weights(), before, strict=True):
    np.testing.assert_array_equal(found, known)


def test_copies_keep_names_and_flags():
  model = random_models.build('small_cnn')
  model.get_layer('conv_2').trainable = False
  model.get_layer('norm_1').trainable = False
  copy = permutation.shuffle_units(model, 0.5, 0)
  assert copy.name == model.name
  assert [w.path for w in copy.trainable_weights] == [
      w.path for w in model.trainable_weights
  ]
  weights = model.get_weights()
  copy.set_weights([w + 1 for w in weights])
  for a, b in zip(model.get_weights(), weights, strict=True):
    np.testing.assert_array_equal(a, b)


def test_mixed_precision():
  model = models.build_model_fn(
      'small_cnn', (8, 8, 1), 10, precision='mixed_bfloat16'
  )()
  assert _sizes(model) == _sizes(random_models.build('small_cnn'))


def test_shuffles_depend_on_the_seed():
  model = _perceptron()
  shuffled = [
      permutation.shuffle_units(model, 0.5, seed).get_weights()
      for seed in (3, 3, *range(8))
  ]
  for a, b in zip(*shuffled[:2], strict=True):
    np.testing.assert_array_equal(a, b)
  assert len({weights[0].tobytes() for weights in shuffled}) > 3


def test_each_group_has_its_own_permutation():
  model = random_models.build('mlp4', 'none')
  shuffled = permutation.shuffle_units(model, 0.5, 0)
  found = []
  for name in ('hidden_1', 'hidden_2', 'hidden_3'):
    old, new = (m.get_layer(name).bias.numpy() for m in (model, shuffled))
    order = np.argsort(old)
    found.append(order[np.searchsorted(old, new, sorter=order)])
  for a, b in itertools.combinations(found, 2):
    # By chance alone some are kept in both.
    assert np.mean(a == b) < 0.5
  # A quarter and more of the units are kept, as with matrices.
  for p in found:
    assert permutation.kept_share(p) == pytest.approx(
        _expected_kept(1024, 0.5), abs=0.08
    )


# ---- Position encodings, and the shuffle error ----


def _encode(mode, amplitude):
  def encode(h):
    j = np.arange(h.shape[-1])
    sine = amplitude * np.sin(2 * np.pi * j / h.shape[-1])
    return h + sine if mode == 'add' else h * (1 + sine)

  return encode


@pytest.mark.parametrize('mode', ['add', 'multiply'])
def test_position_encodings_stay_where_they_are(mode):
  model = _perceptron()
  on = tff_bn.add_position_encodings(model, mode, 0.7)
  x = np.random.default_rng(1).normal(size=(6, 3))
  encode = _encode(mode, 0.7)
  p = [2, 0, 3, 1]
  permuted = permutation.permute_units(on, {'a': p})
  w1, b1, w2, b2, w3, b3 = on.get_weights()
  expected = _perceptron_outputs(
      [w1[:, p], b1[p], w2[p], b2, w3, b3], x, encode
  )
  np.testing.assert_allclose(
      permuted(x.astype(np.float32)), expected, rtol=1e-5, atol=1e-5
  )
  # Equation 8.
  shuffled = permutation.shuffle_units(on, 1.0, 4)
  before = _perceptron_outputs(on.get_weights(), x, encode)
  after = _perceptron_outputs(shuffled.get_weights(), x, encode)
  error = np.mean([np.sqrt(np.sum(d**2)) / 2 for d in after - before])
  assert error > 0.01
  found = permutation.shuffle_error(on, x.astype(np.float32), 1.0, 4)
  assert isinstance(found, float)
  assert found == pytest.approx(error, rel=1e-4)


def test_shuffle_error_is_0_without_shuffles_and_rounding_without_positions():
  model = random_models.build('vgg9')
  x = random_models.inputs(model, 3)
  on = tff_bn.add_position_encodings(model, 'multiply')
  assert permutation.shuffle_error(on, x, 0.0, 1) == 0
  scale = np.linalg.norm(model(x), axis=1).mean() / 10
  assert permutation.shuffle_error(model, x, 1.0, 1) < 1e-5 * scale
  assert permutation.shuffle_error(on, x, 1.0, 1) > 1e-2 * scale


def test_shuffle_error_is_in_inference_mode():
  model = random_models.build('fbn_cnn')
  x = random_models.inputs(model, 3)
  weights = model.get_weights()
  # Dropout is random in training, and normalization another.
  off = permutation.shuffle_error(model, x, 1.0, 1)
  assert off < 1e-5 * np.abs(model(x)).max()
  for a, b in zip(model.get_weights(), weights, strict=True):
    np.testing.assert_array_equal(a, b)


def test_shuffle_error_of_outputs_of_any_shape():
  inputs = keras.Input((4, 4, 2))
  x = _conv(5, 'a', activation='relu')(inputs)
  model = keras.Model(inputs, _conv(3, 'b')(PositionEncoding('add')(x)))
  x = random_models.inputs(model, 3)
  shuffled = permutation.shuffle_units(model, 1.0, 2)
  difference = np.asarray(shuffled(x) - model(x), np.float64)
  expected = np.mean([np.sqrt(np.sum(d**2)) for d in difference]) / 48
  assert expected > 0
  assert permutation.shuffle_error(model, x, 1.0, 2) == pytest.approx(expected)


@pytest.mark.parametrize(
    ('name', 'shuffle_probability', 'faster'),
    # The more layers, the faster.
    [('mlp4', 0.1, 1.1), ('mlp4', 1, 1.1), ('vgg9', 0.1, 2)],
)
def test_shuffle_error_grows_with_the_amplitude(
    name, shuffle_probability, faster
):
  """Figures 3 and 14: linearly if encodings are added, else faster."""
  keras.utils.set_random_seed(3)
  model = models.build_model_fn(name, (4, 4, 3), 10, 'none')()
  x = random_models.inputs(model, 8)
  growth = {}
  for mode in ('add', 'multiply'):
    errors = [
        permutation.shuffle_error(
            tff_bn.add_position_encodings(model, mode, amplitude),
            x,
            shuffle_probability,
            0,
        )
        for amplitude in (0, 0.1, 0.4, 0.9)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 1e-5 < 1e-3 < errors[1]
    growth[mode] = errors[-1] / errors[1]
  # The amplitude grows by a factor of 9.
  assert 4 < growth['add'] < 10 < growth['multiply']
  assert growth['multiply'] > faster * growth['add']


def test_shuffle_error_grows_with_the_probability():
  model = tff_bn.add_position_encodings(random_models.build('mlp4'), 'add', 0.5)
  x = random_models.inputs(model, 3)
  errors = [
      permutation.shuffle_error(model, x, probability, 0)
      for probability in (0, 0.01, 0.1, 0.5)
  ]
  assert errors == sorted(errors)
  assert len(set(errors)) == 4


# ---- What is refused ----


class _Standardized(_layers.Conv2D):

  def call(self, inputs):
    return super().call(inputs)


@pytest.mark.parametrize(
    ('layer', 'message'),
    [
        (_layers.Reshape((2, 48), name='other'), 'what it does to units'),
        (_layers.Lambda(abs, name='other'), 'what it does to units'),
        (_layers.Permute((2, 1, 3), name='other'), 'what it does to units'),
        (_Standardized(6, 1, name='other'), 'what it does to units'),
        (random_models.Subclassed(), 'what it does to units'),
        (_layers.Conv2D(6, 1, groups=2, name='other'), 'it has groups=2'),
        (_layers.Activation(tf.sin, name='other'), 'is none of Keras'),
        (
            _layers.Conv2D(6, 1, activation=abs, name='other'),
            'is none of Keras',
        ),
        (
            _layers.LayerNormalization([-1, 1], name='other'),
            r'axis=\[3, 1\] are not in ascending order',
        ),
        (
            _layers.GlobalMaxPooling2D(
                data_format='channels_first', name='other'
            ),
            'it takes axis 1 for the units of its input, but they are on ax',
        ),
        (
            _layers.MaxPooling2D(1, data_format='channels_first', name='other'),
            'axis 1',
        ),
    ],
)
def test_layers_that_are_not_supported(layer, message):
  inputs = keras.Input((4, 4, 2))
  x = layer(_conv(6, 'a')(inputs))
  model = keras.Model(inputs, _layers.Dense(3)(_layers.Flatten()(x)))
  name = layer.name
  with pytest.raises(
      ValueError, match=f"the layer '{name}' .*{message}.*Supported are Dense"
  ):
    tied_units.unit_groups(model)


def test_recurrent_layers_and_operations_are_not_supported():
  inputs = keras.Input((5, 4))
  model = keras.Model(inputs, _layers.Dense(2)(_layers.LSTM(3)(inputs)))
  with pytest.raises(ValueError, match=r"the layer 'lstm.*' \(LSTM\)"):
    tied_units.unit_groups(model)
  x = _layers.Dense(3)(inputs)
  model = keras.Model(inputs, _layers.Dense(2)(x[:, ::-1]))
  with pytest.raises(
      ValueError, match=r"the operation 'get_item.*' \(GetItem\) .*not known"
  ):
    tied_units.unit_groups(model)
  x = _layers.Add()([x, tf.ones([1, 5, 3])])
  model = keras.Model(inputs, _layers.Dense(2)(x))
  with pytest.raises(ValueError, match='is called with a constant'):
    tied_units.unit_groups(model)


def test_merged_units_need_the_same_axis_and_number():
  inputs = keras.Input((3,))
  x = _layers.Dense(4, name='a')(inputs)
  y = _layers.Dense(1, name='b')(inputs)
  model = keras.Model(inputs, _layers.Dense(2)(_layers.Add()([x, y])))
  with pytest.raises(ValueError, match='inputs have different shapes'):
    tied_units.unit_groups(model)


def test_flattened_units_need_a_known_number():
  inputs = keras.Input((None, 4, 2))
  outputs = _layers.Flatten(name='flat')(_conv(3, 'a')(inputs))
  with pytest.raises(ValueError, match="layer 'flat' .* an unknown size"):
    tied_units.unit_groups(keras.Model(inputs, outputs))


def test_models_that_are_not_supported():
  with pytest.raises(TypeError, match='must be a keras.Model, but is a D'):
    tied_units.unit_groups(_layers.Dense(3))
  with pytest.raises(ValueError, match="'mine' .* is no functional model"):
    tied_units.unit_groups(random_models.Subclassed())
  with pytest.raises(ValueError, match='is no functional model'):
    tied_units.unit_groups(keras.Sequential([_layers.Dense(2)]))
  only_outputs = keras.Sequential([keras.Input((3,)), _layers.Dense(2)])
  assert tied_units.unit_groups(only_outputs) == []
  with pytest.raises(ValueError, match='no hidden units that could be'):
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


@pytest.mark.parametrize(
    'wrong', [[0, 1], [0, 1, 1], [1, 2, 3], [0.0, 1.0, 2.0], [[0, 1, 2]]]
)
def test_what_is_no_permutation(wrong):
  with pytest.raises(ValueError, match="of 'b' must have each of .* 0 to 2"):
    permutation.permute_units(_perceptron(), {'b': wrong})


def test_groups_that_do_not_exist():
  with pytest.raises(ValueError, match="no group of units 'c'.* 'a', 'b'"):
    permutation.permute_units(_perceptron(), {'c': [0, 1]})


def test_arguments_that_are_not_allowed():
  rng = np.random.default_rng(0)
  for probability in (-0.1, 1.1, np.nan):
    message = f'shuffle_probability={probability} must be'
    with pytest.raises(ValueError, match=message):
      permutation.random_permutation(3, probability, rng)
    with pytest.raises(ValueError, match=message):
      permutation.mean_kept_share(3, probability)
    with pytest.raises(ValueError, match=message):
      permutation.shuffle_units(_perceptron(), probability, 0)
  with pytest.raises(ValueError, match='num_units=0 must be'):
    permutation.random_permutation(0, 0.1, rng)
  for wrong in ([], [0, 0], [1, 2]):
    with pytest.raises(ValueError, match='permutation must have each'):
      permutation.kept_share(wrong)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(repeats=0), 'repeats=0 must be'),
        (dict(num_shuffles=1), 'num_shuffles=1 and num_steps=None: give both'),
        (dict(num_steps=1), 'num_shuffles=None and num_steps=1: give both'),
        (dict(num_shuffles=0, num_steps=0), 'num_steps=0 must be'),
        (dict(num_shuffles=3, num_steps=2), 'num_shuffles=3 must be between'),
        (dict(num_shuffles=-1, num_steps=2), 'num_shuffles=-1 must be between'),
    ],
)
def test_wrong_numbers_of_shuffles(kwargs, message):
  with pytest.raises(ValueError, match=message):
    permutation.mean_kept_share(4, 0.1, **kwargs)
