"""Tests of data that is divided into clients already."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tff_bn import data

_RNG = np.random.default_rng(0)
# Three clients: one has a single class, one a single sample, one no test data.
_TRAIN = {
    'north': (_RNG.normal(size=(5, 4)), np.array([0, 1, 2, 1, 0])),
    'a/../south': (_RNG.normal(size=(3, 4)), np.array([1, 1, 1])),
    'west': (_RNG.normal(size=(1, 4)), np.array([2])),
}
_TEST = {
    'west': (_RNG.normal(size=(2, 4)), np.array([2, 0])),
    'north': (_RNG.normal(size=(1, 4)), np.array([1])),
}


def _samples(federated, client):
  dataset = federated.client_dataset(
      [client], seed=0, round_num=0, batch_size=100, local_epochs=1
  )
  ((x, y),) = dataset.as_numpy_iterator()
  return sorted(zip(x[:, 0].tolist(), y.tolist()))


def _expected(x, y):
  return sorted(zip(x[:, 0].astype(np.float32).tolist(), y.tolist()))


def _check(federated):
  assert federated.client_ids == tuple(_TRAIN)
  assert (federated.task, federated.num_classes) == ('classification', 3)
  for client, (x, y) in _TRAIN.items():
    assert _samples(federated, client) == _expected(x, y)
    test = [*federated.client_test_dataset(client, 10).as_numpy_iterator()]
    if client in _TEST:
      ((x, y),) = test
      np.testing.assert_allclose(x, _TEST[client][0], rtol=1e-6)
      np.testing.assert_array_equal(y, _TEST[client][1])
    else:
      assert not test
  np.testing.assert_array_equal(
      federated.label_distribution(), [[2, 2, 1], [0, 3, 0], [0, 0, 1]]
  )
  # The same clients, by the split that takes them.
  natural = data.split_dataset(federated.dataset, 'natural', None, seed=0)
  assert natural.fingerprint() == federated.fingerprint()


def test_arrays():
  _check(data.from_clients(_TRAIN, _TEST))


def test_without_test_data():
  federated = data.from_clients(_TRAIN)
  assert not len(federated.dataset.y_test)
  empty = data.from_clients(_TRAIN, {'west': ([], [])})
  assert empty.fingerprint() == federated.fingerprint()


def _datasets(clients, change):
  return {
      name: change(tf.data.Dataset.from_tensor_slices(pair))
      for name, pair in clients.items()
  }


@pytest.mark.parametrize('batch_size', [None, 2])
def test_tf_data(batch_size):
  def change(dataset):
    return dataset if batch_size is None else dataset.batch(batch_size)

  _check(
      data.from_datasets(_datasets(_TRAIN, change), _datasets(_TEST, change))
  )


def test_names_of_classes_and_the_task():
  clients = {'a': (np.eye(2), [0, 1]), 'b': (np.ones((1, 2)), [1])}
  named = data.from_clients(clients, num_classes=3, class_names=('x', 'y', 'z'))
  assert (named.num_classes, named.class_names) == (3, ('x', 'y', 'z'))
  assert data.from_clients(clients, task='regression').task == 'regression'


def test_thousands_of_clients():
  clients = {f'c{n}': (np.full((1, 2), n), [n % 2]) for n in range(5000)}
  federated = data.from_clients(clients, clients)
  assert _samples(federated, 'c4321') == [(4321, 1)]
  np.testing.assert_array_equal(federated.test_indices['c4321'], [4321])


@pytest.mark.parametrize(
    ('train', 'test', 'message'),
    [
        ([1], None, 'train must map the id of each client .* is a list'),
        ({}, None, 'train has no samples of any client'),
        (
            {'a': np.ones((2, 2))},
            None,
            r"train\['a'\] must be a pair .*ndarray",
        ),
        ({3: ([[1.0]], [0])}, None, "client ids are strings, such as '3'"),
        (
            {'a': ([[1.0]], [0]), 'b': ([], [])},
            None,
            "train has no samples of the client 'b'",
        ),
        (
            {'a': ([[1.0], [2.0]], [0])},
            None,
            r"train\['a'\]: x has the shape \(2, 1\) and y \(1,\)",
        ),
        (
            {'a': ([[1.0]], [0]), 'b': ([[1.0, 2.0]], [0])},
            None,
            r"train\['b'\]: x .* shape \(2,\), but train\['a'\] has .*\(1,\)",
        ),
        (
            {'a': ([[1.0]], [0])},
            {'a': (np.ones((1, 1), np.uint8), [0])},
            r"test\['a'\]: x has the dtype uint8 .*, but train\['a'\] has",
        ),
        (
            {'a': ([[1.0]], [0])},
            {'b': ([[1.0]], [0])},
            "test has the client 'b', which train lacks",
        ),
        (
            {'a': ([[1.0], [np.nan]], [0, 1])},
            None,
            'x_train has 1 values that are NaN',
        ),
        (
            {'a': ([[1.0, 2.0], [3.0]], [0, 1])},
            None,
            r"train\['a'\]: x is no arr",
        ),
    ],
)
def test_wrong_arrays(train, test, message):
  with pytest.raises((TypeError, ValueError), match=message):
    data.from_clients(train, test)


@pytest.mark.parametrize(
    ('dataset', 'message'),
    [
        (np.ones((2, 2)), 'must be a tf.data.Dataset of pairs .* is a ndarray'),
        (
            tf.data.Dataset.from_tensors({'image': [1.0], 'label': 0}),
            'must be a tf.data.Dataset of pairs .* has elements {',
        ),
        (
            tf.data.Dataset.from_tensors(([1.0], 0)).repeat(),
            re.escape('does not end; remove repeat()'),
        ),
        (
            tf.data.Dataset.from_generator(
                lambda: iter([([1.0], 0), ([1.0, 2.0], 1)]),
                output_signature=(
                    tf.TensorSpec((None,)),
                    tf.TensorSpec((), tf.int32),
                ),
            ),
            'have different shapes',
        ),
    ],
)
def test_wrong_tf_data(dataset, message):
  with pytest.raises(
      (TypeError, ValueError), match=r"train\['a'\].*" + message
  ):
    data.from_datasets({'a': dataset})


def test_tf_data_without_samples():
  dataset = tf.data.Dataset.from_tensors(([1.0], 0))
  with pytest.raises(ValueError, match="no samples of the client 'b'"):
    data.from_datasets({'a': dataset, 'b': dataset.take(0)})
