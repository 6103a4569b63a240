"""ResNet-20 for small images, as in the FedTAN and FedPAN papers.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016
(https://arxiv.org/abs/1512.03385), section 4.2, with shortcuts of option A: at
the start of a stage, the identity is subsampled and padded with zero channels.
"""

from collections.abc import Sequence
from typing import Any

import keras

from tff_bn.layers.scalars import ScalarBias
from tff_bn.layers.scalars import ScalarMultiplier
from tff_bn.models import normalization as normalization_lib

_CHANNELS = (16, 32, 64)
_WIDE_CHANNELS = (64, 128, 256)
_BLOCKS = 3


def build_resnet20(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds ResNet-20.

  The network has a convolution, three stages with 16, 32 and 64 channels,
  global average pooling and a dense layer. Each stage has three blocks of two
  convolutions. Each convolution is followed by normalization and ReLU.

  With `normalization='fixup'`, there are no normalization layers. Each block
  has four scalar biases (before and after the first convolution, before the
  second, and at the end of the branch) and a scalar multiplier after the second
  convolution. Two more biases follow the first convolution of the network and
  the pooling. The second convolution of each block and the dense layer start at
  0, and the first convolution of each block starts at a third of He's
  initialization.

  Returns:
    An untrained functional model with logits as output. With batch
    normalization, three channels and ten classes it has 271,098 values, 1,376
    of them moving means and variances.
  """
  return _build('resnet20', input_shape, num_outputs, normalization, _CHANNELS)


def build_resnet20_wide(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the wide ResNet-20 of the FedPAN paper (appendix B).

  It is `build_resnet20` with stages of 64, 128 and 256 channels.
  """
  return _build(
      'resnet20_wide', input_shape, num_outputs, normalization, _WIDE_CHANNELS
  )


def _build(
    model_name: str,
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str,
    stages: Sequence[int],
) -> keras.Model:
  layers = keras.layers
  is_fixup = normalization == 'fixup'
  inputs = keras.Input(input_shape, name='image')
  x = _convolve(inputs, stages[0], 1, normalization, 'stem')
  if is_fixup:
    x = ScalarBias(name='stem_bias')(x)
  x = layers.ReLU(name='stem_relu')(x)
  for stage, channels in enumerate(stages, start=1):
    for block in range(1, _BLOCKS + 1):
      name = f'stage_{stage}_block_{block}'
      strides = 2 if stage > 1 and block == 1 else 1
      shortcut = x
      if strides > 1:
        shortcut = _subsample_and_pad(x, channels, strides, name)
      if is_fixup:
        num_blocks = _BLOCKS * len(stages)
        x = _fixup_branch(x, channels, strides, num_blocks, name)
      else:
        x = _convolve(x, channels, strides, normalization, f'{name}_1')
        x = layers.ReLU(name=f'{name}_relu_1')(x)
        x = _convolve(x, channels, 1, normalization, f'{name}_2')
      x = layers.Add(name=f'{name}_add')([x, shortcut])
      x = layers.ReLU(name=f'{name}_relu_2')(x)
  x = layers.GlobalAveragePooling2D(name='mean')(x)
  if is_fixup:
    x = ScalarBias(name='mean_bias')(x)
  outputs = normalization_lib.logits(
      x,
      num_outputs,
      normalization,
      kernel_initializer='zeros' if is_fixup else 'he_normal',
  )
  return keras.Model(inputs, outputs, name=model_name)


def _convolve(
    inputs: keras.KerasTensor,
    channels: int,
    strides: int,
    normalization: str,
    name: str,
    kernel_initializer: Any = 'he_normal',
) -> keras.KerasTensor:
  """Applies a 3x3 convolution and a normalization."""
  padding = 'same'
  if strides > 1:
    # With `same`, Keras pads an even size on one side only, and the centers of
    # the kernels would be the pixels that the shortcut drops.
    inputs = keras.layers.ZeroPadding2D(1, name=f'{name}_conv_pad')(inputs)
    padding = 'valid'
  x = normalization_lib.convolve(
      inputs,
      channels,
      3,
      normalization,
      strides=strides,
      padding=padding,
      kernel_initializer=kernel_initializer,
      name=f'{name}_conv',
  )
  return normalization_lib.normalize(x, normalization, f'{name}_norm')


def _fixup_branch(
    x: keras.KerasTensor,
    channels: int,
    strides: int,
    num_blocks: int,
    name: str,
) -> keras.KerasTensor:
  """Applies the residual branch of a block with Fixup initialization.

  Zhang, Dauphin, Ma, Fixup Initialization: Residual Learning Without
  Normalization, ICLR 2019 (https://arxiv.org/abs/1901.09321), section 3.
  """
  # L^(-1/(2m-2)) for the L branches with m = 2 convolutions, as a variance.
  first = keras.initializers.VarianceScaling(2 / num_blocks)
  x = ScalarBias(name=f'{name}_bias_1')(x)
  x = _convolve(x, channels, strides, 'fixup', f'{name}_1', first)
  x = ScalarBias(name=f'{name}_bias_2')(x)
  x = keras.layers.ReLU(name=f'{name}_relu_1')(x)
  x = ScalarBias(name=f'{name}_bias_3')(x)
  x = _convolve(x, channels, 1, 'fixup', f'{name}_2', 'zeros')
  x = ScalarMultiplier(name=f'{name}_multiplier')(x)
  return ScalarBias(name=f'{name}_bias_4')(x)


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
