"""Tests of what makes a dataset of arrays: shapes, classes and warnings.

test_arrays.py tests the checks that every `Dataset` makes.
"""

from absl import logging
import numpy as np
import pytest

from tff_bn.data import dataset as dataset_lib

GOOD = {
    'x_train': np.zeros((6, 4, 5, 3), np.uint8),
    'y_train': np.array([0, 1, 2, 0, 1, 2]),
    'x_test': np.zeros((2, 4, 5, 3), np.uint8),
    'y_test': np.array([2, 0]),
}


def create(num_classes=None, **changes):
  return dataset_lib.create_dataset(
      'mine.npz', **{**GOOD, **changes}, num_classes=num_classes
  )


def floats(*shape, dtype=np.float32):
  return np.zeros(shape, dtype)


def test_images_without_channel_axis_get_one():
  dataset = create(x_train=floats(6, 4, 5), x_test=floats(2, 4, 5))
  assert dataset.x_train.shape == (6, 4, 5, 1)
  assert dataset.x_test.shape == (2, 4, 5, 1)


def test_series_get_no_channel_axis():
  arrays = dict(GOOD, x_train=floats(6, 4, 5), x_test=floats(2, 4, 5))
  dataset = dataset_lib.create_dataset('mine.npz', **arrays, is_series=True)
  assert dataset.input_shape == (4, 5)


def test_vectors_are_kept():
  dataset = create(x_train=floats(6, 7), x_test=floats(2, 7))
  assert dataset.input_shape == (7,)


def test_given_number_of_classes():
  dataset = create(num_classes=10, y_test=np.array([9, 0]))
  assert dataset.num_classes == 10


@pytest.mark.parametrize(
    'changes,message',
    [
        ({'x_test': GOOD['x_test'][:0]}, 'x_test .*empty'),
        ({'y_train': GOOD['y_train'] - 1}, 'y_train has the negative label -1'),
        ({'y_test': np.array([0, 3])}, 'y_test has labels .*y_train: 3'),
        (
            {'y_train': GOOD['y_train'] * 2, 'y_test': np.array([3, 0])},
            'y_test has labels .*y_train: 3',
        ),
        ({'y_train': np.full(6, 2**40)}, 'y_train has the label 1099511627776'),
        (
            {'y_train': np.zeros(6, int), 'y_test': np.zeros(2, int)},
            'y_train has the label 0 only; .*at least two',
        ),
        (
            {'y_train': np.full(6, 4), 'y_test': np.full(2, 4)},
            'y_train has the label 4 only; .*at least two',
        ),
        (
            {'y_train': GOOD['y_train'] * 100, 'y_test': np.array([0, 200])},
            'y_train has 3 different labels from 0 to 200, which makes 201'
            ' classes for 6 samples; number the classes from 0 to 2,.*'
            r'np.unique\(y_train, return_inverse=True\)',
        ),
        ({'num_classes': 1}, 'has a single class; .*at least two'),
        (
            {'num_classes': 2},
            r'y_train has labels outside the 2 classes 0\.\.1: 2',
        ),
        (
            {'num_classes': 3, 'y_test': np.array([7, 0])},
            r'y_test has labels outside the 3 classes 0\.\.2: 7',
        ),
    ],
)
def test_invalid_arrays_are_errors(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    create(**changes)
  assert str(error.value).startswith('dataset=mine.npz')
  assert '\n' not in str(error.value)


@pytest.fixture
def warnings(monkeypatch):
  """The warnings that are logged."""
  found = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *args: found.append(text % args)
  )
  return found


@pytest.mark.parametrize(
    'shape, warns',
    [
        ((3, 32, 32), True),
        ((1, 8, 8), True),
        ((32, 32, 3), False),
        ((3, 3, 3), False),
        ((1, 64, 12), False),
        ((16, 16, 16), False),
    ],
)
def test_channels_first_are_warned_of(shape, warns, warnings):
  create(x_train=floats(6, *shape), x_test=floats(2, *shape))
  assert len(warnings) == warns
  if warns:
    assert 'np.moveaxis(x_train, 1, -1)' in warnings[0]
    assert 'x'.join(map(str, shape)) in warnings[0]


def test_labels_that_do_not_occur_are_named(warnings):
  create()
  assert not warnings
  labels = np.array([1, 4, 5, 1, 4, 5])
  dataset = create(y_train=labels, y_test=labels[:2])
  assert dataset.num_classes == 6
  assert warnings == [
      'dataset=mine.npz: no sample of y_train has one of the labels 0, 2, 3.'
      ' The model gets an output for each of the 6 classes 0..5. If these'
      ' labels are no classes, number the classes from 0 to 2, for example by'
      ' np.unique(y_train, return_inverse=True).'
  ]
