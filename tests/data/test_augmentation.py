"""Tests of augmented images against NumPy."""

import numpy as np
import pytest

from tff_bn.data import augmentation
from tff_bn.data import batches as batches_lib
from tff_bn.data import dataset as dataset_lib

_SHAPE = (7, 9, 2)


def draw(name, number=200, shape=_SHAPE, seed=0):
  return augmentation.draw_transforms(
      name, number, shape, np.random.default_rng(seed)
  )


def transform(image, matrix):
  """Applies a transform, pixel by pixel."""
  result = np.zeros_like(image)
  height, width = image.shape[:2]
  for row in range(height):
    for column in range(width):
      x, y = matrix.astype(np.float64) @ [column, row, 1]
      x, y = int(np.floor(x + 0.5)), int(np.floor(y + 0.5))
      if 0 <= x < width and 0 <= y < height:
        result[row, column] = image[y, x]
  return result


@pytest.fixture
def images():
  return np.random.default_rng(1).random((20, *_SHAPE), np.float32)


@pytest.mark.parametrize('name', ['flip_crop', 'flip_rotate'])
@pytest.mark.parametrize('dtype', [np.float32, np.uint8])
def test_batches_against_numpy(images, name, dtype):
  x = images if dtype == np.float32 else (255 * images).astype(dtype)
  y = np.arange(20, dtype=np.int32)
  passes = [np.array([3, 7, 3, 1, 19]), np.array([0, 3])]
  transforms = draw(name, 7)
  dataset = batches_lib.Batches(passes, 2, transforms).dataset(x, y)
  batches = list(dataset.as_numpy_iterator())
  assert [len(labels) for _, labels in batches] == [2, 2, 1, 2]
  order = np.concatenate(passes)
  np.testing.assert_array_equal(np.concatenate([b for _, b in batches]), order)
  unit = images if dtype == np.float32 else x / np.float32(255)
  expected = [transform(unit[i], m) for i, m in zip(order, transforms)]
  got = np.concatenate([b for b, _ in batches])
  # A position between two pixels may be rounded to either.
  same = (got == expected).all(axis=-1)
  assert same.mean() > 0.99 if name == 'flip_rotate' else same.all()


def test_pixels_are_scaled_after_the_border_is_added(images):
  scaling = dataset_lib.Scaling(
      np.array([0.5, 0.25], np.float32), np.array([2, 4], np.float32)
  )
  y = np.zeros(20, np.int32)
  batches = batches_lib.Batches([np.arange(20)], 20, draw('flip_crop', 20))
  ((plain, _),) = batches.dataset(images, y).as_numpy_iterator()
  ((scaled, _),) = batches.dataset(images, y, scaling).as_numpy_iterator()
  assert (plain == 0).any()
  np.testing.assert_array_equal(
      scaled, (plain - scaling.mean) / scaling.deviation
  )


def test_crops_and_flips_are_those_of_a_padded_image(images):
  image = images[0]
  height, width = _SHAPE[:2]
  padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
  crops = {}
  for row in range(9):
    for column in range(9):
      crop = padded[row : row + height, column : column + width]
      crops[crop.tobytes()] = row, column, False
      crops[crop[:, ::-1].tobytes()] = row, column, True
  found = [
      crops[transform(image, matrix).tobytes()]
      for matrix in draw('flip_crop', 4000)
  ]
  rows, columns, flips = (np.array(values) for values in zip(*found))
  # All 81 positions are equally likely, and half of the images are flipped.
  counts = np.bincount(9 * rows + columns, minlength=81)
  np.testing.assert_allclose(counts / 4000, 1 / 81, atol=0.008)
  np.testing.assert_allclose(flips.mean(), 0.5, atol=0.03)
  assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.06
  assert abs(np.corrcoef(rows, flips)[0, 1]) < 0.06


def test_rotations():
  matrices = draw('flip_rotate', 4000).astype(np.float64)
  flips = matrices[:, 0, 0] < 0
  np.testing.assert_allclose(flips.mean(), 0.5, atol=0.03)
  # A flip is its own inverse.
  unflipped = matrices.copy()
  unflipped[flips, 0] = [0, 0, 8] - unflipped[flips, 0]
  cos, sin = unflipped[:, 0, 0], unflipped[:, 1, 0]
  np.testing.assert_allclose(cos, unflipped[:, 1, 1], atol=1e-6)
  np.testing.assert_allclose(sin, -unflipped[:, 0, 1], atol=1e-6)
  np.testing.assert_allclose(cos**2 + sin**2, 1, atol=1e-6)
  # The center stays.
  np.testing.assert_allclose(
      unflipped @ [4, 3, 1], np.tile([4, 3], (4000, 1)), atol=1e-5
  )
  degrees = np.rad2deg(np.arctan2(sin, cos))
  assert abs(degrees).max() <= 30 + 1e-4
  counts, _ = np.histogram(degrees, bins=6, range=(-30, 30))
  np.testing.assert_allclose(counts / 4000, 1 / 6, atol=0.03)


def test_nothing():
  assert draw('none') is None


@pytest.mark.parametrize(
    'name, shape, message',
    [
        ('flip', (8, 8, 1), "augment='flip' must be one of none, flip_c"),
        (
            'flip_crop',
            (9,),
            'augment=flip_crop is for images, .*=x has .* of 9',
        ),
        ('flip_rotate', (9,), 'augment=flip_rotate is for images'),
    ],
)
def test_wrong_augmentations(name, shape, message):
  with pytest.raises(ValueError, match=message):
    augmentation.check_augmentation(name, 'x', shape)
