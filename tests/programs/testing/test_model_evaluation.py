"""Tests for the data on which the models of a run are evaluated."""

import dataclasses
import types

import keras
import numpy as np
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.catalog import tasks
from tff_bn.programs.testing import model_evaluation


def _data(shape, num_classes, task=tasks.CLASSIFICATION):
  dataset = types.SimpleNamespace(name='mine', input_shape=shape, scaling=None)
  return types.SimpleNamespace(
      dataset=dataset,
      task=task,
      num_outputs=num_classes,
      num_classes=num_classes,
      with_scaling=lambda numbers: ('scaled', numbers),
  )


def _check(data):
  """Checks data for a model of 4 numbers with 3 outputs."""
  keras_model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
  model_evaluation.check_data(
      types.SimpleNamespace(
          weights=lambda model: None, manifest={'num_outputs': 3}
      ),
      types.SimpleNamespace(to_keras=lambda weights: keras_model),
      data,
  )


def test_classes_and_shapes_that_fit():
  for num_classes in (2, 3):
    _check(_data((4,), num_classes))


@pytest.mark.parametrize(
    ('shape', 'num_classes', 'message'),
    [
        ((4,), 4, 'has 4 classes, but the model of the run has only 3 outputs'),
        ((5,), 3, r'has samples of shape \(5,\), which the model of the run'),
    ],
)
def test_data_that_does_not_fit(shape, num_classes, message):
  with pytest.raises(ValueError, match=f'^--dataset=mine {message}'):
    _check(_data(shape, num_classes))


@pytest.mark.parametrize('num_outputs', [2, 4])
def test_other_tasks_need_the_same_outputs(num_outputs):
  _check(_data((4,), 3, tasks.REGRESSION))
  with pytest.raises(
      ValueError, match=f'mine needs {num_outputs} outputs, but'
  ):
    _check(_data((4,), num_outputs, tasks.REGRESSION))


def test_pixels_are_scaled_as_in_training():
  data = _data((4,), 3)
  for manifest in ({}, {'pixel_scaling': None}):
    saved = types.SimpleNamespace(manifest=manifest)
    assert model_evaluation.scale_as_in_training(saved, data) is data
  numbers = {'mean': [0.5], 'deviation': [0.25]}
  saved = types.SimpleNamespace(manifest={'pixel_scaling': numbers})
  text, found = model_evaluation.scale_as_in_training(saved, data)
  assert (text, found.to_json()) == ('scaled', numbers)


@dataclasses.dataclass(frozen=True)
class _Settings:
  dataset: str
  split: str
  num_clients: int | None = 7


def _dataset(**groups):
  x, y = np.zeros((4, 2), np.float32), np.arange(4) % 2
  return tff_bn_data.Dataset('mine', x, y, x, y, 2, **groups)


@pytest.mark.parametrize('split', ['domains', 'natural'])
@pytest.mark.parametrize(
    ('name', 'client', 'expected', 'recorded'),
    [
        ('folder:/data/paris', None, 'paris', 'folder:/data/paris'),
        ('npz:/a/b.npz', 'rome', 'rome', 'domains:rome=npz:/a/b.npz'),
    ],
)
def test_data_without_origins_is_one_client(
    split, name, client, expected, recorded
):
  settings, dataset = model_evaluation.as_domains(
      _Settings(name, split), _dataset(), client
  )
  assert settings == _Settings(recorded, 'domains', None)
  data = tff_bn_data.split_dataset(dataset, 'domains', None, 0)
  assert data.client_ids == (expected,)
  for indices in (data.train_indices, data.test_indices):
    assert sorted(indices[expected]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ('split', 'groups'),
    [
        ('iid', {}),
        ('classes', {}),
        (
            'domains',
            dict(domain_train=np.zeros(4, np.int32), domain_names=('a', 'b')),
        ),
        (
            'natural',
            dict(client_train=np.zeros(4, np.int32), client_names=('a', 'b')),
        ),
    ],
)
def test_other_data_remains_as_it_is(split, groups):
  settings, dataset = _Settings('digits', split), _dataset(**groups)
  found = model_evaluation.as_domains(settings, dataset, None)
  assert found == (settings, dataset)


def test_a_named_client_has_all_domains_of_its_data():
  groups = dict(domain_train=np.arange(4) % 2, domain_names=('a', 'b'))
  _, dataset = model_evaluation.as_domains(
      _Settings('digits_domains', 'domains'), _dataset(**groups), 'rome'
  )
  assert dataset.domain_names == ('rome',)
  assert not dataset.domain_train.any() and not dataset.domain_test.any()


@pytest.mark.parametrize(
    ('manifest', 'expected'),
    [
        ({'num_classes': 2}, None),  # Of an earlier version.
        ({'num_classes': 3, 'class_names': []}, ('0', '1', '2')),
        ({'num_classes': 2, 'class_names': ['b', 'a']}, ('b', 'a')),
    ],
)
def test_classes_of_a_run(manifest, expected):
  saved = types.SimpleNamespace(manifest=manifest)
  assert model_evaluation.class_names(saved) == expected
