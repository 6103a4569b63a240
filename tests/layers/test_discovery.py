"""Tests of finding batch normalization layers."""

import pytest
import tensorflow as tf

from tff_bn import layers

keras_layers = tf.keras.layers


@pytest.mark.parametrize(
    'layer_class',
    [
        keras_layers.BatchNormalization,
        keras_layers.experimental.SyncBatchNormalization,
        tf.compat.v1.keras.layers.BatchNormalization,
        type('OwnNorm', (keras_layers.BatchNormalization,), {}),
    ],
)
def test_every_batch_norm_class_counts(layer_class):
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
def test_no_other_class_counts_whatever_its_name(layer):
  assert not layers.is_batch_norm(layer)


def test_finds_layers_in_nested_models_wrappers_and_attributes():
  class Block(keras_layers.Layer):

    def __init__(self):
      super().__init__()
      self.norms = [keras_layers.BatchNormalization(name='in_list')]
      self.by_name = {'x': keras_layers.BatchNormalization(name='in_dict')}

    def call(self, x):
      return self.by_name['x'](self.norms[0](x))

  inner = tf.keras.Sequential(
      [
          tf.keras.Input((3,)),
          tf.keras.Sequential(
              [
                  tf.keras.Input((3,)),
                  keras_layers.BatchNormalization(name='twice_nested'),
              ]
          ),
          keras_layers.BatchNormalization(name='nested'),
      ]
  )
  shared = keras_layers.BatchNormalization(name='shared')
  inputs = tf.keras.Input((2, 3))
  x = keras_layers.TimeDistributed(
      keras_layers.BatchNormalization(name='wrapped')
  )(inputs)
  x = keras_layers.TimeDistributed(inner)(x)
  x = shared(shared(x))
  x = keras_layers.experimental.SyncBatchNormalization(name='sync')(x)
  x = Block()(x)
  model = tf.keras.Model(inputs, x)

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


def test_a_layer_alone_is_found():
  layer = keras_layers.BatchNormalization()
  assert layers.batch_norm_layers(layer) == [layer]
