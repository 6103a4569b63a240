"""Random changes of training images, drawn with NumPy.

An augmented image has the size of the image. The pixel (row, column) of it is
the pixel of the image at the nearest position to `A (column, row, 1)`, or 0 if
that is outside of the image. `A` is the 2x3 matrix of the image's transform.
"""

import numpy as np

from tff_bn.catalog import value_types
from tff_bn.catalog.local_training import AUGMENTATIONS
from tff_bn.data import arrays

_PADDING = 4
_MAX_DEGREES = 30.0


def _flips(num_images: int, width: int, rng: np.random.Generator) -> np.ndarray:
  """Returns transforms that flip half of the images horizontally."""
  transforms = np.tile(np.eye(2, 3), (num_images, 1, 1))
  transforms[rng.random(num_images) < 0.5, 0] = [-1, 0, width - 1]
  return transforms


def keep(
    num_images: int, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
  """Draws nothing: images stay as they are."""
  del num_images, shape, rng


def flip_crop(
    num_images: int, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
  """Draws flips and shifts, see `AUGMENTATIONS`."""
  transforms = _flips(num_images, shape[1], rng)
  shifts = rng.integers(-_PADDING, _PADDING, (num_images, 2), endpoint=True)
  transforms[:, :, 2] += shifts
  return transforms


def flip_rotate(
    num_images: int, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
  """Draws flips and rotations, see `AUGMENTATIONS`."""
  height, width = shape[:2]
  flips = _flips(num_images, width, rng)
  angles = np.deg2rad(rng.uniform(-_MAX_DEGREES, _MAX_DEGREES, num_images))
  cos, sin = np.cos(angles), np.sin(angles)
  rotations = np.stack(
      [np.stack([cos, -sin], axis=1), np.stack([sin, cos], axis=1)], axis=1
  )
  center = np.array([(width - 1) / 2, (height - 1) / 2])
  # Positions are rotated about the center first and then flipped.
  shifts = center - rotations @ center
  return np.concatenate(
      [
          flips[:, :, :2] @ rotations,
          flips[:, :, :2] @ shifts[:, :, np.newaxis] + flips[:, :, 2:],
      ],
      axis=2,
  )


def check_augmentation(name: str, source: str, shape: tuple[int, ...]) -> None:
  """Checks that an augmentation suits samples of a shape.

  Raises:
    ValueError: If the name is unknown, or the samples are no images.
  """
  value_types.Choice(AUGMENTATIONS).check('augment', name)
  if name != 'none' and len(shape) != 3:
    raise ValueError(
        f'augment={name} is for images, but dataset={source} has'
        f' {arrays.samples_text(shape)}; use augment=none.'
    )


def draw_transforms(
    name: str,
    num_images: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> np.ndarray | None:
  """Draws a transform for each image.

  Args:
    name: A key of `AUGMENTATIONS`.
    num_images: The number of images.
    shape: Their shape `[height, width, channels]`.
    rng: Determines the transforms.

  Returns:
    The matrices as float32 of shape `[num_images, 2, 3]`; `None` for `none`.
  """
  transforms = AUGMENTATIONS[name].load()(num_images, shape, rng)
  return None if transforms is None else transforms.astype(np.float32)
