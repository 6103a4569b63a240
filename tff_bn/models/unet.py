"""U-Net, for segmentation.

Ronneberger, Fischer, Brox, U-Net: Convolutional Networks for Biomedical Image
Segmentation, MICCAI 2015 (https://arxiv.org/abs/1505.04597).
"""

import keras

from tff_bn.models import normalization as normalization_lib

_CHANNELS = (16, 32, 64)


def build_unet(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a small U-Net.

  Its contracting path has two 3x3 convolutions at each of three resolutions,
  with 16, 32 and 64 channels and 2x2 max pooling in between. Its expanding path
  repeats pixels, concatenates the features of the contracting path, and has two
  3x3 convolutions at each resolution. Normalization and ReLU follow each
  convolution. A dense layer for each pixel gives the outputs.

  Unlike in the paper, the convolutions are padded, so the output has the size
  of the image. Images may have any size: pooling rounds an odd size up, and the
  expanding path crops the last row or column.

  Args:
    input_shape: Height, width and channels of the images.
    num_outputs: The number of outputs for each pixel.
    normalization: See `tff_bn.models`.

  Returns:
    An untrained functional model with outputs of the shape `[batch, height,
    width, num_outputs]`. With batch normalization, `c` channels and `k` outputs
    it has `144 c + 17 k + 118784` values, 640 of them moving means and
    variances.
  """
  layers = keras.layers
  x = inputs = keras.Input(input_shape, name='image')
  skipped = []
  for level, channels in enumerate(_CHANNELS, start=1):
    if level > 1:
      skipped.append(x)
      x = layers.MaxPooling2D(padding='same', name=f'pool_{level - 1}')(x)
    x = _convolve_twice(x, channels, normalization, f'down_{level}')
  for level in range(len(skipped), 0, -1):
    x = layers.UpSampling2D(name=f'up_{level}_repeat')(x)
    x = _crop(x, skipped[level - 1], f'up_{level}_crop')
    x = layers.Concatenate(name=f'up_{level}_concat')([skipped[level - 1], x])
    x = _convolve_twice(x, _CHANNELS[level - 1], normalization, f'up_{level}')
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name='unet')


def _convolve_twice(
    x: keras.KerasTensor, channels: int, normalization: str, prefix: str
) -> keras.KerasTensor:
  """Applies two convolutions, each with its normalization and ReLU."""
  for number in (1, 2):
    x = normalization_lib.convolve(
        x,
        channels,
        3,
        normalization,
        padding='same',
        kernel_initializer='he_normal',
        name=f'{prefix}_conv_{number}',
    )
    x = normalization_lib.normalize(x, normalization, f'{prefix}_norm_{number}')
    x = keras.layers.ReLU(name=f'{prefix}_relu_{number}')(x)
  return x


def _crop(
    x: keras.KerasTensor, like: keras.KerasTensor, name: str
) -> keras.KerasTensor:
  """Crops the last row and column where another tensor lacks them."""
  surplus = [x.shape[axis] - like.shape[axis] for axis in (1, 2)]
  if not any(surplus):
    return x
  return keras.layers.Cropping2D([(0, rows) for rows in surplus], name=name)(x)
