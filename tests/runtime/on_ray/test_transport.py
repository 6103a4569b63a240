"""Tests of the serialization for other processes."""

import pickle

import numpy as np
import pytest
import tensorflow as tf

from tff_bn import runtime
from tff_bn.runtime import client_dataset
from tff_bn.runtime.on_ray import transport

_LARGE = np.arange(5000.0)
_SMALL = np.arange(5.0)


class _Store:
  """A fake of Ray's object store."""

  def __init__(self):
    self.arrays = []

  def put(self, array):
    self.arrays.append(array.copy())
    return len(self.arrays) - 1

  def get(self, references):
    return [self.arrays[reference] for reference in references]


class _Slices(runtime.ClientDataset):
  """A dataset that holds two arrays."""

  def __init__(self, x, y):
    self.x = x
    self.y = y

  @property
  def element_spec(self):
    return tf.TensorSpec([], tf.float64)

  def build(self):
    dataset = tf.data.Dataset.from_tensor_slices(self.x)
    return client_dataset.to_variant(dataset)


@pytest.fixture
def store():
  return _Store()


@pytest.fixture
def sender(store):
  return transport.Sender(store.put)


def _received(store, packed):
  """Returns the value as another process unpacks it."""
  return transport.unpack(pickle.loads(pickle.dumps(packed)), store.get)


def _elements(dataset):
  used = tf.data.experimental.from_variant(
      dataset.build(), dataset.element_spec
  )
  return [x.tolist() for x in used.as_numpy_iterator()]


def test_large_arrays_are_stored_once(store, sender):
  parcels = [sender.pack(_Slices(_LARGE, _SMALL)) for _ in range(3)]
  assert [array.shape for array in store.arrays] == [_LARGE.shape]
  for parcel in parcels:
    assert len(parcel.data) < 1000
    received = _received(store, parcel)
    np.testing.assert_array_equal(received.x, _LARGE)
    np.testing.assert_array_equal(received.y, _SMALL)


def test_deleted_array_is_not_mistaken_for_a_new_one(store, sender):
  # A new array may have the address of a deleted one.
  for number in range(20):
    array = np.full(5000, float(number))
    received = _received(store, sender.pack(_Slices(array, _SMALL)))
    assert received.x[0] == number
    del array, received


def test_arrays_of_objects_are_not_stored(store, sender):
  array = np.array(['a'] * 5000, dtype=object)
  received = _received(store, sender.pack(_Slices(array, _SMALL)))
  assert not store.arrays
  assert received.x.tolist() == array.tolist()


def test_dataset_is_stored_once(store, sender):
  dataset = tf.data.Dataset.from_tensor_slices(_LARGE).map(lambda x: 2 * x)
  parcels = [sender.pack(dataset) for _ in range(3)]
  assert len(store.arrays) == 1
  for parcel in parcels:
    assert _elements(_received(store, parcel)) == (2 * _LARGE).tolist()


def test_batches_of_several_clients_are_stored_once(store, sender):
  datasets = [
      tf.data.Dataset.from_tensor_slices((_LARGE + n, _LARGE[::-1])).batch(2000)
      for n in range(2)
  ]
  for _ in range(2):
    parcel = sender.pack_several(datasets)
    assert len(store.arrays) == 4
    assert len(parcel.data) < 1000
    for n, arrays in enumerate(_received(store, parcel)):
      assert arrays.sizes.tolist() == [2000, 2000, 1000]
      x, y = arrays.load()
      np.testing.assert_array_equal(x, _LARGE + n)
      np.testing.assert_array_equal(y, _LARGE[::-1])


def test_several_clients_share_arrays(store, sender):
  parcel = sender.pack_several([_Slices(_LARGE, _SMALL + n) for n in range(3)])
  assert len(store.arrays) == len(parcel.stored) == 1
  received = _received(store, parcel)
  for n, dataset in enumerate(received):
    assert dataset.x is received[0].x
    assert dataset.y.tolist() == (_SMALL + n).tolist()


@pytest.mark.parametrize(
    'values',
    [
        [np.int64(5), np.int64(1)],
        [np.float32([1.5, 2.5]), tf.constant([3.5, 4.5])],
        [tf.constant([b'a']), np.array([b'b\0c'], object)],
    ],
)
def test_values_of_several_clients_are_stacked(sender, values):
  packed = sender.pack_several(values)
  assert isinstance(packed, np.ndarray)
  assert packed.dtype == np.asarray(values[1]).dtype
  assert packed.tolist() == [np.asarray(value).tolist() for value in values]


def test_tensors_and_other_values(sender):
  packed = sender.pack(tf.constant([1.0, 2.0]))
  assert isinstance(packed, np.ndarray)
  assert transport.unpack(packed, None) is packed
  assert sender.pack('text') == 'text'


@pytest.mark.parametrize(
    'dataset',
    [
        tf.data.Dataset.from_generator(
            lambda: iter([1.0]), output_signature=tf.TensorSpec([], tf.float32)
        ),
        tf.data.Dataset.range(3).map(
            lambda x: tf.numpy_function(lambda a: a, [x], tf.int64)
        ),
        tf.data.Dataset.range(3).map(
            lambda x: tf.py_function(lambda a: a, [x], tf.int64)
        ),
    ],
    ids=['generator', 'numpy', 'python'],
)
def test_dataset_with_a_python_function_is_refused(sender, dataset):
  with pytest.raises(ValueError, match='calls a Python function.*this process'):
    sender.pack(dataset)
