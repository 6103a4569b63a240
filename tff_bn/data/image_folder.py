"""Datasets from folders of images."""

import os
from typing import Optional

import numpy as np

from tff_bn.data import dataset as dataset_lib
from tff_bn.data import names
from tff_bn.data import tfds_source


def load_image_folder(
    name: str, image_size: Optional[tuple[int, int]] = None
) -> dataset_lib.Dataset:
  """Loads the images in `PATH/train/LABEL/` and `PATH/test/LABEL/`.

  The classes are the folders `LABEL` in alphabetical order. Images are PNG or
  JPEG files, read as RGB: `[n, height, width, 3]`, uint8. If there is no folder
  `test`, the folder `validation` is used.

  Args:
    name: `folder:PATH`.
    image_size: The height and width to resize images to. Default: no resizing.

  Returns:
    The dataset.

  Raises:
    ValueError: If a folder is missing, if a file is no image, if the images
      have different sizes and `image_size` is None, or if a class has no
      training images.
  """
  # The import takes seconds, and only these datasets need it.
  import tensorflow_datasets as tfds

  path = os.path.expanduser(name.removeprefix(names.FOLDER_PREFIX))
  if not os.path.isdir(path):
    raise ValueError(f'dataset={name}: there is no folder {path!r}.')
  builder = tfds.folder_dataset.ImageFolder(path)
  dataset = tfds_source.read_builder(name, builder, image_size)
  untrained = np.setdiff1d(dataset.y_test, dataset.y_train)
  if untrained.size:
    label_names = builder.info.features['label'].names
    raise ValueError(
        f'dataset={name}: the test data has classes without training images:'
        f' {", ".join(label_names[label] for label in untrained)}.'
    )
  return dataset
