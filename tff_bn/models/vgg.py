"""The VGG networks of the FedPAN paper (appendix B).

Simonyan, Zisserman, Very Deep Convolutional Networks for Large-Scale Image
Recognition, ICLR 2015; Li et al., Federated Learning with Position-Aware
Neurons, CVPR 2022.
"""

import keras

from tff_bn.models import normalization as normalization_lib

# Name -> channels of the convolutions, where M is max pooling; units of the
# hidden dense layers.
_ARCHITECTURES = {
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


def build_vgg(
    name: str,
    input_shape: tuple[int, int, int],
    num_classes: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds a VGG network.

  VGG9 has six convolutions and two hidden dense layers; VGG11 and VGG13 have
  eight and ten convolutions and, as in the paper, no hidden dense layer.

  Args:
    name: `'vgg9'`, `'vgg11'` or `'vgg13'`.
    input_shape: Height, width and channels of the images; at least 4x4 pixels.
    num_classes: Number of classes.
    normalization: The normalization after each convolution and hidden dense
      layer, before the ReLU. The paper's networks have none by default.

  Returns:
    An untrained functional model with logits as output.

  Raises:
    ValueError: If `name` is unknown.
  """
  if name not in _ARCHITECTURES:
    raise ValueError(
        f'name={name!r} must be one of {", ".join(map(repr, _ARCHITECTURES))}.'
    )
  convolutions, dense = _ARCHITECTURES[name]
  layers = keras.layers
  inputs = keras.Input(input_shape, name='image')
  x = inputs
  num_convolutions = num_pools = 0
  for channels in convolutions:
    if isinstance(channels, str):
      num_pools += 1
      # The padding allows images smaller than 32x32.
      x = layers.MaxPooling2D(padding='same', name=f'pool_{num_pools}')(x)
      continue
    num_convolutions += 1
    x = normalization_lib.convolve(
        x,
        channels,
        3,
        normalization,
        padding='same',
        kernel_initializer='he_normal',
        name=f'conv_{num_convolutions}',
    )
    x = normalization_lib.normalize(
        x, normalization, f'conv_norm_{num_convolutions}'
    )
    x = layers.ReLU(name=f'conv_relu_{num_convolutions}')(x)
  x = layers.Flatten(name='flatten')(x)
  for number, units in enumerate(dense, start=1):
    x = normalization_lib.dense(
        x,
        units,
        normalization,
        kernel_initializer='he_normal',
        name=f'dense_{number}',
    )
    x = normalization_lib.normalize(x, normalization, f'dense_norm_{number}')
    x = layers.ReLU(name=f'dense_relu_{number}')(x)
  outputs = normalization_lib.logits(x, num_classes, normalization)
  return keras.Model(inputs, outputs, name=name)
