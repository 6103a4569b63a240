"""Finding batch normalization layers."""

import importlib

import keras
import pytest

from tff_bn import layers

keras_layers = keras.layers


@pytest.mark.parametrize(
    'layer_class',
    [
        keras_layers.BatchNormalization,
        layers.FederatedBatchNormalization,
        type('OwnNorm', (keras_layers.BatchNormalization,), {}),
    ],
)
def test_batch_norm_classes(layer_class):
  assert layers.is_batch_norm(layer_class())


@pytest.mark.parametrize(
    'layer',
    [
        keras_layers.Dense(1, name='batch_normalization'),
        keras_layers.LayerNormalization(name='bn'),
        keras_layers.GroupNormalization(1),
        keras_layers.Normalization(),
    ],
)
def test_other_classes_whatever_their_name(layer):
  assert not layers.is_batch_norm(layer)


def test_finds_layers_in_nested_models_wrappers_and_attributes():
  class Block(keras_layers.Layer):

    def __init__(self):
      super().__init__()
      self.norms = [keras_layers.BatchNormalization(name='in_list')]
      self.by_name = {'x': keras_layers.BatchNormalization(name='in_dict')}

    def call(self, x):
      return self.by_name['x'](self.norms[0](x))

  inner = keras.Sequential(
      [
          keras.Input((3,)),
          keras.Sequential(
              [
                  keras.Input((3,)),
                  keras_layers.BatchNormalization(name='twice_nested'),
              ]
          ),
          keras_layers.BatchNormalization(name='nested'),
      ]
  )
  shared = keras_layers.BatchNormalization(name='shared')
  inputs = keras.Input((2, 3))
  x = keras_layers.TimeDistributed(
      keras_layers.BatchNormalization(name='wrapped')
  )(inputs)
  x = keras_layers.TimeDistributed(inner)(x)
  x = shared(shared(x))
  x = keras_layers.BatchNormalization(synchronized=True, name='sync')(x)
  x = Block()(x)
  model = keras.Model(inputs, x)

  everything = layers.all_layers(model)
  assert everything[0] is model
  assert len(set(everything)) == len(everything)
  assert {shared, inner, *inner.layers} < set(everything)
  found = layers.batch_norm_layers(model)
  assert sorted(layer.name for layer in found) == [
      'in_dict',
      'in_list',
      'nested',
      'shared',
      'sync',
      'twice_nested',
      'wrapped',
  ]


def test_single_layer():
  layer = keras_layers.BatchNormalization()
  assert layers.batch_norm_layers(layer) == layers.all_layers(layer) == [layer]


def test_keras_2_is_an_error(monkeypatch):
  monkeypatch.setattr(keras, '__version__', '2.14.0')
  with pytest.raises(
      ImportError, match=r'needs Keras 3, but Keras 2\.14\.0 is'
  ):
    importlib.reload(layers)
