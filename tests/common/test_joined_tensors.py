"""Tests for tensors that join NumPy arrays."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.common import joined_tensors

_DTYPES = [
    'float16',
    'float32',
    'float64',
    'complex64',
    'int8',
    'int64',
    'uint8',
    'bool',
    tf.bfloat16.as_numpy_dtype,
]


@pytest.mark.parametrize('dtype', _DTYPES)
def test_joins_arrays_bit_for_bit(dtype):
  arrays = [np.arange(6).reshape(2, 3), np.arange(7, 10).reshape(1, 3)]
  arrays = [array.astype(dtype) for array in arrays]
  tensor = joined_tensors.joined(arrays, [3, 3])
  assert tensor.dtype == arrays[0].dtype
  np.testing.assert_array_equal(tensor, np.concatenate(arrays))


@pytest.mark.parametrize('dtype', _DTYPES)
def test_fills_the_rest_with_zeros(dtype):
  tensor = joined_tensors.joined([np.ones([1, 2], dtype)], [3, 1, 2])
  expected = np.array([[[1, 1]], [[0, 0]], [[0, 0]]], dtype)
  np.testing.assert_array_equal(tensor, expected)


def test_joins_strings():
  arrays = [np.array([b'a', b'bcd'], object), np.array([b''], object)]
  tensor = joined_tensors.joined(arrays, [3])
  assert tensor.numpy().tolist() == [b'a', b'bcd', b'']


@pytest.mark.parametrize('dtype', ['float32', 'bool'])
def test_joins_arrays_without_entries(dtype):
  tensor = joined_tensors.joined([np.zeros([0, 4], dtype)] * 2, [0, 4])
  assert tensor.shape == [0, 4]
  assert tensor.dtype == dtype


def test_joins_arrays_of_any_memory_layout():
  array = np.arange(24, dtype=np.int32).reshape(4, 6)
  read_only = array.copy()
  read_only.flags.writeable = False
  arrays = [array[::2, 1::2], array.T[:2, :3], read_only[:2, :3]]
  arrays.append(np.asfortranarray(arrays[0]))
  arrays.append(arrays[0].astype('>i4'))
  for order in (arrays, arrays[::-1]):
    tensor = joined_tensors.stacked(order)
    assert tensor.dtype == tf.int32
    np.testing.assert_array_equal(tensor, np.stack(order))


def test_a_tensor_does_not_share_memory_with_the_arrays():
  array = np.zeros([2, 100], np.float32)
  tensors = [
      joined_tensors.joined([array], array.shape),
      joined_tensors.stacked(array),
      joined_tensors.stacked([array]),
  ]
  array += 1
  for tensor in tensors:
    assert not np.any(tensor)


def test_a_tensor_keeps_its_memory():
  # So large that the memory would be given back at once.
  tensors = [
      joined_tensors.stacked([np.full([10**6], number, np.float32)])
      for number in range(5)
  ]
  sums = [float(tf.reduce_sum(tensor + 1)) for tensor in tensors]
  assert sums == [10**6 * (number + 1) for number in range(5)]


@pytest.mark.parametrize('size', [1, 3, 1000])
def test_a_tensor_begins_where_tensorflow_needs_it(size):
  for _ in range(10):
    tensor = joined_tensors.stacked([np.ones([size], np.float32)])
    assert np.asarray(tensor).ctypes.data % 64 == 0


def test_stacks_numbers():
  large = 2**40
  tensor = joined_tensors.stacked([large, large + 1])
  assert tensor.dtype == tf.int64
  assert tensor.numpy().tolist() == [large, large + 1]
  for dtype in (np.float32, np.float64, np.int64):
    tensor = joined_tensors.stacked([dtype(1), dtype(2)])
    assert tensor.dtype == dtype
    assert tensor.numpy().tolist() == [1, 2]


def test_stacks_tensors_with_arrays():
  tensor = joined_tensors.stacked([tf.constant([1.0]), np.float32([2.0])])
  np.testing.assert_array_equal(tensor, [[1.0], [2.0]])
