"""Tests that models with each of the layers are saved, loaded and cloned."""

import keras
import numpy as np
import pytest
import random_values

from tff_bn import layers

# Functions that build a layer, and the shape of one of its inputs.
_LAYERS = {
    'federated': (
        lambda: layers.FederatedBatchNormalization(1, 0.7, 0.1),
        (4, 3),
    ),
    'renorm': (
        lambda: layers.BatchRenormalization(r_max=2, d_max=1),
        (4, 3),
    ),
    'hybrid': (lambda: layers.HybridBatchNormalization(scale=False), (4, 3)),
    'static': (lambda: layers.StaticBatchNormalization(2, 0.5), (4, 3)),
    'features': (lambda: layers.FeatureNormalization(axis=1), (4, 3)),
    'units': (
        lambda: layers.KernelNormalization((2, 3), 2, 'same', 0.3, 0.1, 7),
        (4, 5, 2),
    ),
    'bias': (layers.ScalarBias, (4, 3)),
    'multiplier': (
        lambda: layers.ScalarMultiplier(dtype='mixed_bfloat16'),
        (4,),
    ),
    'dense': (
        lambda: layers.WeightStandardizedDense(
            3, activation='relu', use_bias=False, gain_initializer='ones'
        ),
        (2, 4),
    ),
    'conv': (
        lambda: layers.WeightStandardizedConv2D(
            4, 2, groups=2, strides=2, padding='same'
        ),
        (5, 4, 6),
    ),
    'conv_1d': (
        lambda: layers.WeightStandardizedConv1D(4, 2, padding='causal'),
        (5, 3),
    ),
    'encoding': (
        lambda: layers.PositionEncoding('multiply', 0.2, 3, 1, 0.5),
        (4, 3),
    ),
    'personal_encoding': (
        lambda: layers.PositionEncoding('add', 0.2, personal_share=0.75),
        (4, 3),
    ),
}


@pytest.mark.parametrize('name', _LAYERS)
def test_saved_and_cloned(name, tmp_path):
  build, shape = _LAYERS[name]
  model = keras.Sequential([keras.Input(shape), build()])
  layer = model.layers[-1]
  random_values.randomize(layer)
  model.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras')
  clone = keras.models.clone_model(model)
  clone.set_weights(model.get_weights())
  for other in (loaded, clone):
    copy = other.layers[-1]
    assert type(copy) is type(layer)
    assert copy.get_config() == layer.get_config()
    for a, b in zip(copy.weights, layer.weights, strict=True):
      assert a.trainable == b.trainable
      np.testing.assert_array_equal(a, b)
    for size in (5, 2):
      x = random_values.inputs([size, *shape]).astype(np.float32)
      np.testing.assert_array_equal(other(x), model(x))
  registered = keras.saving.get_registered_name(type(layer))
  assert registered == f'tff_bn>{type(layer).__name__}'


# Kernel normalization and convolutions combine steps.
@pytest.mark.parametrize(
    'name', [n for n in _LAYERS if n not in ('units', 'conv', 'conv_1d')]
)
def test_masks_are_passed_on(name):
  layer = _LAYERS[name][0]()
  model = keras.Sequential([keras.layers.Masking(), layer])
  assert model(np.ones([2, 4, 3], np.float32))._keras_mask is not None
