"""Moments of batch normalization layers as values that TFF aggregates.

Every moments factory maps the clients' lists of `Moments`, one entry for each
layer, to one such list, so each can replace any other.
"""

from typing import Any

import numpy as np
import tensorflow_federated as tff

from tff_bn.layers.batch_moments import Moments

layer_moments = Moments


def layer_moments_type(num_channels: int, dtype: Any = np.float32) -> tff.Type:
  """Returns the TFF type of one layer's `Moments`."""
  vector = tff.TensorType(dtype, [num_channels])
  return tff.to_type(Moments(tff.TensorType(dtype), vector, vector))


def to_moments_type(value_type: tff.Type) -> tff.Type:
  """Returns the type with its structures of moments as `Moments`.

  Args:
    value_type: The type of a list of moments, in containers of any class.

  Raises:
    TypeError: If `value_type` is not a list of moments.
  """
  if not isinstance(value_type, tff.StructType) or not all(
      isinstance(layer, tff.StructType)
      and [name for name, _ in tff.structure.iter_elements(layer)]
      == list(Moments._fields)
      for layer in value_type
  ):
    raise TypeError(
        'A moments factory aggregates a list of <count, mean, variance>, one'
        f' for each batch normalization layer, but was given {value_type}.'
    )
  return tff.to_type([Moments(*layer) for layer in value_type])
