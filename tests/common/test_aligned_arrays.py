"""Tests for arrays whose memory tensors share."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.common import aligned_arrays


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'int64', 'uint8'])
def test_tensors_share_memory(dtype):
  tensor = tf.cast([[1, 2, 3], [4, 5, 6]], dtype)
  array = aligned_arrays.to_numpy(tensor)
  assert array.dtype == dtype
  np.testing.assert_array_equal(array, tensor)
  array[0, 0] = 7  # Not in `tensor`.
  assert tensor[0, 0] == 1
  shared = aligned_arrays.to_tensor(array)
  assert np.shares_memory(np.asarray(shared), array)
  np.testing.assert_array_equal(shared, [[7, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    'value',
    [
        tf.constant(1.5),
        tf.constant([True, False]),
        tf.constant([1 + 2j]),
        tf.constant([b'a', b'bc']),
        tf.constant([1, 2], tf.bfloat16),
        tf.zeros([0, 3]),
    ],
    ids=lambda tensor: tensor.dtype.name,
)
def test_other_values_are_copied(value):
  array = aligned_arrays.to_numpy(value)
  expected = value.numpy()
  assert type(array) is type(expected)
  np.testing.assert_array_equal(array, expected)
  tensor = aligned_arrays.to_tensor(array)
  assert tensor.dtype == value.dtype
  np.testing.assert_array_equal(tensor, value)


def test_arrays_of_other_layouts_are_copied():
  whole = aligned_arrays.empty([8, 16], np.dtype(np.float32))
  whole[:] = np.arange(128).reshape(8, 16)
  read_only = whole.copy()
  read_only.flags.writeable = False
  for array in (whole[:, ::2], whole.T, whole[0, 1:], read_only):
    tensor = aligned_arrays.to_tensor(array)
    assert not np.shares_memory(np.asarray(tensor), array)
    np.testing.assert_array_equal(tensor, array)
    assert np.asarray(tensor).ctypes.data % aligned_arrays.ALIGNMENT == 0


def test_a_tensor_keeps_its_memory():
  tensors = []
  for number in range(5):
    # So large that the memory would be given back at once.
    array = aligned_arrays.empty([10**6], np.dtype(np.float32))
    array[:] = number
    tensors.append(aligned_arrays.to_tensor(array))
    del array
  sums = [float(tf.reduce_sum(tensor)) for tensor in tensors]
  assert sums == [10**6 * number for number in range(5)]


def test_another_byte_order_is_copied():
  array = aligned_arrays.empty([2], np.dtype(np.int32)).view('>i4')
  array[:] = [1, 2]
  np.testing.assert_array_equal(aligned_arrays.to_tensor(array), [1, 2])
