"""Tests of random data."""

import numpy as np
import pytest
from sklearn import neighbors

from tff_bn import data as tff_bn_data


@pytest.mark.parametrize(
    'name, shape, num_classes, num_train, num_test',
    [
        ('generated:6x5x3:4', (6, 5, 3), 4, 200, 100),
        ('generated:20:10:70:33', (20,), 10, 70, 33),
    ],
)
def test_generated(name, shape, num_classes, num_train, num_test):
  dataset = tff_bn_data.load_dataset(name)
  assert dataset.x_train.shape == (num_train, *shape)
  assert dataset.x_test.shape == (num_test, *shape)
  assert dataset.num_classes == num_classes
  for x, y in (
      (dataset.x_train, dataset.y_train),
      (dataset.x_test, dataset.y_test),
  ):
    assert x.dtype == np.float32
    assert (x.min(), x.max()) == (0, 1)
    counts = np.bincount(y, minlength=num_classes)
    assert counts.max() - counts.min() <= 1
  assert (np.diff(dataset.y_train) < 0).any()  # It is shuffled.


def test_can_be_learned():
  dataset = tff_bn_data.load_dataset('generated:8x8x1:10')
  model = neighbors.NearestCentroid().fit(
      dataset.x_train.reshape(200, -1), dataset.y_train
  )
  assert model.score(dataset.x_test.reshape(100, -1), dataset.y_test) > 0.95
  # A single pixel says little.
  model.fit(dataset.x_train[:, 0, 0], dataset.y_train)
  assert model.score(dataset.x_test[:, 0, 0], dataset.y_test) < 0.5


def test_is_resized():
  dataset = tff_bn_data.load_dataset('generated:8x8x1:10', image_size=(4, 6))
  assert dataset.input_shape == (4, 6, 1)


@pytest.mark.parametrize(
    'name', ['99999x99999x3:10', '4:1000000000000', f'{"9" * 400}:10']
)
def test_data_larger_than_memory(name):
  with pytest.raises(
      ValueError, match=f'^dataset=generated:{name} is too large: .* GB of mem'
  ):
    tff_bn_data.load_dataset(f'generated:{name}')
