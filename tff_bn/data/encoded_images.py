"""Decodes images that are PNG or JPEG files in memory."""

from collections.abc import Sequence
import io
from typing import Optional

import numpy as np
import tensorflow as tf

from tff_bn.common import memory
from tff_bn.data import image_headers
from tff_bn.data import images

_GREY, _RGB = 1, 3


def decode(
    source: str,
    files: Sequence[bytes],
    names: Sequence[str],
    image_size: Optional[tuple[int, int]],
) -> np.ndarray:
  """Returns images `[n, height, width, channels]`, uint8.

  They have one channel if all are grey, otherwise three. Transparency is left
  out.

  Args:
    source: The beginning of errors, which names the dataset.
    files: The content of each file.
    names: What errors call each file.
    image_size: The height and width to resize images to. Default: no resizing.

  Raises:
    ValueError: If a file is no image, if images have different sizes and
      `image_size` is None, or if they do not fit into memory.
  """
  # What the headers tell comes first, before an image is decoded.
  sizes = [_read_size(source, file, name) for file, name in zip(files, names)]
  for size, name in zip(sizes, names):
    memory.check_fits(
        f'{source}: the {size[0]}x{size[1]} pixels of {name}',
        _RGB * size[0] * size[1],
    )
    if image_size is None and size != sizes[0]:
      raise images.different_sizes(source, sizes[0], size, (names[0], name))
  height, width = image_size or sizes[0]
  memory.check_fits(
      f'{source}: its {len(files)} images of {height}x{width} pixels',
      _RGB * height * width * len(files),
  )
  decoded = [
      _decode(source, file, name, image_size)
      for file, name in zip(files, names)
  ]
  channels = max(image.shape[-1] for image in decoded)
  x = np.empty((len(files), height, width, channels), np.uint8)
  for row, image in zip(x, decoded):
    row[:] = image  # A grey image has the same value in three channels.
  return x


def _read_size(source: str, file: bytes, name: str) -> tuple[int, int]:
  try:
    return image_headers.read_size(io.BytesIO(file))
  except ValueError as error:
    raise _no_image(source, name) from error


def _decode(
    source: str, file: bytes, name: str, image_size: Optional[tuple[int, int]]
) -> np.ndarray:
  try:
    image = tf.io.decode_image(file, expand_animations=False)
  except tf.errors.OpError as error:
    raise _no_image(source, name) from error
  # The second or fourth channel is transparency.
  image = image[..., : _GREY if image.shape[-1] < _RGB else _RGB]
  if image_size is not None and tuple(image.shape[:2]) != tuple(image_size):
    image = images.resize(image, image_size)
  array: np.ndarray = image.numpy()
  return array


def _no_image(source: str, name: str) -> ValueError:
  return ValueError(f'{source}: {name} is no readable PNG or JPEG image.')
