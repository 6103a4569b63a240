"""Resizing images."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_bn.common import memory

# Resizing in chunks keeps the float copies small.
_CHUNK = 1024


def resize(images: tf.Tensor, image_size: tuple[int, int]) -> tf.Tensor:
  """Resizes images bilinearly, with antialiasing; the dtype stays.

  The images have the shape `[n, height, width, channels]` or `[height, width,
  channels]` and the dtype uint8 or float32.
  """
  resized = tf.image.resize(images, image_size, antialias=True)
  if images.dtype.is_integer:
    resized = tf.round(resized)
  return tf.cast(resized, images.dtype)


def check_memory(
    name: str,
    num_images: int,
    image_size: tuple[int, int],
    bytes_per_pixel: int,
) -> None:
  """Raises a `ValueError` if resized images do not fit into memory."""
  height, width = image_size
  memory.check_fits(
      f'image_size={height}x{width} is too large for dataset={name}: its'
      f' {num_images} images',
      num_images * height * width * bytes_per_pixel,
  )


def different_sizes(
    source: str,
    first: tuple[int, ...],
    other: tuple[int, ...],
    files: Sequence[str] = ('', ''),
) -> ValueError:
  """Returns the error of images with these two heights and widths.

  `files` are their two files, if they have some.
  """
  sizes = ' and '.join(
      f'{size[0]}x{size[1]}{file and f" ({file})"}'
      for size, file in zip((first, other), files)
  )
  return ValueError(
      f'{source} has images of different sizes, for example {sizes} pixels;'
      ' pass image_size=HEIGHTxWIDTH to resize them.'
  )


def resize_masks(y: np.ndarray, image_size: tuple[int, int]) -> np.ndarray:
  """Resizes masks `[n, height, width]`: each pixel gets the nearest class."""
  return np.concatenate(
      [
          tf.image.resize(
              y[start : start + _CHUNK, ..., np.newaxis], image_size, 'nearest'
          ).numpy()[..., 0]
          for start in range(0, len(y), _CHUNK)
      ]
  )


def resize_array(x: np.ndarray, image_size: tuple[int, int]) -> np.ndarray:
  """Resizes an array of many images as `resize` does."""
  return np.concatenate(
      [
          resize(tf.constant(x[start : start + _CHUNK]), image_size).numpy()
          for start in range(0, len(x), _CHUNK)
      ]
  )
