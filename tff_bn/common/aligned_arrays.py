"""NumPy arrays whose memory TensorFlow's tensors can share.

TensorFlow's tensors must begin at certain addresses, where NumPy's arrays
usually do not. `tf.constant` copies such an array twice, and any array once.
"""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np
import tensorflow as tf

# The addresses at which tensors begin are multiples of this number of bytes.
ALIGNMENT = 64
# The kinds of dtypes that NumPy and TensorFlow can share.
_SHARED_KINDS = 'iuf'


def empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
  """Returns an array, not yet filled, whose memory a tensor can share.

  Args:
    shape: The array's shape.
    dtype: Its dtype. If TensorFlow cannot share it, the result is any array.
  """
  if dtype.kind not in _SHARED_KINDS:
    return np.empty(shape, dtype)
  num_bytes = math.prod(shape) * dtype.itemsize
  memory: np.ndarray = np.empty(num_bytes + ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % ALIGNMENT
  return memory[start : start + num_bytes].view(dtype).reshape(shape)


def to_numpy(tensor: tf.Tensor) -> Any:
  """Copies a tensor's value, if possible to an array that it can share.

  Args:
    tensor: An eager tensor.

  Returns:
    The same as `tensor.numpy()`.
  """
  dtype = np.dtype(tensor.dtype.as_numpy_dtype)
  if dtype.kind not in _SHARED_KINDS or not tensor.shape.rank:
    return tensor.numpy()
  array = empty(tensor.shape, dtype)
  np.copyto(array, np.asarray(tensor))
  return array


def to_tensor(array: Any) -> tf.Tensor:
  """Returns a tensor that shares an array's memory if possible.

  Args:
    array: An array, which must not change as long as the tensor is used; or
      what else `tf.constant` takes.
  """
  if (
      isinstance(array, np.ndarray)
      and array.dtype.kind in _SHARED_KINDS
      and array.dtype.isnative
      and array.size
      and array.flags.carray
      and not array.ctypes.data % ALIGNMENT
  ):
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
  return tf.constant(array)
