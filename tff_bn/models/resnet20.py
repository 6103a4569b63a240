"""ResNet-20 for small images, as in the FedTAN and FedPAN papers.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016
(https://arxiv.org/abs/1512.03385), section 4.2, with shortcuts of option A: at
the start of a stage, the identity is subsampled and padded with zero channels.
"""

from collections.abc import Sequence

import keras

from tff_bn.models import normalization as normalization_lib

_CHANNELS = (16, 32, 64)
_WIDE_CHANNELS = (64, 128, 256)
_BLOCKS = 3


def build_resnet20(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds ResNet-20.

  The network has a convolution, three stages with 16, 32 and 64 channels,
  global average pooling and a dense layer. Each stage has three blocks of two
  convolutions. Each convolution is followed by normalization and ReLU.

  Args:
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_classes: Number of classes.
    normalization: The normalization after each convolution.

  Returns:
    An untrained functional model with logits as output. With batch
    normalization, three channels and ten classes it has 271,098 values, 1,376
    of them moving means and variances.
  """
  return _build('resnet20', input_shape, num_classes, normalization, _CHANNELS)


def build_resnet20_wide(
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the wide ResNet-20 of the FedPAN paper (appendix B).

  It is `build_resnet20` with stages of 64, 128 and 256 channels.

  Args:
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_classes: Number of classes.
    normalization: The normalization after each convolution.

  Returns:
    An untrained functional model with logits as output.
  """
  return _build(
      'resnet20_wide', input_shape, num_classes, normalization, _WIDE_CHANNELS
  )


def _build(
    model_name: str,
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str,
    stages: Sequence[int],
) -> keras.Model:
  layers = keras.layers
  inputs = keras.Input(input_shape, name='image')
  x = _convolve(inputs, stages[0], 1, normalization, 'stem')
  x = layers.ReLU(name='stem_relu')(x)
  for stage, channels in enumerate(stages, start=1):
    for block in range(1, _BLOCKS + 1):
      name = f'stage_{stage}_block_{block}'
      strides = 2 if stage > 1 and block == 1 else 1
      shortcut = x
      if strides > 1:
        shortcut = _subsample_and_pad(x, channels, strides, name)
      x = _convolve(x, channels, strides, normalization, f'{name}_1')
      x = layers.ReLU(name=f'{name}_relu_1')(x)
      x = _convolve(x, channels, 1, normalization, f'{name}_2')
      x = layers.Add(name=f'{name}_add')([x, shortcut])
      x = layers.ReLU(name=f'{name}_relu_2')(x)
  x = layers.GlobalAveragePooling2D(name='mean')(x)
  outputs = layers.Dense(
      num_classes,
      kernel_initializer='he_normal',
      # In mixed precision, the loss needs float32 logits.
      dtype='float32',
      name='logits',
  )(x)
  return keras.Model(inputs, outputs, name=model_name)


def _convolve(
    inputs: keras.KerasTensor,
    channels: int,
    strides: int,
    normalization: str,
    name: str,
) -> keras.KerasTensor:
  """Applies a 3x3 convolution and a normalization."""
  x = keras.layers.Conv2D(
      channels,
      3,
      strides=strides,
      padding='same',
      use_bias=normalization_lib.needs_bias(normalization),
      kernel_initializer='he_normal',
      name=f'{name}_conv',
  )(inputs)
  return normalization_lib.normalize(x, normalization, f'{name}_norm')


def _subsample_and_pad(
    inputs: keras.KerasTensor, channels: int, strides: int, name: str
) -> keras.KerasTensor:
  """Applies the shortcut of option A."""
  # Pooling over single pixels with strides of 2 selects every other pixel.
  x = keras.layers.AveragePooling2D(
      pool_size=1, strides=strides, name=f'{name}_subsample'
  )(inputs)
  padding = (channels - inputs.shape[-1]) // 2
  # `channels_first` pads the last two axes, which are width and channels here.
  return keras.layers.ZeroPadding2D(
      ((0, 0), (padding, padding)),
      data_format='channels_first',
      name=f'{name}_pad',
  )(x)
