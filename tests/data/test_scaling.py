"""Tests of the scaling of pixels."""

import json

import numpy as np
import pytest

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
  x = np.concatenate(
      [
          x
          for x, _ in scaled.client_dataset(
              training.client_ids,
              seed=0,
              round_num=1,
              batch_size=64,
              local_epochs=1,
          ).as_numpy_iterator()
      ]
  )
  np.testing.assert_allclose(x.mean(axis=(0, 1, 2)), 0, atol=1e-4)
  np.testing.assert_allclose(x.std(axis=(0, 1, 2)), 1, rtol=1e-4)
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
  again = scaling.Scaling.from_json(json.loads(json.dumps(result.to_json())))
  for name in ('mean', 'deviation'):
    a, b = getattr(result, name), getattr(again, name)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('name', ['symmetric', 'standardized'])
def test_refuses_vectors(name):
  with pytest.raises(
      ValueError, match=f'pixel_scaling={name} is for images, .* of 5 features'
  ):
    scaling.pixel_scaling(name, make(np.zeros((4, 5))), np.arange(4))


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


def test_standardized_refuses_a_constant_channel():
  x = np.random.default_rng(0).random((4, 2, 2, 2))
  x[..., 1] = 0.5
  with pytest.raises(ValueError, match='channel 1 .* of part is constant'):
    scaling.pixel_scaling('standardized', make(x), np.arange(4))


def test_unknown_name():
  with pytest.raises(
      ValueError, match='pixel_scaling=x is unknown; use one of'
  ):
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
