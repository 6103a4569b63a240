"""A small convolutional network for the 8x8 digits and other small images."""

import keras

from tff_bn.models import normalization as normalization_lib

_CHANNELS = (16, 32, 32)


def build_small_cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a small convolutional network.

  It has three 3x3 convolutions, each followed by normalization and ReLU, with
  2x2 max pooling in between, then global average pooling and a dense layer.

  Args:
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_classes: Number of classes.
    normalization: The normalization after each convolution.

  Returns:
    An untrained functional model with logits as output.
  """
  layers = keras.layers
  inputs = keras.Input(input_shape, name='image')
  x = inputs
  for number, channels in enumerate(_CHANNELS, start=1):
    if number > 1:
      x = layers.MaxPooling2D(name=f'pool_{number - 1}')(x)
    x = normalization_lib.convolve(
        x, channels, 3, normalization, padding='same', name=f'conv_{number}'
    )
    x = normalization_lib.normalize(x, normalization, f'norm_{number}')
    x = layers.ReLU(name=f'relu_{number}')(x)
  x = layers.GlobalAveragePooling2D(name='mean')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name='small_cnn')
