"""Resizing images."""

import numpy as np
import tensorflow as tf

# Resizing in chunks keeps the float copies small.
_CHUNK = 1024


def resize(images: tf.Tensor, image_size: tuple[int, int]) -> tf.Tensor:
  """Resizes images bilinearly, with antialiasing.

  Args:
    images: Images of shape `[n, height, width, channels]` or `[height, width,
      channels]`, uint8 or float32.
    image_size: The new height and width.

  Returns:
    The resized images, of the same dtype.
  """
  resized = tf.image.resize(images, image_size, antialias=True)
  if images.dtype.is_integer:
    resized = tf.round(resized)
  return tf.cast(resized, images.dtype)


def resize_array(x: np.ndarray, image_size: tuple[int, int]) -> np.ndarray:
  """Resizes an array of many images as `resize` does."""
  return np.concatenate(
      [
          resize(tf.constant(x[start : start + _CHUNK]), image_size).numpy()
          for start in range(0, len(x), _CHUNK)
      ]
  )
