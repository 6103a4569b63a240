"""Tests of the scaling of pixels."""

import json

import numpy as np
import pytest
from sklearn import preprocessing

from tff_bn import data as tff_bn_data
from tff_bn.data import batches as batches_lib
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import scaling


def make(x_train, x_test=None):
  x_test = x_train[:3] if x_test is None else x_test
  return dataset_lib.create_dataset(
      'part',
      x_train,
      np.arange(len(x_train)) % 2,
      x_test,
      np.array([0, 1, 0]),
      2,
  )


@pytest.fixture(params=[np.uint8, np.float32])
def images(request):
  x = np.random.default_rng(0).integers(0, 256, (3000, 2, 4, 3), np.uint8)
  x[..., 1] //= 3
  return x if request.param == np.uint8 else x / np.float32(255)


def unit(x):
  return x / 255 if x.dtype == np.uint8 else x.astype(float)


def test_unit(images):
  assert scaling.pixel_scaling('unit', make(images), np.arange(9)) is None


def test_symmetric(images):
  result = scaling.pixel_scaling('symmetric', make(images), np.arange(9))
  np.testing.assert_array_equal(result.mean, [0.5] * 3)
  np.testing.assert_array_equal(result.deviation, [0.5] * 3)


def test_standardized(images):
  indices = np.arange(0, 3000, 2)
  result = scaling.pixel_scaling('standardized', make(images), indices)
  values = unit(images[indices]).reshape(-1, 3)
  assert result.mean.dtype == result.deviation.dtype == np.float32
  np.testing.assert_allclose(result.mean, values.mean(axis=0), rtol=1e-6)
  np.testing.assert_allclose(result.deviation, values.std(axis=0), rtol=1e-6)


@pytest.mark.parametrize('largest', [2**20, 0])  # Copied and gathered batches.
def test_batches(images, monkeypatch, largest):
  monkeypatch.setattr(batches_lib, '_MAX_COPIED_VALUES', largest)
  dataset = make(images)
  result = scaling.pixel_scaling('standardized', dataset, np.arange(3000))
  batches = batches_lib.Batches([np.array([5, 2, 9])], 2)
  got = batches.dataset(dataset.x_train, dataset.y_train, result)
  x = np.concatenate([x for x, _ in got.as_numpy_iterator()])
  expected = (
      (images[[5, 2, 9]] / np.float32(255))
      if (images.dtype == np.uint8)
      else images[[5, 2, 9]]
  )
  np.testing.assert_array_equal(x, (expected - result.mean) / result.deviation)


def test_data_of_clients(images):
  dataset = make(images)
  data = tff_bn_data.split_dataset(dataset, 'iid', 3, 0)
  plain = data.fingerprint()
  training, held_out = data.hold_out(['client_1'])
  scaled = training.scaled('standardized')
  used = np.concatenate([data.train_indices[c] for c in training.client_ids])
  np.testing.assert_allclose(
      scaled.dataset.scaling.mean,
      unit(images[used]).mean(axis=(0, 1, 2)),
      rtol=1e-6,
  )
  # The test data has the same scaling.
  mean, deviation = (
      getattr(scaled.dataset.scaling, name) for name in ('mean', 'deviation')
  )
  ((x_test, _),) = scaled.test_dataset(3).as_numpy_iterator()
  expected = (unit(images[:3]) - mean) / deviation
  np.testing.assert_allclose(x_test, expected, rtol=1e-5, atol=1e-6)
  ((x_test, _),) = (
      held_out.with_scaling(scaled.dataset.scaling)
      .test_dataset(3)
      .as_numpy_iterator()
  )
  np.testing.assert_allclose(x_test, expected, rtol=1e-5, atol=1e-6)
  # A checkpoint with another scaling is of other data.
  assert data.scaled('standardized').fingerprint() != plain
  assert data.scaled('unit').fingerprint() == plain


def test_json(images):
  result = scaling.pixel_scaling('standardized', make(images), np.arange(50))
  again = dataset_lib.Scaling.from_json(
      json.loads(json.dumps(result.to_json()))
  )
  for name in ('mean', 'deviation'):
    a, b = getattr(result, name), getattr(again, name)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def test_symmetric_refuses_vectors():
  with pytest.raises(
      ValueError,
      match='pixel_scaling=symmetric is for images, .* of 5 features; use'
      ' pixel_scaling=standardized',
  ):
    scaling.pixel_scaling('symmetric', make(np.zeros((4, 5))), np.arange(4))


@pytest.fixture
def vectors():
  """Features of different sizes; the third is constant in training."""
  x = np.random.default_rng(0).normal(size=(3000, 5))
  x = x * [1, 1000, 0, 1e-3, 1] + [0, 7, 0.1, 0, -300]
  x_test = x[:3] + 2
  return x.astype(np.float32), x_test.astype(np.float32)


def test_features_are_standardized(vectors):
  x, x_test = vectors
  data = tff_bn_data.split_dataset(make(x, x_test), 'iid', 3, 0)
  training, _ = data.hold_out(['client_1'])
  used = np.concatenate(
      [training.train_indices[c] for c in training.client_ids]
  )
  scaler = preprocessing.StandardScaler().fit(x[used].astype(float))
  scaled = training.scaled('standardized')
  np.testing.assert_allclose(
      scaled.dataset.scaling.mean, scaler.mean_, rtol=1e-6
  )
  batches = [
      (
          indices,
          scaled.client_dataset(
              [client], seed=0, round_num=0, batch_size=2000, local_epochs=1
          ),
      )
      for client, indices in scaled.train_indices.items()
  ]
  for indices, dataset in batches:
    ((batch, _),) = dataset.as_numpy_iterator()
    expected = scaler.transform(x[indices].astype(float))
    for feature in range(5):
      np.testing.assert_allclose(
          np.sort(batch[:, feature]),
          np.sort(expected[:, feature]),
          rtol=1e-4,
          atol=1e-4,
      )
  assert not batch[:, 2].any()
  # The test data has the same numbers; what was constant stays 0.
  ((batch, _),) = scaled.test_dataset(3).as_numpy_iterator()
  expected = scaler.transform(x_test.astype(float))
  expected[:, 2] = 0
  np.testing.assert_allclose(batch, expected, rtol=1e-4, atol=1e-4)
  again = dataset_lib.Scaling.from_json(
      json.loads(json.dumps(scaled.dataset.scaling.to_json()))
  )
  np.testing.assert_array_equal(
      again.deviation, scaled.dataset.scaling.deviation
  )


@pytest.mark.parametrize(
    'sizes, expected',
    [
        ([1, 1, 1, 100], 0),
        ([1, 1, 1, 101], 3),
        ([1, -1, 1, -101], 3),
        # A quarter of the features.
        ([1, 101, 101, 101], 1),
        ([1, 101, 101, 101, 101], 0),
        ([1000, 1], 1),
        ([5], 0),
        # Constant features do not count.
        ([0, 0, 0, 1], 0),
        ([0, 0, 0, 0], 0),
    ],
)
def test_small_features(sizes, expected):
  x = np.linspace(0, 1, 6)[:, np.newaxis] * sizes
  dataset = make(x.astype(np.float32))
  assert scaling.small_features(dataset) == expected
  # A common factor changes nothing.
  assert scaling.small_features(make(1000 * x)) == expected


def test_pictures_as_vectors_have_no_small_features():
  x = np.zeros((256, 4), np.uint8)
  x[:, 0] = np.arange(256)
  x[:, 1:] = x[:, :1] // 3
  assert not scaling.small_features(make(x))
  # Images have pixels, not features.
  assert not scaling.small_features(
      make(np.linspace(0, [1, 1000], 6).reshape(6, 1, 1, 2))
  )


@pytest.mark.parametrize('value', [-0.5, 1.5])
def test_symmetric_refuses_other_ranges(value):
  inside = np.full((4, 2, 2, 1), 0.25)
  outside = np.full((3, 2, 2, 1), value)
  for dataset in (
      make(inside, outside),
      make(outside[[0, 1, 2, 0]], inside[:3]),
  ):
    with pytest.raises(ValueError, match=f'between 0 and 1, .* {value} to'):
      scaling.pixel_scaling('symmetric', dataset, np.arange(4))


@pytest.mark.parametrize('dtype', [np.uint8, np.float32])
def test_standardized_refuses_a_constant_channel(dtype):
  x = np.random.default_rng(0).integers(0, 256, (3000, 2, 2, 2)).astype(dtype)
  x[..., 1] = 77  # The mean of 77 / 255 is rounded.
  with pytest.raises(
      ValueError, match='channel 1 .* of part is constant.*use pixel_scaling='
  ):
    scaling.pixel_scaling('standardized', make(x), np.arange(3000))


def test_unknown_name():
  with pytest.raises(ValueError, match="pixel_scaling='x' must be one of"):
    scaling.pixel_scaling('x', make(np.zeros((4, 2, 2, 1))), np.arange(4))


@pytest.mark.parametrize(
    'low, high, dtype, expected',
    [
        (0, 255, np.float32, True),
        (0, 16, np.float64, True),
        (0, 1, np.float32, False),
        (-3, 255, np.float32, False),
        (0, 255, np.uint8, False),
    ],
)
def test_unscaled_floats(low, high, dtype, expected):
  x = np.linspace(low, high, 240).reshape(5, 6, 8).astype(dtype)
  assert scaling.has_unscaled_floats(make(x)) is expected


def test_vectors_are_not_pixels():
  x = np.linspace(0, 255, 240, dtype=np.float32).reshape(5, 48)
  assert not scaling.has_unscaled_floats(make(x))
