"""Tests of the batches of datasets as arrays."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tff_bn import data
from tff_bn.common import batch_arrays
from tff_bn.data import augmentation

_X = np.arange(20, dtype=np.float32).reshape([10, 2])
_Y = np.arange(10, dtype=np.int32)


def _slices():
  return tf.data.Dataset.from_tensor_slices((_X, _Y))


# Whose leaves, depth first, are not in the order of TensorFlow's tensors.
def _dictionary():
  x = collections.OrderedDict(b=_X, a=_X[:, 0])
  return tf.data.Dataset.from_tensor_slices((x, _Y)).batch(4)


def _round():
  federated = data.from_clients({'a': (_X[:, :, None, None], _Y % 2)})
  return federated.client_dataset(
      ['a'], seed=0, round_num=1, batch_size=3, local_epochs=2
  )


_KNOWN = dict(
    batch=lambda: _slices().batch(4),
    equal_batches=lambda: _slices().batch(5),
    drop_remainder=lambda: _slices().batch(4, drop_remainder=True),
    one_batch=lambda: tf.data.Dataset.from_tensors((_X, _Y)),
    slices_of_batches=lambda: tf.data.Dataset.from_tensor_slices(
        (_X.reshape([5, 2, 2]), _Y.reshape([5, 2]))
    ),
    take=lambda: _slices().batch(4).take(2),
    take_more=lambda: _slices().batch(4).take(7),
    take_all=lambda: _slices().batch(4).take(-1),
    take_none=lambda: _slices().batch(4).take(0),
    prefetch=lambda: _slices().batch(4).prefetch(1),
    options=lambda: _slices().batch(4).with_options(tf.data.Options()),
    empty=lambda: tf.data.Dataset.from_tensor_slices((_X[:0], _Y[:0])).batch(4),
    dictionary=_dictionary,
    round=_round,
    part_of_round=lambda: _round().take(3),
)
_UNKNOWN = dict(
    shuffle=lambda: _slices().shuffle(3).batch(4),
    shuffled_batches=lambda: _slices().batch(4).shuffle(3),
    map=lambda: _slices().batch(4).map(lambda x, y: (2 * x, y)),
    mapped_samples=lambda: _slices().map(lambda x, y: (2 * x, y)).batch(4),
    endless=lambda: _slices().batch(4).repeat(),
    taken_of_endless=lambda: _slices().batch(4).repeat().take(3),
    cache=lambda: _slices().batch(4).cache(),
    generator=lambda: tf.data.Dataset.from_generator(
        lambda: iter([(_X, _Y)]),
        output_signature=_slices().batch(4).element_spec,
    ),
    scalars=lambda: tf.data.Dataset.from_tensors(1.0),
    samples=lambda: tf.data.Dataset.from_tensor_slices(_Y),
    ragged=lambda: tf.data.Dataset.from_tensor_slices(
        tf.ragged.constant([[1], [2, 3]])
    ).batch(2),
)


@pytest.mark.parametrize('name', _KNOWN)
def test_are_what_reading_gives(name):
  dataset = _KNOWN[name]()
  arrays = batch_arrays.of_dataset(dataset)
  batches = list(dataset)
  order = batch_arrays.leaf_order(dataset.element_spec)
  rows = [tf.nest.flatten(batch) for batch in batches]
  assert arrays.sizes.dtype == np.int64
  np.testing.assert_array_equal(arrays.sizes, [len(row[0]) for row in rows])
  loaded = arrays.load()
  assert len(loaded) == len(order)
  for place, found in zip(order, loaded):
    assert found.dtype == tf.nest.flatten(dataset.element_spec)[place].dtype
    if batches:
      expected = np.concatenate([row[place] for row in rows])
      np.testing.assert_array_equal(found, expected)
    else:
      assert not len(found)


@pytest.mark.parametrize('name', _UNKNOWN)
def test_are_unknown_if_reading_could_give_others(name):
  assert batch_arrays.of_dataset(_UNKNOWN[name]()) is None


def test_leaves_are_depth_first():
  samples = batch_arrays.of_dataset(_dictionary()).load()
  assert [array.ndim for array in samples] == [2, 1, 1]


def test_transformed_images_are_unknown():
  x = np.zeros([4, 8, 8, 1], np.float32)
  federated = dataclasses.replace(
      data.from_clients({'a': (x, np.arange(4) % 2)}),
      augmentation=next(a for a in augmentation.AUGMENTATIONS if a != 'none'),
  )
  dataset = federated.client_dataset(
      ['a'], seed=0, round_num=0, batch_size=2, local_epochs=1
  )
  assert batch_arrays.of_dataset(dataset) is None
