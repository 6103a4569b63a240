"""Normalization by name: normalization layers, and what replaces them."""

from typing import Any, Optional

import keras

from tff_bn.catalog import models
from tff_bn.layers.feature_normalization import FeatureNormalization
from tff_bn.layers.kernel_normalization import KernelNormalization
from tff_bn.layers.weight_standardization import WeightStandardizedConv1D
from tff_bn.layers.weight_standardization import WeightStandardizedConv2D
from tff_bn.layers.weight_standardization import WeightStandardizedDense

# The papers' values (PyTorch's defaults): running = 0.9 running + 0.1 batch.
MOMENTUM = 0.9
_EPSILON = 1e-5


def _with_bias(normalization: str, use_bias: Optional[bool]) -> bool:
  """Whether a layer before a normalization has a bias, see `convolve`."""
  if use_bias is not None:
    return use_bias
  return models.find_normalization(normalization).needs_bias


def _before(arguments: dict[str, Any]) -> Optional[str]:
  """Returns the name of a normalization before a layer with a name."""
  name = arguments.get('name')
  return None if name is None else f'{name}_kernel_norm'


def convolve(
    inputs: keras.KerasTensor,
    channels: int,
    kernel_size: int,
    normalization: str,
    *,
    use_bias: Optional[bool] = None,
    **arguments: Any,
) -> keras.KerasTensor:
  """Applies a convolution to images or series, which `normalize` follows.

  By default, it has a bias unless the shift of the normalization, or the scalar
  biases of Fixup, make it redundant. `arguments` are other arguments of
  `keras.layers.Conv2D` or `keras.layers.Conv1D`.

  With kernel normalization, the normalized windows of the inputs lie side by
  side, so the convolution moves by its kernel size.
  """
  if normalization == models.KERNEL:
    inputs = KernelNormalization(
        kernel_size,
        arguments.pop('strides', 1),
        arguments.pop('padding', 'valid'),
        name=_before(arguments),
    )(inputs)
    arguments['strides'] = kernel_size
  is_standardized = normalization == models.STANDARDIZED_WEIGHTS
  if len(inputs.shape) == 3:
    kind = WeightStandardizedConv1D if is_standardized else keras.layers.Conv1D
  else:
    kind = WeightStandardizedConv2D if is_standardized else keras.layers.Conv2D
  use_bias = _with_bias(normalization, use_bias)
  return kind(channels, kernel_size, use_bias=use_bias, **arguments)(inputs)


def dense(
    inputs: keras.KerasTensor,
    units: int,
    normalization: str,
    *,
    use_bias: Optional[bool] = None,
    **arguments: Any,
) -> keras.KerasTensor:
  """Applies a hidden dense layer that `normalize` follows, see `convolve`."""
  if normalization == models.KERNEL:
    inputs = KernelNormalization(name=_before(arguments))(inputs)
  is_standardized = normalization == models.STANDARDIZED_WEIGHTS
  kind = WeightStandardizedDense if is_standardized else keras.layers.Dense
  use_bias = _with_bias(normalization, use_bias)
  return kind(units, use_bias=use_bias, **arguments)(inputs)


def logits(
    inputs: keras.KerasTensor,
    num_outputs: int,
    normalization: str,
    **arguments: Any,
) -> keras.KerasTensor:
  """Applies the last layer, after the feature normalization if there is one.

  `arguments` are other arguments of `keras.layers.Dense`.
  """
  if normalization == models.FEATURE:
    inputs = FeatureNormalization(name='feature_norm')(inputs)
  return keras.layers.Dense(
      num_outputs,
      # In mixed precision, the loss needs float32 logits.
      dtype='float32',
      name='logits',
      **arguments,
  )(inputs)


def normalize(
    inputs: keras.KerasTensor, normalization: str, name: str
) -> keras.KerasTensor:
  """Applies a normalization layer.

  Args:
    inputs: A tensor of shape `[batch, ..., channels]`.
    normalization: A key of `tff_bn.catalog.models.NORMALIZATIONS`, or
      `group<N>`, where N must divide the channels.
    name: The layer's name.

  Returns:
    The normalized tensor; `inputs` itself if the normalization is not a layer
    at this place, as for `none`.
  """
  models.NORMALIZATION.check(normalization)
  entry = models.find_normalization(normalization)
  if entry.builds is None:
    return inputs
  arguments: dict[str, Any] = {'epsilon': _EPSILON, 'name': name}
  if entry.has_momentum:
    arguments['momentum'] = MOMENTUM
  groups = models.num_groups(normalization)
  if groups:
    channels = inputs.shape[-1]
    if channels % groups:
      raise ValueError(
          f'normalization={normalization} is impossible: {groups} does not'
          f' divide the {channels} channels at layer {name}; use a number of'
          ' groups that divides the channels of every layer.'
      )
    arguments['groups'] = groups
  return entry.load()(**arguments)(inputs)
