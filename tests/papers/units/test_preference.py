"""Tests of the classes that units prefer."""

import keras
import numpy as np
import pytest
import random_models
import tensorflow as tf

from tff_bn.papers.units import preference

_LAYERS = keras.layers
_CLASSES = 3
# More examples than one batch.
_RNG = np.random.default_rng(0)
_X = _RNG.normal(size=(150, 4)).astype(np.float32)
_Y = _RNG.integers(0, _CLASSES, 150)
_IMAGES = _RNG.normal(size=(7, 5, 6, 2)).astype(np.float32)


def _perceptron(first_activation='relu'):
  inputs = keras.Input((4,))
  x = _LAYERS.Dense(6, activation=first_activation, name='first')(inputs)
  x = _LAYERS.BatchNormalization(epsilon=0.1, name='norm')(x)
  x = _LAYERS.Dense(5, activation='relu', name='second')(x)
  model = keras.Model(inputs, _LAYERS.Dense(_CLASSES, name='logits')(x))
  return random_models.with_normal_weights(model)


def _by_hand(model):
  """Computes the perceptron in NumPy.

  Returns:
    The activations of the first layer, `[examples, units]`; the derivatives of
    the logits with respect to them, `[examples, units, classes]`; the logits.
  """
  w1, b1, gamma, beta, w2, b2, w3, b3, mean, variance = (
      w.numpy().astype(np.float64)
      for w in (*model.trainable_weights, *model.non_trainable_weights)
  )
  activations = np.maximum(_X.astype(np.float64) @ w1 + b1, 0)
  scale = gamma / np.sqrt(variance + 0.1)
  second = ((activations - mean) * scale + beta) @ w2 + b2
  derivatives = np.einsum('i,ij,bj,jc->bic', scale, w2, second > 0, w3)
  return activations, derivatives, np.maximum(second, 0) @ w3 + b3


def _assert_close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_perceptron():
  model = _perceptron()
  activations, derivatives, _ = _by_hand(model)
  found = preference.preference_vectors(model, 'first', _X)
  assert found.shape == (6, 3) and found.dtype == np.float64
  _assert_close(found, np.einsum('bi,bic->ic', activations, derivatives))
  before = model.get_weights()
  found = preference.preference_vectors(model, 'first', _X, _Y)
  for c in range(_CLASSES):
    of_class = c == _Y
    expected = activations[of_class] * derivatives[of_class, :, c]
    _assert_close(found[:, c], expected.sum(axis=0))
  # The moving statistics stay.
  for old, new in zip(before, model.get_weights()):
    np.testing.assert_array_equal(old, new)


def test_a_class_without_examples():
  model = _perceptron()
  labels = np.minimum(_Y, 1)
  found = preference.preference_vectors(model, 'first', _X, labels)
  np.testing.assert_array_equal(found[:, 2], 0)
  assert np.all(np.any(found[:, :2], axis=0))


def test_negative_activations():
  model = _perceptron('linear')
  w1, b1 = model.get_layer('first').get_weights()
  gamma, beta, mean, variance = model.get_layer('norm').get_weights()
  w2, b2 = model.get_layer('second').get_weights()
  w3, _ = model.get_layer('logits').get_weights()
  normalized = (_X @ w1 + b1 - mean) / np.sqrt(variance + 0.1) * gamma + beta
  assert (normalized < 0).any() and (normalized > 0).any()
  active = normalized @ w2 + b2 > 0
  _assert_close(
      preference.preference_vectors(model, 'norm', _X),
      np.einsum('bi,ij,bj,jc->ic', normalized, w2, active, w3),
  )


def test_logits():
  model = _perceptron()
  _, _, logits = _by_hand(model)
  found = preference.preference_vectors(model, 'logits', _X)
  _assert_close(found, np.diag(logits.sum(axis=0)))
  found = preference.preference_vectors(model, 'logits', _X, _Y)
  own = [logits[c == _Y, c].sum() for c in range(_CLASSES)]
  _assert_close(found, np.diag(own))


def _convolutional():
  inputs = keras.Input((5, 6, 2))
  x = _LAYERS.Conv2D(4, 3, activation='relu', name='conv')(inputs)
  x = _LAYERS.Permute((3, 1, 2), name='channels_first')(x)
  x = _LAYERS.Flatten()(x)
  model = keras.Model(inputs, _LAYERS.Dense(_CLASSES, name='logits')(x))
  return random_models.with_normal_weights(model)


def _convolution_by_hand(model, labels=None):
  kernel, bias = model.get_layer('conv').get_weights()
  weights = model.get_layer('logits').get_weights()[0]
  weights = weights.reshape(4, 3, 4, _CLASSES)
  expected = np.zeros((4, _CLASSES))
  for example, row, column in np.ndindex(7, 3, 4):
    patch = _IMAGES[example, row : row + 3, column : column + 3]
    activations = np.tensordot(patch, kernel, 3) + bias
    contributions = (
        np.maximum(activations, 0)[:, np.newaxis] * weights[:, row, column]
    )
    if labels is None:
      expected += contributions
    else:
      label = labels[example]
      expected[:, label] += contributions[:, label]
  return expected


def test_convolution_is_summed_over_positions():
  model = _convolutional()
  found = preference.preference_vectors(model, 'conv', _IMAGES)
  _assert_close(found, _convolution_by_hand(model))
  found = preference.preference_vectors(model, 'conv', _IMAGES, _Y[:7])
  _assert_close(found, _convolution_by_hand(model, _Y[:7]))


def test_axis_of_the_channels():
  model = _convolutional()
  found = preference.preference_vectors(
      model, 'channels_first', _IMAGES, axis=1
  )
  _assert_close(found, _convolution_by_hand(model))
  with pytest.raises(ValueError, match="axis=0 .*'channels_first'"):
    preference.preference_vectors(model, 'channels_first', _IMAGES, axis=0)


def test_a_frozen_nested_model_and_a_tensor():
  inner = _perceptron()
  expected = preference.preference_vectors(inner, 'first', _X)
  inputs = keras.Input((4,))
  model = keras.Model(inputs, inner(inputs))
  model.trainable = False
  found = preference.preference_vectors(model, 'first', tf.constant(_X))
  np.testing.assert_array_equal(found, expected)


def test_a_layer_before_all_weights():
  inputs = keras.Input((4,))
  x = _LAYERS.ReLU(name='relu')(inputs)
  model = keras.Model(inputs, _LAYERS.Dense(_CLASSES, name='logits')(x))
  random_models.with_normal_weights(model)
  kernel = model.get_weights()[0]
  _assert_close(
      preference.preference_vectors(model, 'relu', _X),
      np.maximum(_X, 0).sum(axis=0)[:, np.newaxis] * kernel,
  )


def test_an_embedding_of_whole_numbers():
  inputs = keras.Input((2,), dtype=tf.int32)
  x = _LAYERS.Embedding(5, 4, trainable=False, name='embedding')(inputs)
  x = _LAYERS.Flatten()(x)
  logits = _LAYERS.Dense(_CLASSES, trainable=False, name='logits')
  model = random_models.with_normal_weights(keras.Model(inputs, logits(x)))
  x = np.array([[0, 4], [3, 3]], np.int32)
  table, kernel, _ = model.get_weights()
  # Activations and weights, [examples, positions, units, ...].
  expected = np.einsum('bpi,pic->ic', table[x], kernel.reshape(2, 4, -1))
  _assert_close(preference.preference_vectors(model, 'embedding', x), expected)


def test_mixed_precision():
  inputs = keras.Input((4,))
  hidden = _LAYERS.Dense(5, dtype='mixed_bfloat16', name='hidden')
  logits = _LAYERS.Dense(_CLASSES, dtype='float32', name='logits')
  model = random_models.with_normal_weights(
      keras.Model(inputs, logits(hidden(inputs)))
  )
  found = preference.preference_vectors(model, 'hidden', _X)
  w1, b1, w2, _ = model.get_weights()
  expected = (_X @ w1 + b1).sum(axis=0)[:, np.newaxis] * w2
  np.testing.assert_allclose(found, expected, rtol=0.02, atol=1)


def test_several_layers_equal_single_layers():
  model = _perceptron()
  names = ['second', 'norm', 'logits', 'first']
  found = preference.preference_vectors_by_layer(model, names, _X, _Y)
  assert list(found) == names
  for name in names:
    alone = preference.preference_vectors(model, name, _X, _Y)
    np.testing.assert_allclose(found[name], alone, rtol=1e-4, atol=1e-5)
    assert np.ptp(alone) > 0.01


def test_a_layer_beside_the_logits_is_an_error():
  inputs = keras.Input((4,))
  x = _LAYERS.Dense(5, name='hidden')(inputs)
  rounded = keras.ops.cast(keras.ops.cast(x, 'int32'), 'float32')
  model = keras.Model(inputs, _LAYERS.Dense(3)(rounded), name='rounding')
  with pytest.raises(ValueError, match="'rounding' do not .*'hidden'"):
    preference.preference_vectors(model, 'hidden', _X)


def test_an_output_that_is_no_matrix_is_an_error():
  inputs = keras.Input((5, 6, 2))
  x = _LAYERS.Conv2D(4, 3, name='conv')(inputs)
  model = keras.Model(inputs, x, name='images')
  with pytest.raises(ValueError, match="'images' must be one tensor of logits"):
    preference.preference_vectors(model, 'conv', _IMAGES)
  model = keras.Model(inputs, [x, x], name='two')
  with pytest.raises(ValueError, match="'two' must be one tensor of logits"):
    preference.preference_vectors(model, 'conv', _IMAGES)


@pytest.mark.parametrize(
    'labels',
    [_Y[:-1], _Y[:, np.newaxis], _Y.astype(np.float32)],
    ids=['short', 'matrix', 'float'],
)
def test_labels_that_do_not_fit_are_an_error(labels):
  with pytest.raises(
      ValueError, match='y must have 150 whole numbers'
  ) as error:
    preference.preference_vectors(_perceptron(), 'first', _X, labels)
  assert f'dtype {labels.dtype} and the shape {labels.shape}' in str(
      error.value
  )


@pytest.mark.parametrize('label', [-1, 3])
def test_labels_without_a_logit_are_an_error(label):
  labels = _Y.copy()
  labels[5] = label
  with pytest.raises(
      ValueError, match=f'from {labels.min()} to {labels.max()}.* 3 classes'
  ):
    preference.preference_vectors(_perceptron(), 'first', _X, labels)


def test_preferred_classes():
  vectors = [[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0], [0.0, 0.0, 0.0], [2, 5, 5]]
  assert list(preference.preferred_classes(vectors)) == [1, 0, 0, 1]


@pytest.mark.parametrize('shape', [(3,), (0, 3), (3, 0), (1, 2, 3)])
def test_vectors_of_another_shape_are_an_error(shape):
  with pytest.raises(ValueError, match='vectors must be a matrix'):
    preference.preferred_classes(np.zeros(shape))


def test_vectors_that_are_not_numbers_are_an_error():
  with pytest.raises(ValueError, match='vectors must not have a NaN'):
    preference.preferred_classes([[0.0, np.nan], [1.0, 2.0]])


def test_agreeing_share():
  assert preference.agreeing_share([0, 1, 2, 2], np.array([0, 1, 1, 2])) == 0.75
  assert preference.agreeing_share([1, 0], [0, 1]) == 0
  assert preference.agreeing_share([4], [4]) == 1


@pytest.mark.parametrize(
    ('a', 'b'), [([0, 1], [0]), ([], []), ([[0]], [[0]]), ([0], [[0]])]
)
def test_different_numbers_of_units_are_an_error(a, b):
  with pytest.raises(ValueError, match='classes_a and classes_b') as error:
    preference.agreeing_share(a, b)
  assert f'{np.shape(a)} and {np.shape(b)}' in str(error.value)
