"""Tests of matching the units of two models."""

import itertools

import keras
import numpy as np
import pytest
import random_models

from tff_bn.papers.units import matching
from tff_bn.position_aware import permutation

_LAYERS = keras.layers
_X = np.random.default_rng(0).normal(size=(150, 4)).astype(np.float32)
_IMAGES = np.random.default_rng(1).normal(size=(5, 6, 6, 2)).astype(np.float32)


def _perceptron(seed=0, units=6):
  inputs = keras.Input((4,))
  x = _LAYERS.Dense(units, name='hidden')(inputs)
  x = _LAYERS.BatchNormalization(epsilon=0.1, name='norm')(x)
  x = _LAYERS.ReLU(name='relu')(x)
  model = keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x))
  return random_models.with_normal_weights(model, seed)


def _convolutional(seed=0):
  inputs = keras.Input((6, 6, 2))
  x = _LAYERS.Conv2D(5, 3, name='conv')(inputs)
  x = _LAYERS.Flatten()(x)
  model = keras.Model(inputs, _LAYERS.Dense(3, name='logits')(x))
  return random_models.with_normal_weights(model, seed)


def _normalized(model, x):
  """Computes the output of the perceptron's normalization in NumPy."""
  kernel, bias, gamma, beta, mean, variance = (
      w.numpy().astype(np.float64) for w in model.weights[:6]
  )
  return (x @ kernel + bias - mean) / np.sqrt(variance + 0.1) * gamma + beta


def test_activations_in_inference_mode():
  """The examples are more than one batch and keep their order."""
  model = _perceptron()
  found = matching.layer_activations(model, 'norm', _X)
  assert found.shape == (6, 150)
  expected = _normalized(model, _X.astype(np.float64)).T
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(
      matching.layer_activations(model, 'relu', _X), np.maximum(found, 0)
  )


def test_activations_of_a_convolution_are_at_all_positions():
  model = _convolutional()
  kernel, bias = model.get_layer('conv').get_weights()
  expected = np.empty((5, 5, 4, 4))
  for unit, example, row, column in np.ndindex(*expected.shape):
    patch = _IMAGES[example, row : row + 3, column : column + 3]
    expected[unit, example, row, column] = (
        np.sum(patch * kernel[..., unit]) + bias[unit]
    )
  found = matching.layer_activations(model, 'conv', _IMAGES)
  np.testing.assert_allclose(found, expected.reshape(5, 80), 1e-4, 1e-4)


def test_axis_of_the_channels():
  inputs = keras.Input((6, 6, 2))
  x = _LAYERS.Permute((3, 1, 2), name='channels_first')(inputs)
  model = keras.Model(inputs, x)
  found = matching.layer_activations(model, 'channels_first', _IMAGES, axis=1)
  np.testing.assert_array_equal(
      found, np.moveaxis(_IMAGES, -1, 0).reshape(2, 180)
  )
  match = matching.match_layers(model, model, 'channels_first', _IMAGES, axis=1)
  assert len(match.assignment) == 2


def _best(a, b):
  """Finds the best permutation by trying all."""

  def cost(permutation):
    return np.linalg.norm(a - b[list(permutation)], axis=1).sum()

  return list(min(itertools.permutations(range(len(a))), key=cost))


def test_assignment_is_the_best_of_all():
  for seed in range(10):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 6, 3))
    assert list(matching.optimal_assignment(a, b)) == _best(a, b)


def test_assignment_minimizes_distances_not_their_squares():
  a, b = [[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [2.0, 0.5]]
  # √4.25 + 0 is less than 1 + √1.25, but 4.25 more than 1 + 1.25.
  assert list(matching.optimal_assignment(a, b)) == [1, 0]


def test_assignment_recovers_a_permutation():
  rng = np.random.default_rng(0)
  a, indices = rng.normal(size=(50, 20)), rng.permutation(50)
  b = np.empty_like(a)
  b[indices] = a + 0.01 * rng.normal(size=a.shape)
  # Unit i of a is unit indices[i] of b.
  found = matching.optimal_assignment(a, b)
  np.testing.assert_array_equal(found, indices)


def test_equal_units_stay_where_they_are():
  """The first two units of a and the last two of b are never active."""
  a, b = np.zeros((2, 3, 4))
  a[2] = b[0] = 5
  assert list(matching.optimal_assignment(a, b)) == [2, 1, 0]


def test_units_stay_only_if_others_are_no_better():
  a = np.array([[1.0], [1.0 + 1e-9], [1e3]])
  assert list(matching.optimal_assignment(a, a[[1, 0, 2]])) == [1, 0, 2]


@pytest.mark.parametrize(
    ('a', 'b'),
    [
        (np.zeros((2, 3)), np.zeros((3, 3))),
        (np.zeros((2, 3)), np.zeros((2, 4))),
        (np.zeros(3), np.zeros(3)),
        (np.zeros((0, 3)), np.zeros((0, 3))),
        (np.zeros((2, 0)), np.zeros((2, 0))),
    ],
)
def test_other_shapes_are_an_error(a, b):
  with pytest.raises(ValueError, match='a and b must be matrices') as error:
    matching.optimal_assignment(a, b)
  assert f'{a.shape} and {b.shape}' in str(error.value)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_activations_that_are_not_finite_are_an_error(value):
  good, bad = np.zeros((2, 2)), np.diag([value, 0])
  with pytest.raises(ValueError, match='^b has .* not finite'):
    matching.optimal_assignment(good, bad)
  with pytest.raises(ValueError, match='^a has .* not finite'):
    matching.optimal_assignment(bad, good)


def test_diagonal_share():
  assert matching.diagonal_share([0, 1, 2]) == 1
  assert matching.diagonal_share(np.array([0, 2, 1, 3])) == 0.5
  assert matching.diagonal_share([1, 2, 0]) == 0


@pytest.mark.parametrize('assignment', [[], [0, 0], [1, 2], [[0, 1]], [0.5, 1]])
def test_no_permutation_is_an_error(assignment):
  with pytest.raises(ValueError, match='assignment must have each of'):
    matching.diagonal_share(assignment)


def test_a_model_matches_itself():
  model = _perceptron()
  for layer_name in ('hidden', 'norm', 'relu', 'logits'):
    match = matching.match_layers(model, model, layer_name, _X)
    assert match.diagonal_share == 1
    np.testing.assert_array_equal(
        match.assignment, np.arange(len(match.assignment))
    )


def test_a_permuted_model_is_matched():
  model = _convolutional()
  indices = np.array([0, 3, 1, 4, 2])
  copy = permutation.permute_units(model, {'conv': indices})
  match = matching.match_layers(model, copy, 'conv', _IMAGES)
  # Unit 1 has become unit 2, unit 2 unit 4, unit 3 unit 1, unit 4 unit 3.
  assert list(match.assignment) == [0, 2, 4, 1, 3]
  assert match.diagonal_share == 0.2
  match = matching.match_layers(copy, model, 'conv', _IMAGES)
  np.testing.assert_array_equal(match.assignment, indices)
  # The units of the next layer, whose inputs are permuted, stay.
  match = matching.match_layers(copy, model, 'logits', _IMAGES)
  assert match.diagonal_share == 1


def test_layers_of_other_sizes_are_an_error():
  with pytest.raises(ValueError, match=r'\(6, 150\) and \(7, 150\)'):
    matching.match_layers(_perceptron(), _perceptron(units=7), 'norm', _X)
