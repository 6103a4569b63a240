"""The six-layer network of the FedBN paper (Appendix D.2, table 3)."""

import keras

from tff_bn.models import normalization as normalization_lib

_CONV_CHANNELS = (64, 64, 128)
_DENSE_UNITS = (2048, 512)


def build_digits_cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the network of the FedBN paper.

  It has 5x5 convolutions with 64, 64 and 128 channels, the first two followed
  by 2x2 max pooling, then dense layers with 2048 and 512 units, and the logits.
  Normalization and ReLU follow each layer except the last.

  Args:
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_classes: Number of classes.
    normalization: The normalization after each layer except the last.

  Returns:
    An untrained functional model with logits as output.
  """
  layers = keras.layers
  inputs = keras.Input(input_shape, name='image')
  x = inputs
  for number, channels in enumerate(_CONV_CHANNELS, start=1):
    if number > 1:
      x = layers.MaxPooling2D(name=f'pool_{number - 1}')(x)
    x = normalization_lib.convolve(
        x, channels, 5, normalization, padding='same', name=f'conv_{number}'
    )
    x = normalization_lib.normalize(x, normalization, f'conv_norm_{number}')
    x = layers.ReLU(name=f'conv_relu_{number}')(x)
  x = layers.Flatten(name='flatten')(x)
  for number, units in enumerate(_DENSE_UNITS, start=1):
    x = normalization_lib.dense(x, units, normalization, name=f'dense_{number}')
    x = normalization_lib.normalize(x, normalization, f'dense_norm_{number}')
    x = layers.ReLU(name=f'dense_relu_{number}')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name='digits_cnn')
