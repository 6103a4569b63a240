"""Datasets from folders of images."""

import os
import pathlib
from typing import Any, Optional

import tensorflow as tf

from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import names
from tff_bn.data import tfds_source

_SUFFIXES = ('.jpeg', '.jpg', '.png')


def load_image_folder(
    name: str,
    image_size: Optional[tuple[int, int]] = None,
    *,
    is_part: bool = False,
) -> dataset_lib.Dataset:
  """Loads the images in `PATH/train/LABEL/` and `PATH/test/LABEL/`.

  The classes are the folders `LABEL` in alphabetical order. Images are PNG or
  JPEG files, read as RGB: `[n, height, width, 3]`, uint8. If there is no folder
  `test`, the folder `validation` is used.

  Args:
    name: `folder:PATH`.
    image_size: The height and width to resize images to. Default: no resizing.
    is_part: Whether classes may lack training images, see `create_dataset`.
      Then folders without any images are no classes.

  Returns:
    The dataset, whose classes have the names of the folders.

  Raises:
    ValueError: If a folder is missing, if a file is no image, or if the images
      have different sizes and `image_size` is None. Unless `is_part` is true,
      also if there is a single class, or a class without training images.
  """
  # The import takes seconds, and only these datasets need it.
  import tensorflow_datasets as tfds

  path = os.path.expanduser(name.removeprefix(names.FOLDER_PREFIX))
  if not os.path.isdir(path):
    raise ValueError(f'dataset={name}: there is no folder {path!r}.')
  builder = tfds.folder_dataset.ImageFolder(path)
  if not is_part:
    _check_classes(name, path, builder)
  try:
    dataset = tfds_source.read_builder(
        name, builder, image_size, is_part=is_part
    )
  except ValueError as error:
    if isinstance(error.__cause__, tf.errors.OpError):
      _check_files(name, path)
    raise
  return classes.without_unused(dataset) if is_part else dataset


def _check_classes(name: str, path: str, builder: Any) -> None:
  """Checks that each class has training images.

  Every folder in a split's folder is a class, even an empty one.
  """
  with_images = {file.parent.name for file in _image_files(path, 'train')}
  untrained = [
      label
      for label in builder.info.features['label'].names
      if label not in with_images
  ]
  # Without any training images, the error is about the split.
  if with_images and untrained:
    folders = ' and '.join(
        os.path.join(path, split) for split in builder.info.splits
    )
    raise ValueError(
        f'dataset={name} has classes without training images:'
        f' {", ".join(untrained)}. Each folder in {folders} is a class; add PNG'
        ' or JPEG files to train, or remove the folders.'
    )


def _check_files(name: str, path: str) -> None:
  """Checks that all files are images."""
  for file in _image_files(path, '*'):
    try:
      tf.io.decode_image(tf.io.read_file(str(file)), channels=3)
    except tf.errors.OpError as error:
      raise ValueError(
          f'dataset={name}: {file} is no readable PNG or JPEG image; replace or'
          ' remove it.'
      ) from error


def _image_files(path: str, split: str) -> list[pathlib.Path]:
  return [
      file
      for file in sorted(pathlib.Path(path).glob(f'{split}/*/*'))
      if file.suffix.lower() in _SUFFIXES
  ]
