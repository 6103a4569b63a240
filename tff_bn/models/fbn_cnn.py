"""The network of the FBN paper (arXiv:2405.14670, appendix C.1, table 1)."""

import keras

from tff_bn.models import normalization as normalization_lib

# Two convolutions before each pooling.
_BLOCKS = ((64, 64), (128, 128))
_DROPOUT = 0.25
_DENSE_UNITS = 128


def build_fbn_cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the network of the FBN paper.

  It has two blocks with 64 and 128 channels, then a dense layer of 128 units
  with ReLU, and the logits. A block has two 3x3 convolutions, 2x2 max pooling
  and dropout with rate 0.25. The normalization comes *after* the ReLU of each
  convolution, so its inputs have means far from 0.

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
  number = 0
  for block, channels_of_block in enumerate(_BLOCKS, start=1):
    for channels in channels_of_block:
      number += 1
      x = normalization_lib.convolve(
          x,
          channels,
          3,
          normalization,
          padding='same',
          use_bias=True,
          name=f'conv_{number}',
      )
      x = layers.ReLU(name=f'relu_{number}')(x)
      x = normalization_lib.normalize(x, normalization, f'norm_{number}')
    x = layers.MaxPooling2D(name=f'pool_{block}')(x)
    x = layers.Dropout(_DROPOUT, name=f'dropout_{block}')(x)
  x = layers.Flatten(name='flatten')(x)
  x = normalization_lib.dense(
      x, _DENSE_UNITS, normalization, use_bias=True, name='dense'
  )
  x = layers.ReLU(name='dense_relu')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name='fbn_cnn')
