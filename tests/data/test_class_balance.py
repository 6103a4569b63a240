"""Tests of clients whose classes are made equally frequent."""

import numpy as np
import parts as parts_lib
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.data import class_balance


def _data(train, **arguments):
  test = {client: [] for client in train}
  return tff_bn_data.FederatedData(parts_lib.numbered(**arguments), train, test)


def test_each_class_is_equally_frequent():
  # The label of a sample is its position modulo 4.
  data = _data({'a': [0, 4, 8, 12, 16, 1, 5, 2], 'b': [3, 7, 1]})
  balanced = tff_bn_data.with_balanced_classes(data, seed=0)
  found = balanced.train_indices
  assert np.bincount(found['a'] % 4).tolist() == [5, 5, 5]
  # Each sample is repeated as often as possible.
  assert sorted(found['a'][found['a'] % 4 == 0]) == [0, 4, 8, 12, 16]
  assert sorted(np.bincount(found['a'])[[1, 5]]) == [2, 3]
  # A class that is missing stays so.
  assert sorted(found['b']) == [1, 1, 3, 7]
  assert balanced.test_indices.keys() == data.test_indices.keys()


def test_seed_chooses_the_rest():
  data = _data({'a': [*range(0, 28, 4), 1, 5, 9, 13, 17]})
  first, again, *others = (
      tff_bn_data.with_balanced_classes(data, seed).train_indices['a'].tolist()
      for seed in (0, 0, 1, 2, 3)
  )
  assert first == again
  assert any(other != first for other in others)


def test_counts_of_classes():
  data = _data({'a': [0, 4, 8, 1]})
  assert class_balance.class_counts(data, 'a').tolist() == [3, 1, 0, 0]
  with pytest.raises(ValueError, match="no client 'b'"):
    class_balance.class_counts(data, 'b')


def test_other_tasks_have_no_classes_to_balance():
  dataset = tff_bn_data.load_dataset('diabetes')
  data = tff_bn_data.split_dataset(dataset, 'iid', 2, 0)
  with pytest.raises(ValueError, match='task of dataset=diabetes is regressi'):
    tff_bn_data.with_balanced_classes(data, 0)
