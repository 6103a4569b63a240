"""The VGG networks of the FedPAN paper (appendix B).

Simonyan, Zisserman, Very Deep Convolutional Networks for Large-Scale Image
Recognition, ICLR 2015; Li et al., Federated Learning with Position-Aware
Neurons, CVPR 2022.
"""

from collections.abc import Sequence
from typing import Union

import tensorflow as tf

from tff_bn.models import normalization as normalization_lib

# Channels of the convolutions; M: max pooling.
_VGG9 = (32, 64, 'M', 128, 128, 'M', 256, 256, 'M')
_VGG11 = (64, 'M', 128, 'M', 256, 256, 'M', 512, 512, 'M', 512, 512, 'M')
_VGG13 = (
    *(64, 64, 'M', 128, 128, 'M', 256, 256, 'M'),
    *(512, 512, 'M', 512, 512, 'M'),
)


def build_vgg9(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> tf.keras.Model:
  """Builds VGG9: six convolutions, two hidden dense layers and the output.

  Args:
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_classes: Number of classes.
    normalization: The normalization after each convolution and hidden dense
      layer, before the ReLU. The paper has none by default.

  Returns:
    An untrained functional model with logits as output.
  """
  return _build(
      'vgg9', input_shape, num_classes, normalization, _VGG9, (512, 512)
  )


def build_vgg11(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> tf.keras.Model:
  """Builds VGG11 with eight convolutions and one dense layer, as in the paper.

  Args:
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_classes: Number of classes.
    normalization: The normalization after each convolution, before the ReLU.
      The paper has none by default.

  Returns:
    An untrained functional model with logits as output.
  """
  return _build('vgg11', input_shape, num_classes, normalization, _VGG11)


def build_vgg13(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> tf.keras.Model:
  """Builds VGG13 with ten convolutions and one dense layer, as in the paper.

  Args:
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_classes: Number of classes.
    normalization: The normalization after each convolution, before the ReLU.
      The paper has none by default.

  Returns:
    An untrained functional model with logits as output.
  """
  return _build('vgg13', input_shape, num_classes, normalization, _VGG13)


def _build(
    name: str,
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str,
    convolutions: Sequence[Union[int, str]],
    dense: Sequence[int] = (),
) -> tf.keras.Model:
  layers = tf.keras.layers
  use_bias = normalization_lib.needs_bias(normalization)
  inputs = tf.keras.Input(input_shape, name='image')
  x = inputs
  num_convolutions = num_pools = 0
  for channels in convolutions:
    if channels == 'M':
      num_pools += 1
      # Padded, so that images smaller than 32x32 are not used up.
      x = layers.MaxPooling2D(padding='same', name=f'pool_{num_pools}')(x)
      continue
    num_convolutions += 1
    x = layers.Conv2D(
        channels,
        3,
        padding='same',
        use_bias=use_bias,
        kernel_initializer='he_normal',
        name=f'conv_{num_convolutions}',
    )(x)
    x = normalization_lib.normalize(
        x, normalization, f'conv_norm_{num_convolutions}'
    )
    x = layers.ReLU(name=f'conv_relu_{num_convolutions}')(x)
  x = layers.Flatten(name='flatten')(x)
  for number, units in enumerate(dense, start=1):
    x = layers.Dense(
        units,
        use_bias=use_bias,
        kernel_initializer='he_normal',
        name=f'dense_{number}',
    )(x)
    x = normalization_lib.normalize(x, normalization, f'dense_norm_{number}')
    x = layers.ReLU(name=f'dense_relu_{number}')(x)
  # The loss needs them in float32, whatever the other layers compute in.
  outputs = layers.Dense(num_classes, dtype='float32', name='logits')(x)
  return tf.keras.Model(inputs, outputs, name=name)
