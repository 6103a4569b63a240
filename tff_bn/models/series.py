"""A convolutional network for series."""

import keras

from tff_bn.models import normalization as normalization_lib

_CHANNELS = (32, 64, 64)
_KERNEL_SIZE = 5


def build_conv1d(
    input_shape: tuple[int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a convolutional network for series, such as windows of sensors.

  It has three convolutions over 5 steps with 32, 64 and 64 channels, each
  followed by normalization and ReLU, with max pooling over 2 steps in between,
  then the mean over time and a dense layer.

  Args:
    input_shape: The number of steps and the number of features.
    num_outputs: The number of outputs.
    normalization: See `tff_bn.models`.

  Returns:
    An untrained functional model. With batch normalization, `f` features and
    `k` outputs it has `160 f + 65 k + 31360` values, 320 of them moving means
    and variances.
  """
  layers = keras.layers
  x = inputs = keras.Input(input_shape, name='series')
  for number, channels in enumerate(_CHANNELS, start=1):
    if number > 1:
      # The padding allows series of any length.
      x = layers.MaxPooling1D(padding='same', name=f'pool_{number - 1}')(x)
    x = normalization_lib.convolve(
        x,
        channels,
        _KERNEL_SIZE,
        normalization,
        padding='same',
        name=f'conv_{number}',
    )
    x = normalization_lib.normalize(x, normalization, f'norm_{number}')
    x = layers.ReLU(name=f'relu_{number}')(x)
  x = layers.GlobalAveragePooling1D(name='mean')(x)
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name='conv1d')
