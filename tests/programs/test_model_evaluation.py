"""Tests for the data on which the models of a run are evaluated."""

import types

import keras
import pytest

from tff_bn.programs import model_evaluation


def _data(shape, num_classes):
  dataset = types.SimpleNamespace(name='mine', input_shape=shape, scaling=None)
  return types.SimpleNamespace(
      dataset=dataset,
      num_classes=num_classes,
      with_scaling=lambda numbers: ('scaled', numbers),
  )


def _check(data):
  """Checks data for a model of 4 numbers with 3 outputs."""
  keras_model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
  model_evaluation.check_data(
      types.SimpleNamespace(weights=lambda model: None),
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


def test_pixels_are_scaled_as_in_training():
  data = _data((4,), 3)
  for manifest in ({}, {'pixel_scaling': None}):
    saved = types.SimpleNamespace(manifest=manifest)
    assert model_evaluation.scale_as_in_training(saved, data) is data
  numbers = {'mean': [0.5], 'deviation': [0.25]}
  saved = types.SimpleNamespace(manifest={'pixel_scaling': numbers})
  text, found = model_evaluation.scale_as_in_training(saved, data)
  assert (text, found.to_json()) == ('scaled', numbers)


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
