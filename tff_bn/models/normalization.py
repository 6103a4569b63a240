"""Normalization layers by name."""

import keras

from tff_bn.common import spelling
from tff_bn.models import names

# The papers' values (PyTorch's defaults): running = 0.9 running + 0.1 batch.
_MOMENTUM = 0.9
_EPSILON = 1e-5


def check_normalization(normalization: str) -> None:
  """Raises a `ValueError` if there is no normalization of this name."""
  if (
      normalization not in names.NORMALIZATION_NAMES
      and not names.is_other_normalization(normalization)
  ):
    raise ValueError(
        f'normalization={normalization} is unknown; use'
        f' {", ".join(names.NORMALIZATION_NAMES)}, or'
        f' {names.OTHER_NORMALIZATIONS}, for example group2.'
        f'{spelling.suggestion(normalization, names.NORMALIZATION_NAMES)}'
    )


def needs_bias(normalization: str) -> bool:
  """Returns whether the layer before the normalization should have a bias.

  Args:
    normalization: See `normalize`.

  Returns:
    `False` if the normalization layer has a shift, which makes it redundant.
  """
  return normalization == 'none'


def normalize(
    inputs: keras.KerasTensor, normalization: str, name: str
) -> keras.KerasTensor:
  """Applies a Keras normalization layer.

  Args:
    inputs: A tensor of shape `[batch, ..., channels]`.
    normalization: One of `names.NORMALIZATION_NAMES`, or `group<N>`.
    name: The layer's name.

  Returns:
    The normalized tensor; `inputs` itself for `none`.

  Raises:
    ValueError: If the name is unknown or N doesn't divide the channels.
  """
  check_normalization(normalization)
  match normalization:
    case 'none':
      return inputs
    case 'batch':
      layer = keras.layers.BatchNormalization(
          momentum=_MOMENTUM, epsilon=_EPSILON, name=name
      )
    case 'layer':
      layer = keras.layers.LayerNormalization(epsilon=_EPSILON, name=name)
    case _:
      groups = names.num_groups(normalization)
      channels = inputs.shape[-1]
      if channels % groups:
        raise ValueError(
            f'normalization={normalization} is impossible: {groups} does not'
            f' divide the {channels} channels at layer {name}; use a number of'
            ' groups that divides the channels of every layer.'
        )
      layer = keras.layers.GroupNormalization(
          groups=groups, epsilon=_EPSILON, name=name
      )
  return layer(inputs)
