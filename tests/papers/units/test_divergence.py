"""Tests of the divergence of clients' weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn.papers.units import divergence

_LAYERS = keras.layers


def test_literal_values():
  # The means are (0, 0) and 4; the distances 5 and 5, and 1, 1, 2.
  assert divergence.weight_divergence(
      [[np.array([3.0, 4.0])], [np.array([-3.0, -4.0])]]
  ) == [5.0]
  clients = [[np.array(value)] for value in (3.0, 3.0, 6.0)]
  assert divergence.weight_divergence(clients) == [
      pytest.approx(4 / 3, rel=1e-15)
  ]


def test_variables_keep_their_order():
  rng = np.random.default_rng(0)
  clients = [
      [rng.normal(size=(3, 3, 2, 4)), rng.normal(size=4), rng.normal(size=5)]
      for _ in range(4)
  ]
  expected = []
  for variable in range(3):
    values = [weights[variable] for weights in clients]
    mean = sum(values) / 4
    expected.append(sum(np.sqrt(np.sum((v - mean) ** 2)) for v in values) / 4)
  found = divergence.weight_divergence(clients)
  assert found == pytest.approx(expected, rel=1e-13)
  assert all(type(value) is float for value in found)


def test_equal_weights_do_not_diverge():
  weights = [np.array([0.1, 0.2, 0.3], np.float32)]
  assert divergence.weight_divergence([weights, weights]) == [0.0]


def test_small_differences_of_large_float32_values():
  clients = [[np.float32([2**24 - 1])], [np.float32([2**24 - 2])]]
  assert divergence.weight_divergence(clients) == [0.5]


_ONE, _TWO = [np.zeros(2)], [np.zeros(2)] * 2


@pytest.mark.parametrize(
    ('clients', 'message'),
    [
        ([], 'clients has 0 elements'),
        ([_ONE], 'clients has 1 elements.* 2'),
        ([_TWO, _TWO, _ONE], r'clients\[2\] has 1 .*clients\[0\] has 2'),
        # NumPy could broadcast these shapes.
        (
            [[np.zeros(1), np.zeros((1, 2))], [np.zeros(1), np.zeros((2, 1))]],
            r'clients\[1\]\[1\] .*\(2, 1\).*\[0\]\[1\] has \(1, 2\)',
        ),
    ],
)
def test_weights_that_do_not_fit_are_an_error(clients, message):
  with pytest.raises(ValueError, match=message):
    divergence.weight_divergence(clients)


def _model(seed: int, units: int = 5, frozen: bool = False, prefix: str = ''):
  """Nested, with a wrapper and batch normalization; random weights."""
  inner_inputs = keras.Input((3, 4))
  hidden = _LAYERS.Dense(units, name=prefix + 'hidden')
  x = _LAYERS.TimeDistributed(hidden, name=prefix + 'wrapper')(inner_inputs)
  x = _LAYERS.BatchNormalization(name=prefix + 'norm')(x)
  inner = keras.Model(inner_inputs, x, name=prefix + 'inner')
  inputs = keras.Input((3, 4))
  x = _LAYERS.ReLU(name=prefix + 'relu')(inner(inputs))
  logits = _LAYERS.Dense(2, name=prefix + 'logits')
  model = keras.Model(inputs, logits(x))
  logits.trainable = not frozen
  rng = np.random.default_rng(seed)
  model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  return model


def _expected(vectors):
  vectors = [np.concatenate([np.ravel(v) for v in value]) for value in vectors]
  vectors = np.array(vectors, np.float64)
  centred = vectors - vectors.mean(axis=0)
  return np.mean(np.sqrt((centred**2).sum(axis=1)))


def test_by_layer():
  models = [_model(seed) for seed in range(3)]
  found = divergence.weight_divergence_by_layer(models)
  assert list(found) == ['inner/wrapper', 'inner/norm', 'logits']

  def values(*names):
    return [
        [w.numpy() for w in model.weights if w.path in names]
        for model in models
    ]

  expected = {
      'inner/wrapper': values('wrapper/hidden/kernel', 'wrapper/hidden/bias'),
      # Without the moving mean and variance.
      'inner/norm': values('norm/gamma', 'norm/beta'),
      'logits': values('logits/kernel', 'logits/bias'),
  }
  for name, vectors in expected.items():
    assert [len(vector) for vector in vectors] == [2, 2, 2]
    assert found[name] == pytest.approx(_expected(vectors), rel=1e-12)


def test_names_of_models_in_nested_models():
  models = []
  for _ in range(2):
    model = keras.Sequential(
        [keras.Input((4,)), _LAYERS.Dense(4, name='hidden')], name='inner'
    )
    for name in ('middle', 'outer'):
      inputs = keras.Input((4,))
      model = keras.Model(inputs, model(inputs), name=name)
    models.append(model)
  found = divergence.weight_divergence_by_layer(models)
  assert list(found) == ['middle/inner/hidden']


def test_names_of_the_first_model():
  """Keras numbers default names, so they differ between models."""
  models = [_model(0), _model(1)]
  renamed = [models[0], _model(1, prefix='other_')]
  found = divergence.weight_divergence_by_layer(renamed)
  assert found == divergence.weight_divergence_by_layer(models)


def test_frozen_layers_are_left_out():
  models = [_model(seed, frozen=True) for seed in range(2)]
  found = divergence.weight_divergence_by_layer(models)
  assert list(found) == ['inner/wrapper', 'inner/norm']


def test_a_layer_that_is_used_twice_counts_once():
  models = []
  for _ in range(2):
    shared = _LAYERS.Dense(4, name='shared')
    inner_inputs, inputs = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model(inner_inputs, shared(inner_inputs), name='inner')
    models.append(keras.Model(inputs, shared(inner(inner(inputs)))))
  found = divergence.weight_divergence_by_layer(models)
  assert len(found) == 1
  assert found.popitem()[0] in ('shared', 'inner/shared')


@pytest.mark.parametrize(
    ('other', 'message'),
    [
        (None, 'models has 1 elements.* 2'),
        (
            dict(units=6),
            r"'inner/wrapper' of models\[1\] .*\(4, 6\).*\[0\] .*\(4, 5\)",
        ),
        (dict(frozen=True), r'models\[1\] .* has 2 layers .*\[0\] .* has 3;'),
    ],
)
def test_models_that_do_not_fit_are_an_error(other, message):
  models = [_model(0)] + ([_model(0, **other)] if other else [])
  with pytest.raises(ValueError, match=message):
    divergence.weight_divergence_by_layer(models)


def test_two_layers_of_the_same_name_are_an_error():
  class TwoLayers(keras.Model):

    def __init__(self):
      super().__init__(name='two_layers')
      self.first = _LAYERS.Dense(4, name='same')
      self.second = _LAYERS.Dense(4, name='same')

    def call(self, inputs):
      return self.second(self.first(inputs))

  models = [TwoLayers(), TwoLayers()]
  for model in models:
    model(tf.zeros((1, 4)))
  with pytest.raises(ValueError, match="'two_layers'.* several .*'same'"):
    divergence.weight_divergence_by_layer(models)
