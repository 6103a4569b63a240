"""Tensors that join many NumPy arrays, with one copy of their entries."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_bn.common import aligned_arrays


def joined(arrays: Sequence[np.ndarray], shape: Sequence[int]) -> tf.Tensor:
  """Returns a tensor with the entries of arrays, one array after another.

  Args:
    arrays: At least one array. All have the same dtype.
    shape: The tensor's shape. It may have more entries than the arrays, which
      are zeros.
  """
  array = aligned_arrays.empty(shape, arrays[0].dtype.newbyteorder('='))
  flat = array.reshape(-1)
  num_given = sum(array.size for array in arrays)
  np.concatenate([array.ravel() for array in arrays], out=flat[:num_given])
  flat[num_given:] = 0
  return aligned_arrays.to_tensor(array)


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
