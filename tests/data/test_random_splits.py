"""Every split of the catalog on random datasets."""

import re

import hypothesis
from hypothesis import strategies as st
import numpy as np
import parts as parts_lib
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.catalog import value_types
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import splits

# Sizes of the data and of the split, as errors name them.
_NAMES = ('num_clients', 'split', 'seed', *splits.PARAMETERS)


@st.composite
def _datasets(draw):
  """A dataset with domains and natural clients, and few samples."""
  num_classes = draw(st.integers(2, 5))
  labels = draw(st.lists(st.integers(0, num_classes - 1), max_size=40))
  # A dataset has at least one sample of each class and of each domain.
  labels = np.array([*range(num_classes), *labels])
  num_train, num_test = len(labels), draw(st.integers(1, 20))
  rng = np.random.default_rng(draw(st.integers(0, 9)))
  num_domains = draw(st.integers(1, min(3, num_train)))
  domains = [rng.integers(num_domains, size=n) for n in (num_train, num_test)]
  domains[0][:num_domains] = np.arange(num_domains)
  num_natural = draw(st.integers(1, 6))
  clients = [rng.integers(num_natural, size=n) for n in (num_train, num_test)]
  return dataset_lib.create_dataset(
      'random',
      np.arange(num_train, dtype=np.float32)[:, np.newaxis],
      labels,
      np.arange(num_test, dtype=np.float32)[:, np.newaxis],
      rng.integers(num_classes, size=num_test),
      domain_train=domains[0],
      domain_test=domains[1],
      domain_names=tuple(f'domain_{n}' for n in range(num_domains)),
      client_train=clients[0],
      client_test=clients[1],
      client_names=tuple(f'writer_{n}' for n in range(num_natural)),
  )


def _parameter(option):
  values = option.values
  if isinstance(values, value_types.Choice):
    return st.sampled_from(sorted(values.known))
  if values.number_type is int:
    return st.integers(1, 12)
  return st.floats(
      values.minimum or 0,
      values.maximum if values.maximum == 1 else 50,
      exclude_min=values.above is not None,
      width=32,
  )


@pytest.mark.parametrize('name', splits.SPLITS)
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
@hypothesis.given(
    dataset=_datasets(),
    num_clients=st.one_of(st.none(), st.integers(-1, 60)),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_split_is_as_documented_or_an_error_says_why(
    name, dataset, num_clients, seed, data
):
  parameters = {
      option.name: data.draw(st.one_of(st.none(), _parameter(option)))
      for option in splits.SPLITS[name].options
  }

  def split(seed):
    return tff_bn_data.split_dataset(
        dataset, name, num_clients, seed, **parameters
    )

  try:
    found = split(seed)
  except ValueError as error:
    message = str(error)
    assert re.search(rf'\b({"|".join(_NAMES)})=', message), message
    assert re.search(r'\b(use|must be|needs)\b', message), message
    return
  ids = found.client_ids
  if num_clients is not None:
    assert len(ids) == num_clients
  assert len(set(ids)) == len(ids)
  for indices, num_samples in (
      (found.train_indices, len(dataset.y_train)),
      (found.test_indices, len(dataset.y_test)),
  ):
    assert tuple(indices) == ids
    for part in indices.values():
      assert (np.diff(part) > 0).all()
      assert not part.size or (part[0] >= 0 and part[-1] < num_samples)
  parts = [found.train_indices[client] for client in ids]
  assert all(part.size for part in parts)
  _check_training_samples(name, dataset, parts, parameters)
  again = split(seed)
  for indices, same in (
      (found.train_indices, again.train_indices),
      (found.test_indices, again.test_indices),
  ):
    for client in ids:
      np.testing.assert_array_equal(indices[client], same[client])


def _check_training_samples(name, dataset, parts, parameters):
  """What the documentation of each split says."""
  num_samples = len(dataset.y_train)
  if parameters.get('samples_per_client') is not None:
    assert {len(p) for p in parts} == {parameters['samples_per_client']}
    return
  everything = np.concatenate(parts)
  assert len(np.unique(everything)) == len(everything)
  if name == 'classes':
    assert len({len(part) for part in parts}) == 1
    wanted = parameters['classes_per_client'] or 1
    for part in parts:
      counts = np.bincount(dataset.y_train[part])
      assert np.count_nonzero(counts) == wanted
      assert len(set(counts[counts > 0])) == 1
    return
  if name == 'natural':
    for part in parts:
      (client,) = set(dataset.client_train[part])
      np.testing.assert_array_equal(
          part, np.flatnonzero(dataset.client_train == client)
      )
    return
  parts_lib.assert_cover(parts, num_samples)
  if name == 'domains':
    assert all(len(set(dataset.domain_train[part])) == 1 for part in parts)
  if name in ('iid', 'gamma') or parameters.get('dirichlet_by') == 'client':
    assert np.ptp([len(part) for part in parts]) <= 1
