"""Tests for clients with flipped labels."""

import dataclasses

import numpy as np
import parts
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.data import federated


def _split(num_clients=4):
  """Samples that are their own positions, with class position mod 5."""
  dataset = parts.numbered(43, 20, num_classes=5)
  return tff_bn_data.split_dataset(
      dataset, 'classes', num_clients, 0, classes_per_client=3
  )


def test_flip_labels():
  labels = np.array([[0, 1, 9], [5, 4, 9]], np.int32)
  flipped = tff_bn_data.flip_labels(labels, 10)
  np.testing.assert_array_equal(flipped, [[9, 8, 0], [4, 5, 0]])
  assert flipped.dtype == np.int32
  np.testing.assert_array_equal(
      tff_bn_data.flip_labels(np.array([0, 1, 2], np.uint8), 3), [2, 1, 0]
  )


def _labels_by_sample(data, client_id):
  batches = data.client_dataset(
      [client_id], seed=0, round_num=1, batch_size=4, local_epochs=1
  )
  return {
      int(sample): int(label)
      for x, y in batches.as_numpy_iterator()
      for sample, label in zip(x[:, 0], y)
  }


def test_the_first_clients_train_on_flipped_labels():
  data = _split()
  flipped = tff_bn_data.with_flipped_labels(data, 2)
  assert flipped.client_ids == data.client_ids
  for number, client_id in enumerate(data.client_ids):
    labels = _labels_by_sample(flipped, client_id)
    np.testing.assert_array_equal(sorted(labels), data.train_indices[client_id])
    for sample, label in labels.items():
      assert label == (4 - sample % 5 if number < 2 else sample % 5)
  # The original has not changed.
  np.testing.assert_array_equal(data.dataset.y_train, np.arange(43) % 5)
  assert flipped.element_spec == data.element_spec


def test_test_labels_are_not_flipped():
  data = _split()
  flipped = tff_bn_data.with_flipped_labels(data, 2)
  for client_id in data.client_ids:
    assert data.test_indices[client_id].size
    for x, y in flipped.client_test_dataset(client_id, 4).as_numpy_iterator():
      np.testing.assert_array_equal(y, x[:, 0] % 5)
  np.testing.assert_array_equal(flipped.dataset.y_test, np.arange(20) % 5)


def test_label_distribution_counts_flipped_labels():
  data = _split()
  flipped = tff_bn_data.with_flipped_labels(data, 3)
  counts = data.label_distribution()
  np.testing.assert_array_equal(
      flipped.label_distribution(),
      np.concatenate([counts[:3, ::-1], counts[3:]]),
  )


def test_flipped_data_has_no_recipe():
  data = dataclasses.replace(_split(), recipe='{}')
  flipped = tff_bn_data.with_flipped_labels(data, 1)
  assert flipped.recipe is None
  assert flipped.fingerprint() != data.fingerprint()


def test_none_and_all():
  data = _split()
  none = tff_bn_data.with_flipped_labels(data, 0)
  assert none.fingerprint() == data.fingerprint()
  everyone = tff_bn_data.with_flipped_labels(data, 4)
  np.testing.assert_array_equal(
      everyone.label_distribution(), data.label_distribution()[:, ::-1]
  )
  again = tff_bn_data.with_flipped_labels(everyone, 4)
  assert again.fingerprint() == data.fingerprint()


@pytest.mark.parametrize('num_clients', [-1, 5])
def test_wrong_number_of_clients(num_clients):
  with pytest.raises(
      ValueError, match=f'num_attackers={num_clients} .* clients, 4'
  ):
    tff_bn_data.with_flipped_labels(_split(), num_clients)


def test_shared_samples_are_an_error():
  indices = {'a': np.array([0, 3]), 'b': np.array([1, 3]), 'c': np.array([2])}
  none = {name: np.array([], int) for name in indices}
  data = federated.FederatedData(_split().dataset, indices, none)
  with pytest.raises(
      ValueError, match='1 samples of the attackers.*position 3'
  ):
    tff_bn_data.with_flipped_labels(data, 1)
  # Among attackers it does not matter, and each label is flipped once.
  flipped = tff_bn_data.with_flipped_labels(data, 2)
  np.testing.assert_array_equal(flipped.dataset.y_train[:4], [4, 3, 2, 1])
