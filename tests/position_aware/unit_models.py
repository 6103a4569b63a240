"""Models with many kinds of layers, and the sizes of their groups of units.

Each builder returns the inputs, the outputs for a last dense layer, and the
sizes by group.
"""

import keras
import numpy as np
import tensorflow as tf

from tff_bn.layers.scalars import ScalarBias
from tff_bn.layers.scalars import ScalarMultiplier

_layers = keras.layers


def conv(filters, name, size=3, **kwargs):
  kwargs = {'padding': 'same', **kwargs}
  return _layers.Conv2D(filters, size, name=name, **kwargs)


def projections():
  """A residual block with a projection, and one without."""
  inputs = keras.Input((7, 6, 3))
  x = conv(6, 'stem', activation='relu')(inputs)
  y = conv(8, 'a', strides=2)(x)
  y = _layers.BatchNormalization()(y)
  y = _layers.LeakyReLU()(y)
  y = conv(8, 'b', use_bias=False)(y)
  x = _layers.Add()([conv(8, 'projection', 1, strides=2)(x), y])
  x = _layers.ELU()(x)
  x = _layers.Add()([x, conv(8, 'c', activation=tf.nn.relu)(x)])
  x = _layers.GlobalMaxPooling2D()(x)
  return inputs, x, {'stem': 6, 'projection': 8, 'a': 8}


def flattened_sum():
  """Adds a flattened convolution to a dense layer of the same size."""
  inputs = keras.Input((4, 6, 2))
  x = conv(5, 'a', strides=2)(inputs)
  x = _layers.Flatten()(x)
  y = _layers.Dense(30, 'tanh', name='b')(_layers.Flatten()(inputs))
  x = _layers.Maximum()([y, x])
  x = _layers.LayerNormalization()(x)
  return inputs, _layers.Dense(4, 'softmax', name='c')(x), {'b': 5, 'c': 4}


def flattened_channels_first():
  inputs = keras.Input((4, 6, 2))
  x = conv(5, 'a', strides=2)(inputs)
  x = _layers.Flatten('channels_first')(x)
  return inputs, _layers.BatchNormalization()(x), {'a': 5}


def channels_first():
  inputs = keras.Input((2, 5, 7))
  kwargs = dict(data_format='channels_first')
  x = _layers.Conv2D(4, 3, activation='relu', name='a', **kwargs)(inputs)
  x = _layers.BatchNormalization(1)(x)
  x = _layers.ZeroPadding2D(1, **kwargs)(x)
  # If the number of channels equals the width, Keras 3.15 adds the bias along
  # the width (`keras.ops.add` of its TensorFlow backend).
  x = _layers.Conv2D(5, 2, name='b', **kwargs)(x)
  x = _layers.MaxPooling2D(2, 1, **kwargs)(x)
  y = _layers.GlobalAveragePooling2D(**kwargs)(x)
  y = _layers.Dense(5, name='c')(y)
  x = _layers.Dense(5, name='d')(_layers.Flatten(**kwargs)(x))
  x = _layers.Dense(60, name='e')(_layers.Average()([y, x]))
  y = _layers.Conv2D(3, 1, name='f', **kwargs)(inputs)
  y = _layers.Conv2D(4, (2, 3), name='g', **kwargs)(y)
  # This layer flattens the channels as the slowest axis.
  y = _layers.Flatten()(_layers.MaxPooling2D((1, 2), **kwargs)(y))
  y = _layers.Dense(60, name='h')(y)
  sizes = {'a': 4, 'b': 5, 'c': 5, 'f': 3, 'g': 4, 'e': 60}
  return inputs, _layers.Add()([x, y]), sizes


def flattened_by_axis():
  inputs = keras.Input((3, 4, 2))
  x = conv(6, 'a')(inputs)
  x = _layers.Flatten()(x)
  # In groups of 9 values, the first group has pixel 1 and half of pixel 2, so
  # channels 0 to 2 differ from channels 3 to 5.
  x = _layers.GroupNormalization(8)(x)
  return inputs, x, {'a[0]': 3, 'a[1]': 3}


def normalizations_along_other_axes():
  inputs = keras.Input((4, 5, 2))
  x = conv(6, 'a', activation='relu')(inputs)
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


def squeeze_and_excitation():
  inputs = keras.Input((4, 5, 2))
  x = conv(6, 'a', activation='swish')(inputs)
  y = _layers.GlobalAveragePooling2D(keepdims=True)(x)
  y = _layers.Dense(3, 'relu', name='b')(y)
  y = _layers.Dense(6, 'sigmoid', name='c')(y)
  x = ScalarMultiplier()(ScalarBias()(_layers.Multiply()([x, y])))
  x = _layers.ZeroPadding2D(((1, 0), (2, 1)))(x)
  return inputs, _layers.Flatten()(x), {'a': 6, 'b': 3}


def shared():
  """Calls layers twice, one of them after itself."""
  inputs = keras.Input((5,))
  dense = _layers.Dense(6, name='a')
  again = _layers.Dense(6, 'tanh', name='b')
  norm = _layers.BatchNormalization()
  x = norm(again(norm(again(dense(inputs)))))
  y = _layers.Dense(6, 'tanh', name='c')(inputs)
  y = again(y)
  return inputs, _layers.Subtract()([x, y]), {'a': 6}


def shared_with_inputs():
  """Units that share weights with, or are added to, inputs stay."""
  inputs = keras.Input((6,))
  dense = _layers.Dense(6, 'tanh', name='a')
  norm = _layers.LayerNormalization()
  x = norm(_layers.Dense(6, 'tanh', name='b')(norm(inputs)))
  y = _layers.Dense(6, 'tanh', name='c')(dense(inputs))
  y = _layers.Add()([_layers.Dense(6, name='d')(y), inputs])
  z = _layers.Dense(6, name='e')(dense(dense(inputs)))
  return inputs, _layers.Average()([x, y, z]), {'c': 6}


def shifted():
  """Pads the inputs of one kernel in two ways that overlap."""
  inputs = keras.Input((3, 4, 2))
  kernel = conv(7, 'b')

  def pad(x, before, after):
    return _layers.ZeroPadding2D(
        ((0, 0), (before, after)), data_format='channels_first'
    )(x)

  x = conv(4, 'a', activation='relu')(inputs)
  x = _layers.Add()([kernel(pad(x, 0, 4)), kernel(pad(x, 2, 2))])
  return inputs, _layers.Flatten()(x), {'a': 2, 'b': 7}


def operations():
  """Calls functions of `keras.ops` and operators instead of layers."""
  ops = keras.ops
  inputs = keras.Input((4, 5, 2))
  x = ops.relu(conv(6, 'a')(inputs))
  y = _layers.Dense(7, activation=ops.silu, name='b')(x)
  y = _layers.BatchNormalization(-1)(y / 2)
  x = ops.maximum(x, 0.1 * x) + conv(6, 'c')(y)
  x = keras.activations.relu(x, max_value=6) ** np.float32(2) - 1
  y = keras.activations.softmax(_layers.Dense(6, name='d')(x))
  x = ops.sqrt(ops.abs(x * ops.cast(y, 'float32')) + ops.ones(()))
  return inputs, _layers.Flatten()(-x), {'a': 6, 'b': 7}


def nested():
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


BUILDERS = [
    projections,
    flattened_sum,
    flattened_channels_first,
    channels_first,
    flattened_by_axis,
    normalizations_along_other_axes,
    squeeze_and_excitation,
    shared,
    shared_with_inputs,
    shifted,
    operations,
    nested,
]
