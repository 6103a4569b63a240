"""Tests for clients with shifted inputs."""

import dataclasses

import keras
import numpy as np
import parts
import pytest
import tensorflow as tf

from tff_bn import data as tff_bn_data
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import federated
from tff_bn.data import table_encoding


def _data(x, num_clients=4):
  y = np.arange(len(x)) % 3
  dataset = dataset_lib.create_dataset('x', x, y, x[:3] + 1, y[:3])
  return tff_bn_data.split_dataset(dataset, 'iid', num_clients, seed=0)


def test_the_first_clients_train_on_shifted_inputs():
  rng = np.random.default_rng(0)
  x = rng.normal([1, -5], size=(12, 2)).astype(np.float32)
  data = _data(x)
  shifted = tff_bn_data.with_shifted_inputs(data, 2, 0.75)
  assert shifted.client_ids == data.client_ids
  largest = x.max(axis=0)
  for number, client_id in enumerate(data.client_ids):
    samples = shifted.train_indices[client_id]
    np.testing.assert_array_equal(samples, data.train_indices[client_id])
    expected = x[samples]
    if number < 2:
      expected = 0.25 * expected + 0.75 * largest
    np.testing.assert_allclose(
        shifted.dataset.x_train[samples], expected, rtol=1e-6
    )
  # The original, labels and test data have not changed.
  np.testing.assert_array_equal(data.dataset.x_train, x)
  for name in ('y_train', 'x_test', 'y_test'):
    np.testing.assert_array_equal(
        getattr(shifted.dataset, name), getattr(data.dataset, name)
    )


def test_pictures_of_bytes_are_rounded():
  x = np.zeros((6, 2, 1, 2), np.uint8)
  x[:, 0, 0, 0] = [1, 2, 7, 5, 11, 3]
  x[:, 1, 0, 1] = 200
  shifted = tff_bn_data.with_shifted_inputs(_data(x, 1), 1, 0.25)
  found = shifted.dataset.x_train
  assert found.dtype == np.uint8
  # The channels have different largest values.
  np.testing.assert_array_equal(found[:, 0, 0, 0], [4, 4, 8, 6, 11, 5])
  np.testing.assert_array_equal(found[:, 1, 0, 1], 200)
  np.testing.assert_array_equal(found[:, 0, 0, 1], 50)


def test_training_stays_the_same_but_the_running_statistics_move():
  """Batch normalization undoes the shift behind a dense layer."""
  rng = np.random.default_rng(1)
  x = rng.normal(size=(8, 5))
  dense = keras.layers.Dense(3, dtype='float64')
  norm = keras.layers.BatchNormalization(epsilon=1e-12, dtype='float64')
  targets = rng.normal(size=(8, 3))

  def step(inputs):
    with tf.GradientTape() as tape:
      output = norm(dense(inputs), training=True)
      loss = tf.reduce_sum((output - targets) ** 2)
    variables = dense.trainable_weights + norm.trainable_weights
    return output, tape.gradient(loss, variables), norm.moving_mean.numpy()

  keras.utils.set_random_seed(0)
  plain = step(x)
  norm.moving_mean.assign(tf.zeros(3))
  data = _data(x.astype(np.float32), 1)
  shifted = tff_bn_data.with_shifted_inputs(data, 1, 0.9).dataset.x_train
  moved = step(shifted.astype(float))
  np.testing.assert_allclose(moved[0], plain[0], atol=1e-4)
  for a, b in zip(moved[1], plain[1], strict=True):
    np.testing.assert_allclose(a, b, atol=1e-3)
  assert np.abs(moved[2] - plain[2]).max() > 0.005


def test_it_has_no_recipe():
  data = dataclasses.replace(_data(parts.numbered().x_train), recipe='{}')
  shifted = tff_bn_data.with_shifted_inputs(data, 1)
  assert shifted.recipe is None
  assert shifted.fingerprint() != data.fingerprint()
  none = tff_bn_data.with_shifted_inputs(data, 0)
  np.testing.assert_array_equal(none.dataset.x_train, data.dataset.x_train)


def test_wrong_arguments():
  data = _data(parts.numbered().x_train)
  for share in (0, 1):
    with pytest.raises(ValueError, match=f'share={share} must be a number, gr'):
      tff_bn_data.with_shifted_inputs(data, 1, share)
  with pytest.raises(ValueError, match='num_attackers=5 .* clients, 4'):
    tff_bn_data.with_shifted_inputs(data, 5)
  with pytest.raises(TypeError, match='data must be tff_bn.data.FederatedData'):
    tff_bn_data.with_shifted_inputs(data.dataset, 1)
  indices = {'a': np.array([0, 3]), 'b': np.array([1, 3])}
  none = {name: np.array([], int) for name in indices}
  shared = federated.FederatedData(data.dataset, indices, none)
  with pytest.raises(ValueError, match='1 samples .*shifting inputs needs'):
    tff_bn_data.with_shifted_inputs(shared, 1)


def test_numbers_of_categories_cannot_be_shifted(monkeypatch):
  data = _data(parts.numbered().x_train)
  table = table_encoding.TableEncoding(
      columns=(table_encoding.Column('color', ('blue', 'red'), None, True),)
  )
  object.__setattr__(data.dataset, 'table', table)
  with pytest.raises(ValueError, match='dataset=x has numbers of categories'):
    tff_bn_data.with_shifted_inputs(data, 1)
