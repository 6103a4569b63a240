"""Tests of EMNIST, with synthetic data and without a network."""

import collections

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn import data as tff_bn_data


def client_data(writers):
  """Returns data in EMNIST's format from (pixel value, label) pairs."""
  return tff.simulation.datasets.TestClientData(
      {
          writer: collections.OrderedDict(
              label=np.array([label for _, label in samples], np.int32),
              pixels=np.array(
                  [np.full((28, 28), value) for value, _ in samples], np.float32
              ),
          )
          for writer, samples in writers.items()
      }
  )


def test_synthetic():
  dataset = tff_bn_data.load_dataset('emnist_synthetic')
  assert dataset.x_train.shape == (20, 28, 28, 1)
  assert dataset.x_train.dtype == np.float32
  assert dataset.num_classes == 10
  assert dataset.client_names == ('synthetic1', 'synthetic2')
  original = tff.simulation.datasets.emnist.get_synthetic()
  data = tff_bn_data.split_dataset(dataset, 'natural', None, 0)
  for name in dataset.client_names:
    own = data.train_indices[name]
    examples = list(
        original.create_tf_dataset_for_client(name).as_numpy_iterator()
    )
    np.testing.assert_array_equal(
        dataset.x_train[own, :, :, 0], [e['pixels'] for e in examples]
    )
    np.testing.assert_array_equal(
        dataset.y_train[own], [e['label'] for e in examples]
    )


@pytest.mark.parametrize(
    'name, only_digits, num_classes',
    [('emnist', True, 10), ('femnist', False, 62)],
)
def test_writers_are_the_clients_of_the_original_data(
    monkeypatch, tmp_path, name, only_digits, num_classes
):
  train = client_data({'ann': [(0.5, 1)], 'bob': [(0.25, 2), (0.75, 3)]})
  # In another order, because writers are matched by name.
  test = client_data({'bob': [(1, 3)], 'ann': [(0.125, 1), (0, 1)]})
  asked = []

  def load_data(only_digits, cache_dir):
    asked.append((only_digits, cache_dir))
    return train, test

  monkeypatch.setattr(tff.simulation.datasets.emnist, 'load_data', load_data)
  monkeypatch.setenv('HOME', str(tmp_path))
  dataset = tff_bn_data.load_dataset(name, data_dir='~/data')
  assert asked == [(only_digits, str(tmp_path / 'data'))]
  assert dataset.name == name
  assert dataset.client_names == ('ann', 'bob')
  np.testing.assert_array_equal(dataset.client_train, [0, 1, 1])
  np.testing.assert_array_equal(dataset.y_train, [1, 2, 3])
  np.testing.assert_array_equal(dataset.x_train[:, 3, 4, 0], [0.5, 0.25, 0.75])
  np.testing.assert_array_equal(dataset.client_test, [0, 0, 1])
  np.testing.assert_array_equal(dataset.x_test[:, 3, 4, 0], [0.125, 0, 1])
  assert dataset.num_classes == num_classes
  data = tff_bn_data.split_dataset(dataset, 'natural', None, 0)
  assert data.client_ids == ('ann', 'bob')


@pytest.mark.parametrize('name', ['emnist', 'femnist'])
def test_no_network(monkeypatch, name):
  def load_data(only_digits, cache_dir):
    raise OSError('no route to host')

  monkeypatch.setattr(tff.simulation.datasets.emnist, 'load_data', load_data)
  with pytest.raises(
      ValueError,
      match=rf'dataset={name} could not .*\(no route to host\).*`data_dir`',
  ):
    tff_bn_data.load_dataset(name)
