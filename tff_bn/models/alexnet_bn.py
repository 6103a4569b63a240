"""AlexNet with batch normalization, of the FedBN paper (appendix D.3, table 9).

The paper trains it on Office-Caltech10 and DomainNet.
"""

import keras

from tff_bn.models import normalization as normalization_lib

# Channels, kernel size, strides, padding, and whether max pooling follows.
_CONVOLUTIONS = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
_POOLED_SIZE = 6
_DENSE_UNITS = (4096, 4096)


def build_alexnet_bn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds AlexNet with normalization.

  It has five convolutions, three of them followed by max pooling, adaptive
  average pooling to 6x6 pixels, two dense layers of 4096 units, and the logits.
  Normalization and ReLU follow each layer except the last. As in the paper,
  there is no dropout. All padding is symmetric, as in PyTorch.

  Args:
    input_shape: Height, width and channels of the images; at least 95x95
      pixels. The paper's images are 256x256x3.
    num_classes: Number of classes.
    normalization: The normalization after each layer except the last.

  Returns:
    An untrained functional model with logits as output.
  """
  layers = keras.layers
  inputs = keras.Input(input_shape, name='image')
  x = inputs
  for number, (channels, size, strides, padding, is_pooled) in enumerate(
      _CONVOLUTIONS, start=1
  ):
    x = layers.ZeroPadding2D(padding, name=f'conv_pad_{number}')(x)
    x = normalization_lib.convolve(
        x, channels, size, normalization, strides=strides, name=f'conv_{number}'
    )
    x = normalization_lib.normalize(x, normalization, f'conv_norm_{number}')
    x = layers.ReLU(name=f'conv_relu_{number}')(x)
    if is_pooled:
      x = layers.MaxPooling2D(3, 2, name=f'pool_{number}')(x)
  x = layers.AdaptiveAveragePooling2D(_POOLED_SIZE, name='mean')(x)
  x = layers.Flatten(name='flatten')(x)
  for number, units in enumerate(_DENSE_UNITS, start=1):
    x = normalization_lib.dense(x, units, normalization, name=f'dense_{number}')
    x = normalization_lib.normalize(x, normalization, f'dense_norm_{number}')
    x = layers.ReLU(name=f'dense_relu_{number}')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name='alexnet_bn')
