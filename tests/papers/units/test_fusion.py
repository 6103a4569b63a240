"""Tests of aligning two models and interpolating between them."""

import itertools

import keras
import numpy as np
import pytest
import random_models
import tensorflow as tf
import unit_models

from tff_bn import add_position_encodings
from tff_bn.papers.units import fusion
from tff_bn.papers.units import layer_outputs
from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units

_LAYERS = keras.layers
_RNG = np.random.default_rng(0)
# More examples than one batch.
_X = _RNG.normal(size=(150, 6)).astype(np.float32)
_IMAGES = _RNG.normal(size=(20, 8, 8, 1)).astype(np.float32)


def _perceptron(seed=0, units=7, normalized=True, activation='relu'):
  inputs = keras.Input((6,))
  x = _LAYERS.Dense(units, name='first')(inputs)
  if normalized:
    x = _LAYERS.BatchNormalization(name='norm')(x)
  x = _LAYERS.Activation(activation, name='activation')(x)
  x = _LAYERS.Dense(5, activation='relu', name='second')(x)
  model = keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x))
  return random_models.with_normal_weights(model, seed)


def _flattened(seed=0, data_format='channels_last'):
  """Each channel has several normalized inputs of the dense layer."""
  inputs = keras.Input((8, 8, 1))
  x = _LAYERS.Conv2D(5, 3, strides=3, activation='relu', name='conv')(inputs)
  x = _LAYERS.Flatten(data_format)(x)
  x = _LAYERS.BatchNormalization(name='norm')(x)
  return random_models.with_normal_weights(
      keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x)), seed
  )


def _random_permutations(model, seed=1):
  rng = np.random.default_rng(seed)
  permutations = {
      group.name: rng.permutation(group.size)
      for group in tied_units.unit_groups(model)
  }
  assert permutations
  return permutations


def _assert_same_weights(found, expected):
  for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)


def _built(builder):
  """Builds one of `unit_models`."""
  keras.utils.set_random_seed(3)
  inputs, x, _ = builder()
  model = keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x))
  random_models.randomize(model)
  return model


@pytest.mark.parametrize(
    'build',
    [
        _flattened,
        lambda: _built(unit_models.projections),
        lambda: _built(unit_models.operations),
        lambda: random_models.build('small_cnn'),
        lambda: random_models.build('small_cnn', 'none'),
        pytest.param(
            lambda: random_models.build('resnet20'), marks=pytest.mark.slow
        ),
    ],
    ids=['flattened', 'residual', 'operations', 'batch', 'none', 'resnet20'],
)
def test_a_permuted_copy_is_recovered(build):
  model = build()
  images = random_models.inputs(model, 20)
  permuted = permutation.permute_units(model, _random_permutations(model))
  *changed, last_bias_changed = (
      np.any(a != b)
      for a, b in zip(model.get_weights(), permuted.get_weights())
  )
  assert all(changed) and not last_bias_changed
  aligned = fusion.align(model, permuted, images)
  _assert_same_weights(aligned, model)
  expected = model(images, training=False)
  np.testing.assert_array_equal(aligned(images, training=False), expected)
  for coefficient in (0, 0.3, 0.5, 1):
    between = fusion.interpolate(model, aligned, coefficient)
    np.testing.assert_array_equal(between(images, training=False), expected)
  # The arguments don't change.
  _assert_same_weights(
      permuted, permutation.permute_units(model, _random_permutations(model))
  )


def _by_hand(model, x):
  """Computes the activations of both hidden layers in NumPy."""
  w1, b1, gamma, beta, mean, variance, w2, b2 = (
      w.numpy().astype(np.float64)
      for name in ('first', 'norm', 'second')
      for w in model.get_layer(name).weights
  )
  first = (x @ w1 + b1 - mean) / np.sqrt(variance + 1e-3) * gamma + beta
  return first, np.maximum(np.maximum(first, 0) @ w2 + b2, 0)


@pytest.mark.parametrize('normalized', [False, True])
def test_channels_on_the_first_axis(normalized, monkeypatch):
  call = layer_outputs.call
  # Without oneDNN, TensorFlow supports this on CPUs only in graphs.
  monkeypatch.setattr(
      layer_outputs,
      'call',
      lambda model, names, x: tf.function(lambda x: call(model, names, x))(x),
  )
  inputs = keras.Input((1, 8, 8))
  x = _LAYERS.Conv2D(5, 3, data_format='channels_first')(inputs)
  if normalized:
    x = _LAYERS.BatchNormalization(axis=1)(x)
  x = _LAYERS.GlobalMaxPooling2D(data_format='channels_first')(x)
  model = random_models.with_normal_weights(
      keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x))
  )
  permuted = permutation.permute_units(model, _random_permutations(model))
  images = np.moveaxis(_IMAGES, -1, 1)
  _assert_same_weights(fusion.align(model, permuted, images), model)


def _best(costs):
  """Finds the cheapest permutation by trying all."""
  units = np.arange(len(costs))
  return min(
      itertools.permutations(units),
      key=lambda permutation: costs[units, list(permutation)].sum(),
  )


def _distances(a, b):
  """Returns the distances between all columns of two matrices."""
  return np.linalg.norm(a[:, :, np.newaxis] - b[:, np.newaxis], axis=0)


def test_the_best_permutations_of_another_model():
  a, b = _perceptron(seed=1), _perceptron(seed=2)
  # The first batch is not typical.
  x = np.concatenate([np.repeat(_X[:1], 128, axis=0), 3 * _X])
  hidden_a, hidden_b = (_by_hand(model, x) for model in (a, b))
  permutations = {
      name: _best(_distances(*of_layer))
      for name, *of_layer in zip(('first', 'second'), hidden_a, hidden_b)
  }
  expected = permutation.permute_units(b, permutations)
  aligned = fusion.align(a, b, x)
  _assert_same_weights(aligned, expected)
  # Aligning again changes nothing.
  _assert_same_weights(fusion.align(a, aligned, x), expected)
  np.testing.assert_allclose(
      aligned(_X, training=False), b(_X, training=False), rtol=1e-4, atol=1e-4
  )
  # Without permutations, or with fewer examples, the result differs.
  for other in (b, fusion.align(a, b, x[:128]), fusion.align(a, b, x[256:])):
    assert any(
        np.any(old != new)
        for old, new in zip(other.get_weights(), expected.get_weights())
    )


def _residual(seed):
  """Adds the units of two layers of different scales."""
  inputs = keras.Input((6,))
  first = _LAYERS.Dense(6, name='first')(inputs)
  second = _LAYERS.Dense(6, name='second')(_LAYERS.Activation('tanh')(first))
  x = _LAYERS.Activation('tanh')(_LAYERS.Add()([first, second]))
  return random_models.with_normal_weights(
      keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x)), seed
  )


def test_units_that_are_added_are_permuted_together():
  a, b = _residual(1), _residual(2)
  squares = 0
  for name in ('first', 'second'):
    activations = []
    for model in (a, b):
      w1, b1 = model.get_layer('first').get_weights()
      w2, b2 = model.get_layer('second').get_weights()
      first = _X @ w1 + b1
      activations.append(first if name == 'first' else np.tanh(first) @ w2 + b2)
    squares += _distances(*activations) ** 2
  best = _best(np.sqrt(squares))
  assert best not in (_best(_distances(*activations)), _best(squares))
  expected = permutation.permute_units(b, {'first': best})
  _assert_same_weights(fusion.align(a, b, _X), expected)


def test_flattened_channels_count_at_all_pixels():
  a, b = _flattened(1), _flattened(2)
  channels = []
  for model in (a, b):
    output = keras.Model(model.input, model.get_layer('norm').output)
    channels.append(output(_IMAGES).numpy().reshape(20, 4, 5))
  best = _best(_distances(*(x.reshape(80, 5) for x in channels)))
  assert best != _best(_distances(*(x[:, 0] for x in channels)))
  expected = permutation.permute_units(b, {'conv': best})
  _assert_same_weights(fusion.align(a, b, _IMAGES), expected)


def test_position_encodings_stay_where_they_are():
  model = add_position_encodings(_perceptron(), 'multiply')
  permuted = permutation.permute_units(model, _random_permutations(model))
  aligned = fusion.align(model, permuted, _X)
  _assert_same_weights(aligned, model)
  np.testing.assert_array_equal(aligned(_X), model(_X))


def test_names_of_layers_may_differ():
  models_ = []
  for number in range(2):
    inputs = keras.Input((6,))
    x = _LAYERS.Dense(5, name=f'hidden_of_{number}')(inputs)
    models_.append(keras.Model(inputs, _LAYERS.Dense(3)(x)))
  first, second = models_
  second.set_weights(first.get_weights())
  group = tied_units.unit_groups(second)[0].name
  permuted = permutation.permute_units(second, {group: [1, 2, 4, 0, 3]})
  _assert_same_weights(fusion.align(first, permuted, _X), first)


def test_units_that_compute_the_same_stay_where_they_are():
  inputs = keras.Input((6,))
  x = _LAYERS.Dense(4, activation='relu', name='hidden')(inputs)
  first = keras.Model(inputs, _LAYERS.Dense(3)(x))
  second = keras.models.clone_model(first)
  for model, active in ((first, 3), (second, 0)):
    kernel, bias, *rest = random_models.with_normal_weights(model).get_weights()
    bias[:] = -100
    bias[active] = 100
    model.set_weights([kernel, bias, *rest])
  aligned = fusion.align(first, second, _X)
  expected = permutation.permute_units(second, {'hidden': [3, 1, 2, 0]})
  _assert_same_weights(aligned, expected)


@pytest.mark.parametrize(
    ('other', 'message'),
    [
        (dict(units=8), r"'first/kernel.*\[6, 7\].*\[6, 8\].*architecture"),
        (dict(normalized=False), 'has 10 weights, .* has 6; .*architecture'),
    ],
)
def test_other_architectures_are_an_error(other, message):
  a, b = _perceptron(), _perceptron(**other)
  with pytest.raises(ValueError, match=message):
    fusion.align(a, b, _X)
  with pytest.raises(ValueError, match=message):
    fusion.interpolate(a, b, 0.5)


def test_another_order_of_the_inputs_after_flatten_is_an_error():
  with pytest.raises(ValueError, match='different groups of hidden units'):
    fusion.align(_flattened(), _flattened(0, 'channels_first'), _IMAGES)


def test_a_model_without_hidden_units_is_an_error():
  inputs = keras.Input((6,))
  model = keras.Model(inputs, _LAYERS.Dense(3)(inputs), name='linear')
  with pytest.raises(ValueError, match="'linear' has no hidden units"):
    fusion.align(model, model, _X)


def test_a_model_that_is_not_supported_is_an_error():
  subclassed = type('Own', (keras.Model,), {})(name='own')
  for arguments in ((subclassed, _perceptron()), (_perceptron(), subclassed)):
    with pytest.raises(ValueError, match="'own'"):
      fusion.align(*arguments, _X)


def test_layers_of_the_same_name_are_an_error():
  inputs = keras.Input((6,))
  x = inputs
  for name in ('one', 'two'):
    inner_inputs = keras.Input((6,))
    outputs = _LAYERS.Dense(6, name='same')(inner_inputs)
    x = keras.Model(inner_inputs, outputs, name=name)(x)
  model = keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x))
  with pytest.raises(ValueError, match="^layer_name='same' .* 2 layers"):
    fusion.align(model, model, _X)


def test_activations_that_are_not_finite_are_an_error():
  model = _perceptron()
  kernel, bias = model.get_layer('second').get_weights()
  bias[0] = np.nan
  model.get_layer('second').set_weights([kernel, bias])
  with pytest.raises(ValueError, match="units 'second' are not finite"):
    fusion.align(_perceptron(), model, _X)


def test_all_weights_are_interpolated():
  a, b = _perceptron(seed=1), _perceptron(seed=2)
  before = a.get_weights(), b.get_weights()
  found = fusion.interpolate(a, b, 0.25)
  assert [w.name for w in found.weights] == [w.name for w in a.weights]
  for value, x, y in zip(found.get_weights(), *before, strict=True):
    assert np.any(x != y)
    np.testing.assert_allclose(value, 0.75 * x + 0.25 * y, rtol=1e-6, atol=1e-7)
  for model, weights in zip((a, b), before):
    for now, was in zip(model.get_weights(), weights):
      np.testing.assert_array_equal(now, was)
  # The new model has its own weights.
  found.set_weights([0 * w for w in found.get_weights()])
  assert np.any(a.get_weights()[0])


def test_interpolation_is_exact_at_the_ends_and_between_equal_weights():
  a, b = _perceptron(seed=1), _perceptron(seed=2)
  _assert_same_weights(fusion.interpolate(a, b, 0), a)
  _assert_same_weights(fusion.interpolate(a, b, 1), b)
  for coefficient in np.linspace(0, 1, 11):
    _assert_same_weights(fusion.interpolate(a, a, coefficient), a)


def test_interpolation_keeps_whole_numbers():
  class Counter(_LAYERS.Layer):

    def build(self, input_shape):
      self.count = self.add_weight(dtype='int64', trainable=False)

    def call(self, inputs):
      return inputs + 0 * keras.ops.cast(self.count, inputs.dtype)

  built = []
  for count in (3, 8):
    inputs = keras.Input((6,))
    x = Counter(name='counter')(inputs)
    model = keras.Model(inputs, _LAYERS.Dense(2, name='logits')(x))
    model.get_layer('counter').count.assign(count)
    built.append(model)
  found = fusion.interpolate(*built, 0.75)
  assert found.get_layer('counter').count.numpy() == 3
  kernels = [m.get_layer('logits').kernel.numpy() for m in (*built, found)]
  np.testing.assert_allclose(
      kernels[2], 0.25 * kernels[0] + 0.75 * kernels[1], rtol=1e-6, atol=1e-7
  )


def test_interpolation_keeps_the_phases_of_personal_encodings():
  a, b = (
      add_position_encodings(_perceptron(seed), personal_share=0.5)
      for seed in (1, 2)
  )
  for model, phase in ((a, 0.25), (b, 0.75)):
    for name in ('first_position', 'second_position'):
      model.get_layer(name).personal_phase.assign(phase)
  between = fusion.interpolate(a, b, 0.5)
  for name in ('first_position', 'second_position'):
    assert between.get_layer(name).personal_phase.numpy() == 0.25
  np.testing.assert_allclose(
      between.get_layer('first').kernel,
      (a.get_layer('first').kernel + b.get_layer('first').kernel) / 2,
      rtol=1e-6,
  )


def test_interpolation_of_bfloat16():
  inputs = keras.Input((6,))
  a = keras.Model(inputs, _LAYERS.Dense(3, dtype='bfloat16')(inputs))
  b = keras.models.clone_model(a)
  a.set_weights([np.ones((6, 3)), np.zeros(3)])
  b.set_weights([np.full((6, 3), 2), np.ones(3)])
  kernel, bias = fusion.interpolate(a, b, 0.5).get_weights()
  assert kernel.dtype == tf.bfloat16
  np.testing.assert_array_equal(kernel.astype(np.float32), 1.5)
  np.testing.assert_array_equal(bias.astype(np.float32), 0.5)


class _TwoNormalizations(_LAYERS.Layer):
  """A layer with two inner layers, one of which can be frozen."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.first = _LAYERS.BatchNormalization()
    self.second = _LAYERS.BatchNormalization()

  def call(self, inputs):
    return self.second(self.first(inputs))


def test_interpolation_keeps_frozen_layers():
  inner = keras.Sequential([keras.Input((6,)), _LAYERS.Dense(4)])
  inputs = keras.Input((6,))
  layer = _TwoNormalizations()
  model = keras.Model(inputs, layer(inner(inputs)))
  layer.first.trainable = inner.trainable = False
  random_models.with_normal_weights(model)
  for function in (
      lambda m: m(_X, training=False),
      lambda m: len(m.trainable_weights),
      lambda m: [layer.trainable for layer in m.layers],
  ):
    np.testing.assert_array_equal(
        function(fusion.interpolate(model, model, 0.5)), function(model)
    )


@pytest.mark.parametrize('coefficient', [-0.1, 1.1, np.nan])
def test_an_invalid_coefficient_is_an_error(coefficient):
  model = _perceptron()
  with pytest.raises(ValueError, match=f'^coefficient={coefficient} must'):
    fusion.interpolate(model, model, coefficient)
