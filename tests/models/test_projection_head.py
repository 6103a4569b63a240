"""Tests of MOON's projection head."""

import keras
import numpy as np
import pytest
import random_models

from tff_bn import models
from tff_bn.keras_model import layer_features
from tff_bn.models import projection_head

_SHAPE = (8, 8, 1)


def _features(model, x):
  features = layer_features.LayerFeatures(model)
  with features.watched():
    logits = model(x, training=False)
  return features.value.numpy(), logits.numpy()


@pytest.mark.parametrize('name', ['mlp3', 'small_cnn'])
def test_models_by_name(name):
  plain = models.build_model_fn(name, _SHAPE, 10)()
  model = models.build_model_fn(name, _SHAPE, 10, moon_projection=7)()
  last = plain.layers[-1]
  num_features = last.kernel.shape[0]
  more = num_features * (num_features + 1) + (num_features + 1) * 7 + 8 * 10
  assert model.count_params() == (
      plain.count_params() - last.count_params() + more
  )
  assert [layer.name for layer in model.layers] == (
      [layer.name for layer in plain.layers[:-1]]
      + ['projection_hidden', 'projection_relu', 'projection', last.name]
  )


def _nested():
  layers = keras.layers
  inner = keras.Sequential(
      [keras.Input((8,)), layers.Dense(4), layers.Dense(3, name='logits')]
  )
  inputs = keras.Input((5,))
  return keras.Model(inputs, inner(layers.Dense(8, 'relu')(inputs)))


def _sequential():
  layers = keras.layers
  return keras.Sequential(
      [
          keras.Input((5,)),
          layers.Dense(4),
          layers.BatchNormalization(),
          layers.Dense(3, name='logits'),
          layers.Activation('linear'),
      ]
  )


@pytest.mark.parametrize('build', [_nested, _sequential])
def test_outputs_equal_numpy(build):
  plain = build()
  random_models.randomize(plain)
  model = projection_head.add_projection_head(plain, 6)
  x = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
  hidden, _ = _features(plain, x)
  weights = {
      variable.path.split('/')[-2] + '/' + variable.name: variable.numpy()
      for variable in model.weights
  }
  z = hidden @ weights['projection_hidden/kernel']
  z = np.maximum(z + weights['projection_hidden/bias'], 0)
  z = z @ weights['projection/kernel'] + weights['projection/bias']
  # MOON contrasts them by default.
  features, logits = _features(model, x)
  np.testing.assert_allclose(features, z, rtol=1e-4, atol=1e-5)
  expected = z @ weights['logits/kernel'] + weights['logits/bias']
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
  # The model has its own weights, and the given one is as before.
  model.set_weights([0 * w for w in model.get_weights()])
  np.testing.assert_array_equal(_features(plain, x)[0], hidden)


def test_encodings_and_precision():
  model = models.build_model_fn(
      'mlp3',
      _SHAPE,
      10,
      precision='mixed_bfloat16',
      pan='add',
      moon_projection=7,
  )()
  assert model.get_layer('projection').compute_dtype == 'bfloat16'
  assert model.get_layer('logits').compute_dtype == 'float32'
  # The head's hidden units are hidden units, too.
  assert model.get_layer('projection_hidden_position')


def _shared():
  inputs = keras.Input((4,))
  last = keras.layers.Dense(4)
  return keras.Model(inputs, last(last(keras.layers.Dense(4)(inputs))))


def _image():
  inputs = keras.Input((4, 4, 1))
  x = keras.layers.Conv2D(2, 3, name='a')(inputs)
  x = keras.layers.Conv2D(3, 2, name='b')(x)
  return keras.Model(inputs, keras.layers.Flatten()(x))


class _Subclassed(keras.Model):

  def call(self, x):
    return x


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (
            lambda: keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(2)]
            ),
            'projection head: the model .* has no hidden layer',
        ),
        (_shared, 'the last layer .* is called several times; a proj'),
        (_image, r"the last layer 'b' has the shape \(2, 2, 2\) for each"),
        (_Subclassed, 'is not a functional model with inputs'),
        (
            lambda: keras.Sequential([keras.layers.Dense(2)]),
            'is not a functional model with inputs',
        ),
    ],
)
def test_models_that_are_refused(build, message):
  with pytest.raises(ValueError, match=message):
    projection_head.add_projection_head(build(), 5)


def test_the_error_names_the_argument(tmp_path, monkeypatch):
  (tmp_path / 'linear_only.py').write_text(
      'import keras\n'
      'def build(shape, num_classes):\n'
      '  return keras.Sequential([keras.Input(shape), keras.layers.Flatten(),'
      ' keras.layers.Dense(num_classes)])\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  message = '^moon_projection=5 is impossible with model=linear_only:build: '
  with pytest.raises(ValueError, match=message):
    models.build_model_fn('linear_only:build', (4,), 3, moon_projection=5)
