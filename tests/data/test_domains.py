"""Tests of several datasets as the domains of one."""

import numpy as np
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import domains
from tff_bn.data import tfds_source


def make(x_train, num_test=3, num_classes=3, **attributes):
  """Returns a dataset whose test samples are its first training samples."""
  y = np.arange(len(x_train)) % num_classes
  return dataset_lib.create_dataset(
      'part',
      x_train,
      y,
      x_train[:num_test],
      y[:num_test],
      num_classes,
      **attributes,
  )


def join(**datasets):
  name = 'domains:' + ','.join(f'{domain}={domain}' for domain in datasets)
  return domains.join_domains(name, datasets)


@pytest.fixture
def rng():
  return np.random.default_rng(0)


def test_series_stay_series(rng):
  series = rng.random((6, 9, 2), np.float32)
  parts = {
      name: tff_bn_data.Dataset(
          name, x, np.arange(6) % 2, x[:2], [0, 1], num_classes=2
      )
      for name, x in (('a', series), ('b', series + 1))
  }
  dataset = join(**parts)
  np.testing.assert_array_equal(
      dataset.x_train, np.concatenate([series, series + 1])
  )


def test_datasets_side_by_side(rng):
  grey = rng.integers(0, 256, (6, 4, 5, 1), np.uint8)
  color = rng.integers(0, 256, (9, 4, 5, 3), np.uint8)
  dataset = join(grey=make(grey), color=make(color, num_test=4))
  assert dataset.domain_names == ('grey', 'color')
  assert dataset.num_classes == 3
  assert dataset.x_train.dtype == np.uint8
  np.testing.assert_array_equal(dataset.domain_train, [0] * 6 + [1] * 9)
  np.testing.assert_array_equal(dataset.domain_test, [0] * 3 + [1] * 4)
  for channel in range(3):
    np.testing.assert_array_equal(
        dataset.x_train[:6, :, :, channel], grey[..., 0]
    )
  np.testing.assert_array_equal(dataset.x_train[6:], color)
  np.testing.assert_array_equal(dataset.x_test[3:], color[:4])
  np.testing.assert_array_equal(dataset.y_train[6:], np.arange(9) % 3)


def test_grey_images_stay_grey(rng):
  grey = rng.integers(0, 256, (6, 4, 5, 1), np.uint8)
  assert join(a=make(grey), b=make(grey)).input_shape == (4, 5, 1)


def test_bytes_are_scaled_beside_floats(rng):
  bytes_ = rng.integers(0, 256, (6, 4, 5, 1), np.uint8)
  floats = rng.random((6, 4, 5, 1), np.float32)
  dataset = join(a=make(bytes_), b=make(floats))
  np.testing.assert_array_equal(
      dataset.x_train, np.concatenate([bytes_ / np.float32(255), floats])
  )
  np.testing.assert_array_equal(dataset.x_test[:3], dataset.x_train[:3])


def test_vectors(rng):
  a, b = rng.random((2, 6, 4))
  dataset = join(a=make(a), b=make(b))
  np.testing.assert_array_equal(
      dataset.x_train, np.concatenate([a, b]).astype(np.float32)
  )


@pytest.mark.parametrize(
    'shapes, message',
    [
        (
            dict(a=(4, 5, 1), b=(4, 6, 1)),
            r'different shapes \(a: 4x5x1, b: 4x6x1\); pass image_size',
        ),
        (
            dict(a=(4, 5, 2), b=(4, 5, 3)),
            r'different shapes \(a: 4x5x2, b: 4x5x3\)',
        ),
        (
            dict(a=(4, 5, 3), b=(7,), c=(4, 5, 1)),
            r'different shapes \(a: 4x5x3, b: 7 features, c: 4x5x3\)',
        ),
    ],
)
def test_different_shapes(shapes, message):
  parts = {name: make(np.zeros((6, *shape))) for name, shape in shapes.items()}
  with pytest.raises(ValueError, match=f'dataset=domains:a=a.*{message}'):
    join(**parts)


def test_loads_and_resizes_each_domain(monkeypatch):
  asked = []

  def load_tfds(name, data_dir, image_size):
    asked.append((name, data_dir, image_size))
    return make(np.zeros((20, 6, 6, 3), np.uint8), num_classes=10)

  monkeypatch.setattr(tfds_source, 'load_tfds', load_tfds)
  dataset = tff_bn_data.load_dataset(
      'domains:digits,svhn=tfds:svhn_cropped', '/data', (5, 6)
  )
  assert asked == [('tfds:svhn_cropped', '/data', (5, 6))]
  assert dataset.domain_names == ('digits', 'svhn')
  assert dataset.input_shape == (5, 6, 3)
  alone = tff_bn_data.load_dataset('digits', image_size=(5, 6))
  np.testing.assert_array_equal(
      dataset.x_train[:1437], np.repeat(alone.x_train, 3, axis=-1)
  )
  data = tff_bn_data.split_dataset(dataset, 'domains', 4, 0)
  assert data.client_ids == ('digits_0', 'svhn_0', 'digits_1', 'svhn_1')
  assert dataset.class_names == ()
  # The images of the digits were divided by 16, the others are by 255.
  assert alone.divisor == 16 and dataset.total_divisor is None
  # The test data is of the client's domain.
  for client_id in data.client_ids:
    found = dataset.domain_test[data.test_indices[client_id]]
    assert set(found) == {int(client_id.startswith('svhn'))}
