"""Tensors that join many NumPy arrays, with one copy of their entries.

`tf.constant` copies an array twice, since TensorFlow's tensors must begin at
certain addresses, where NumPy's arrays do not.
"""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np
import tensorflow as tf

# The alignment of TensorFlow's tensors.
_ALIGNMENT_BYTES = 64


def joined(arrays: Sequence[np.ndarray], shape: Sequence[int]) -> tf.Tensor:
  """Returns a tensor with the entries of arrays, one array after another.

  Args:
    arrays: At least one array. All have the same dtype.
    shape: The tensor's shape. It may have more entries than the arrays, which
      are zeros.
  """
  dtype = arrays[0].dtype.newbyteorder('=')
  size = math.prod(shape)
  # What NumPy and TensorFlow can share.
  can_share = dtype.kind in 'iuf'
  flat = _aligned(size, dtype) if can_share else np.empty(size, dtype)
  num_given = sum(array.size for array in arrays)
  np.concatenate([array.ravel() for array in arrays], out=flat[:num_given])
  flat[num_given:] = 0
  array = flat.reshape(shape)
  if not can_share:
    return tf.constant(array)
  return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
  """Returns a vector, not yet filled, where a tensor may begin."""
  num_bytes = size * dtype.itemsize
  memory: np.ndarray = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT_BYTES
  return memory[start : start + num_bytes].view(dtype)


def stacked(values: Sequence[Any]) -> tf.Tensor:
  """Stacks arrays, tensors or numbers of the same shape and dtype.

  Args:
    values: The values, or an array that has them along its first axis.
  """
  if isinstance(values, np.ndarray):
    return joined([values], values.shape)
  if any(isinstance(value, tf.Tensor) for value in values):
    return tf.stack(values)
  # Not `tf.stack`, which converts a list of 64-bit numbers to 32 bits, and not
  # `np.stack`, which is slow for many small arrays.
  arrays = [np.asarray(value) for value in values]
  return joined(arrays, [len(arrays), *arrays[0].shape])
