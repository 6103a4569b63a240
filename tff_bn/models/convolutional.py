"""Convolutional networks: a small one, and those of the papers."""

from collections.abc import Sequence
import functools
from typing import Any

import keras

from tff_bn.models import normalization as normalization_lib

# Of AlexNet: channels, kernel size, strides, padding, and whether max pooling
# follows.
_ALEXNET = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
# Name -> channels of the convolutions, where M is max pooling; units of the
# hidden dense layers.
_VGG = {
    'vgg9': (
        (32, 64, 'M', 128, 128, 'M', 256, 256, 'M'),
        (512, 512),
    ),
    'vgg11': (
        (64, 'M', 128, 'M', 256, 256, 'M', 512, 512, 'M', 512, 512, 'M'),
        (),
    ),
    'vgg13': (
        (
            *(64, 64, 'M', 128, 128, 'M', 256, 256, 'M'),
            *(512, 512, 'M', 512, 512, 'M'),
        ),
        (),
    ),
}


def build_small_cnn(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a convolutional network for the 8x8 digits and other small images.

  It has three 3x3 convolutions, each followed by normalization and ReLU, with
  2x2 max pooling in between, then global average pooling and a dense layer.
  """
  layers = keras.layers
  x = inputs = keras.Input(input_shape, name='image')
  for number, channels in enumerate((16, 32, 32), start=1):
    if number > 1:
      x = layers.MaxPooling2D(name=f'pool_{number - 1}')(x)
    x = _convolution(x, channels, 3, normalization, number, '', padding='same')
  x = layers.GlobalAveragePooling2D(name='mean')(x)
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name='small_cnn')


def build_digits_cnn(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the six-layer network of the FedBN paper (appendix D.2, table 3).

  It has 5x5 convolutions with 64, 64 and 128 channels, the first two followed
  by 2x2 max pooling, then dense layers with 2048 and 512 units, and the logits.
  Normalization and ReLU follow each layer except the last.
  """
  layers = keras.layers
  x = inputs = keras.Input(input_shape, name='image')
  for number, channels in enumerate((64, 64, 128), start=1):
    if number > 1:
      x = layers.MaxPooling2D(name=f'pool_{number - 1}')(x)
    x = _convolution(x, channels, 5, normalization, number, padding='same')
  x = _dense_layers(x, (2048, 512), normalization)
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name='digits_cnn')


def build_fbn_cnn(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the network of the FBN paper (arXiv:2405.14670, C.1, table 1).

  It has two blocks with 64 and 128 channels, then a dense layer of 128 units
  with ReLU, and the logits. A block has two 3x3 convolutions, 2x2 max pooling
  and dropout with rate 0.25. The normalization comes *after* the ReLU of each
  convolution, so its inputs have means far from 0.
  """
  layers = keras.layers
  x = inputs = keras.Input(input_shape, name='image')
  for number, channels in enumerate((64, 64, 128, 128), start=1):
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
    if number % 2 == 0:
      x = layers.MaxPooling2D(name=f'pool_{number // 2}')(x)
      x = layers.Dropout(0.25, name=f'dropout_{number // 2}')(x)
  x = layers.Flatten(name='flatten')(x)
  x = normalization_lib.dense(
      x, 128, normalization, use_bias=True, name='dense'
  )
  x = layers.ReLU(name='dense_relu')(x)
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name='fbn_cnn')


def build_alexnet_bn(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds AlexNet with normalization (FedBN, appendix D.3, table 9).

  The paper trains it on Office-Caltech10 and DomainNet. It has five
  convolutions, three of them followed by max pooling, adaptive average pooling
  to 6x6 pixels, two dense layers of 4096 units, and the logits. Normalization
  and ReLU follow each layer except the last. As in the paper, there is no
  dropout. All padding is symmetric, as in PyTorch.
  """
  layers = keras.layers
  x = inputs = keras.Input(input_shape, name='image')
  for number, (channels, size, strides, padding, is_pooled) in enumerate(
      _ALEXNET, start=1
  ):
    x = layers.ZeroPadding2D(padding, name=f'conv_pad_{number}')(x)
    x = _convolution(x, channels, size, normalization, number, strides=strides)
    if is_pooled:
      x = layers.MaxPooling2D(3, 2, name=f'pool_{number}')(x)
  x = layers.AdaptiveAveragePooling2D(6, name='mean')(x)
  x = _dense_layers(x, (4096, 4096), normalization)
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name='alexnet_bn')


def build_vgg(
    name: str,
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a VGG network of the FedPAN paper (appendix B).

  Simonyan, Zisserman, Very Deep Convolutional Networks for Large-Scale Image
  Recognition, ICLR 2015; Li et al., Federated Learning with Position-Aware
  Neurons, CVPR 2022. VGG9 has six convolutions and two hidden dense layers;
  VGG11 and VGG13 have eight and ten convolutions and, as in the FedPAN paper,
  no hidden dense layer.

  Args:
    name: `'vgg9'`, `'vgg11'` or `'vgg13'`.
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_outputs: The number of outputs.
    normalization: The normalization after each convolution and hidden dense
      layer, before the ReLU. The paper's networks have none by default.

  Returns:
    An untrained functional model with logits as output.

  Raises:
    ValueError: If `name` is unknown.
  """
  if name not in _VGG:
    raise ValueError(
        f'name={name!r} must be one of {", ".join(map(repr, _VGG))}.'
    )
  convolutions, dense = _VGG[name]
  x = inputs = keras.Input(input_shape, name='image')
  number = num_pools = 0
  for channels in convolutions:
    if isinstance(channels, str):
      num_pools += 1
      # The padding allows images smaller than 32x32.
      x = keras.layers.MaxPooling2D(padding='same', name=f'pool_{num_pools}')(x)
      continue
    number += 1
    x = _convolution(
        x,
        channels,
        3,
        normalization,
        number,
        padding='same',
        kernel_initializer='he_normal',
    )
  x = _dense_layers(x, dense, normalization, kernel_initializer='he_normal')
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name=name)


build_vgg9 = functools.partial(build_vgg, 'vgg9')
build_vgg11 = functools.partial(build_vgg, 'vgg11')
build_vgg13 = functools.partial(build_vgg, 'vgg13')


def _convolution(
    x: keras.KerasTensor,
    channels: int,
    kernel_size: int,
    normalization: str,
    number: int,
    prefix: str = 'conv_',
    **arguments: Any,
) -> keras.KerasTensor:
  """Applies a convolution, its normalization and ReLU.

  `prefix` begins the names of the normalization and of ReLU, and `number` ends
  all three.
  """
  x = normalization_lib.convolve(
      x,
      channels,
      kernel_size,
      normalization,
      **arguments,
      name=f'conv_{number}',
  )
  x = normalization_lib.normalize(x, normalization, f'{prefix}norm_{number}')
  return keras.layers.ReLU(name=f'{prefix}relu_{number}')(x)


def _dense_layers(
    x: keras.KerasTensor,
    units: Sequence[int],
    normalization: str,
    **arguments: Any,
) -> keras.KerasTensor:
  """Flattens images and applies hidden dense layers of these sizes."""
  x = keras.layers.Flatten(name='flatten')(x)
  for number, size in enumerate(units, start=1):
    x = normalization_lib.dense(
        x, size, normalization, **arguments, name=f'dense_{number}'
    )
    x = normalization_lib.normalize(x, normalization, f'dense_norm_{number}')
    x = keras.layers.ReLU(name=f'dense_relu_{number}')(x)
  return x
