"""Models of keras.applications with a new last layer."""

from collections.abc import Callable
import math
import warnings

import keras

from tff_bn.catalog import models
from tff_bn.keras_model import convert
from tff_bn.layers import discovery
from tff_bn.models import normalization as normalization_lib

# The name of the layer that is the model of keras.applications.
BACKBONE = 'backbone'
# The normalizations that only replace batch normalization layers. Others also
# change convolutions, or need biases that keras.applications does not have.
_REPLACED = ('layer', 'batch_renorm')


def build_mobilenet_v2(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds MobileNetV2 of keras.applications with a new last layer.

  Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR
  2018 (https://arxiv.org/abs/1801.04381). The convolutional network is the
  nested model `backbone`, with random weights; global average pooling and a
  dense layer follow it. Running statistics have the momentum 0.9, as in all
  models of this package.

  Args:
    input_shape: Height, width and channels of the images; at least 32x32
      pixels and any number of channels.
    num_outputs: The number of outputs.
    normalization: `'batch'`, `'layer'`, `'batch_renorm'` or `'group<N>'`,
      where N must divide the channels of every layer. The layers have the
      epsilon of keras.applications.

  Returns:
    An untrained functional model. With three channels and `k` outputs it has
    `1281 k + 2257984` values.

  Raises:
    ValueError: If the normalization is impossible.
  """
  return _build(
      'mobilenet_v2',
      keras.applications.MobileNetV2,
      input_shape,
      num_outputs,
      normalization,
  )


def build_resnet50(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds ResNet-50 of keras.applications with a new last layer.

  He et al., Deep Residual Learning for Image Recognition, CVPR 2016
  (https://arxiv.org/abs/1512.03385). See `build_mobilenet_v2`.

  Returns:
    An untrained functional model. With three channels and `k` outputs it has
    `2049 k + 23587712` values.
  """
  return _build(
      'resnet50',
      keras.applications.ResNet50,
      input_shape,
      num_outputs,
      normalization,
  )


def _build(
    name: str,
    build_backbone: Callable[..., keras.Model],
    input_shape: tuple[int, int, int],
    num_outputs: int,
    normalization: str,
) -> keras.Model:
  groups = models.num_groups(normalization)
  if normalization not in ('batch', *_REPLACED) and not groups:
    raise ValueError(
        f'normalization={normalization} is impossible with model={name}, whose'
        ' other layers come from keras.applications; use'
        f' normalization=batch, {", ".join(_REPLACED)} or'
        f' {models.GROUP_NORMALIZATION.name}.'
    )
  with warnings.catch_warnings():
    # It expects 1 or 3 channels, but takes any number.
    warnings.filterwarnings('ignore', '.*usually expects')
    backbone = build_backbone(
        include_top=False,
        weights=None,
        input_shape=input_shape,
        name=BACKBONE,
    )
  norms = discovery.batch_norm_layers(backbone)
  for layer in norms:
    layer.momentum = normalization_lib.MOMENTUM
  if groups:
    divisor = math.gcd(*(layer.gamma.shape[0] for layer in norms))
    if divisor % groups:
      raise ValueError(
          f'normalization={normalization} is impossible with model={name}:'
          f' {groups} does not divide the channels of every layer; the largest'
          f' number of groups is {divisor}.'
      )
    backbone = convert.convert_batch_norm(backbone, 'group', groups=groups)
  elif normalization in _REPLACED:
    backbone = convert.convert_batch_norm(backbone, normalization)
  inputs = keras.Input(input_shape, name='image')
  x = backbone(inputs)
  x = keras.layers.GlobalAveragePooling2D(name='mean')(x)
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name=name)
