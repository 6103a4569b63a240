"""The batch normalization layers in Keras models: training, saving, loading."""

import keras
import numpy as np
import pytest
import random_values
import tensorflow as tf

from tff_bn.fedtan import model_checks
from tff_bn.layers import FederatedBatchNormalization


def _model(layer_class=FederatedBatchNormalization, **arguments):
  inputs = keras.Input([8, 8, 1])
  x = keras.layers.Conv2D(4, 3, use_bias=False)(inputs)
  x = layer_class(momentum=0.8, name='norm', **arguments)(x)
  x = keras.layers.ReLU()(x)
  x = keras.layers.Flatten()(x)
  x = layer_class(momentum=0.8, name='second')(x)
  outputs = keras.layers.Dense(3, name='logits')(x)
  return keras.Model(inputs, outputs)


def _data(n=24):
  x = random_values.inputs([n, 8, 8, 1]).astype(np.float32)
  return x, (np.arange(n) % 3).astype(np.int32)


def _compile(model, **options):
  model.compile(
      keras.optimizers.SGD(0.01),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      **options,
  )


@pytest.mark.parametrize(
    'options',
    [
        dict(),
        pytest.param(dict(jit_compile=True), marks=pytest.mark.slow),
    ],
    ids=['graph', 'compiled'],
)
def test_fit(options):
  model = _model()
  layer = model.get_layer('norm')
  x, y = _data()
  seen = model.layers[1](x).numpy().reshape(-1, 4)
  _compile(model, **options)
  model.fit(x, y, batch_size=24, epochs=1, verbose=0)
  np.testing.assert_allclose(
      layer.moving_mean, 0.2 * seen.mean(0), rtol=1e-4, atol=1e-6
  )
  np.testing.assert_allclose(
      layer.moving_variance, 0.8 + 0.2 * seen.var(0, ddof=1), rtol=1e-4
  )
  before = model.get_weights()
  model.evaluate(x, y, verbose=0)
  for found, wanted in zip(model.get_weights(), before):
    np.testing.assert_array_equal(found, wanted)
  losses = model.fit(x, y, batch_size=24, epochs=10, verbose=0).history['loss']
  assert losses[-1] < losses[0]


@pytest.mark.parametrize('file', ['model.keras', 'model.h5'])
def test_saved_models_are_loaded_without_custom_objects(tmp_path, file):
  model = _model(epsilon=0.02)
  _compile(model)
  x, y = _data()
  model.fit(x, y, batch_size=8, epochs=1, verbose=0)
  model.save(tmp_path / file)
  loaded = keras.models.load_model(tmp_path / file)
  layer = loaded.get_layer('norm')
  assert type(layer) is FederatedBatchNormalization
  assert layer.get_config() == model.get_layer('norm').get_config()
  for training in (False, True):
    np.testing.assert_allclose(
        loaded(x, training=training), model(x, training=training), rtol=1e-5
    )
  # Both models have updated their statistics.
  for found, wanted in zip(loaded.get_weights(), model.get_weights()):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  if file == 'model.h5':
    # Keras cannot train with an optimizer from such a file.
    _compile(loaded)
  loaded.fit(x, y, batch_size=8, epochs=1, verbose=0)


def test_exported_model_without_keras(tmp_path):
  model = _model()
  x, _ = _data()
  model(x, training=True)
  model.export(tmp_path, verbose=False)
  loaded = tf.saved_model.load(str(tmp_path))
  np.testing.assert_allclose(
      loaded.serve(tf.constant(x)), model(x), rtol=1e-5, atol=1e-6
  )


def test_weights_are_copied_to_and_from_keras_layers(tmp_path):
  kinds = FederatedBatchNormalization, keras.layers.BatchNormalization
  for source, target in (map(_model, kinds), map(_model, reversed(kinds))):
    random_values.randomize(source)
    source.save(tmp_path / 'model.h5')
    target.load_weights(tmp_path / 'model.h5')
    for found, wanted in zip(target.get_weights(), source.get_weights()):
      np.testing.assert_array_equal(found, wanted)


def test_layer_is_an_error_in_fedtan():
  with pytest.raises(
      ValueError, match="'norm' is a FederatedBatchNormalization"
  ):
    model_checks.check_model(_model())
