"""Datasets from folders of images."""

from collections.abc import Sequence
import os
import pathlib
from typing import Any, Optional

from absl import logging
import tensorflow as tf

from tff_bn.catalog import datasets
from tff_bn.common import checks
from tff_bn.common import memory
from tff_bn.common import spelling
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import domains
from tff_bn.data import image_headers
from tff_bn.data import images
from tff_bn.data import natural_clients
from tff_bn.data import tfds_source

_SUFFIXES = ('.jpeg', '.jpg', '.png')
# The folders of images. Of the last two, only one is used.
_SPLITS = ('train', 'test', 'validation')


def load_image_folder(
    name: str,
    image_size: Optional[tuple[int, int]] = None,
    *,
    is_part: bool = False,
) -> dataset_lib.Dataset:
  """Loads the images in `PATH/train/LABEL/` and `PATH/test/LABEL/`.

  If `PATH` has no folder `train`, but folders that have one, these are clients:
  the images are in `PATH/CLIENT/train/LABEL/` and `PATH/CLIENT/test/LABEL/`.
  Clients may lack classes and test images.

  The classes are the folders `LABEL` in alphabetical order. Images are PNG or
  JPEG files, read as RGB: `[n, height, width, 3]`, uint8. If there is no folder
  `test`, the folder `validation` is used. Links to files and folders are
  followed. Other files, and folders that are no clients, are ignored; a warning
  names them.

  Args:
    name: `folder:PATH`.
    image_size: The height and width to resize images to. Default: no resizing.
    is_part: Whether classes may lack training images, see `create_dataset`.
      Then folders without any images are no classes.

  Returns:
    The dataset, whose classes have the names of the folders.

  Raises:
    ValueError: If a folder is missing, if a file is no image or a name is not
      UTF-8, or if the images have different sizes and `image_size` is None or
      do not fit into memory. Unless `is_part` is true, also if there is a
      single class, or a class without training images.
  """
  path = os.path.expanduser(datasets.path(name))
  if not os.path.isdir(path):
    raise ValueError(f'dataset={name}: there is no folder {path!r}.')
  clients = datasets.clients_in_folder(path)
  if not clients:
    _warn_of_ignored(name, [path])
    return _load_folder(name, path, image_size, is_part=is_part)
  _warn_of_ignored(name, [os.path.join(path, client) for client in clients])
  _check_clients(name, path, clients)
  parts = {
      client: _load_folder(
          name,
          os.path.join(path, client),
          image_size,
          is_part=True,
          needs_test=False,
      )
      for client in clients
  }
  joined = domains.join_domains(name, parts, is_part=is_part, noun='client')
  return joined.unchecked(
      client_train=joined.domain_train,
      client_test=joined.domain_test,
      client_names=joined.domain_names,
      domain_train=None,
      domain_test=None,
      domain_names=(),
  )


def _load_folder(
    name: str,
    path: str,
    image_size: Optional[tuple[int, int]],
    *,
    is_part: bool,
    needs_test: bool = True,
) -> dataset_lib.Dataset:
  """Loads the images of one folder, see `load_image_folder`."""
  # The import takes seconds, and only these datasets need it.
  import tensorflow_datasets as tfds

  _check_names(name, path)
  try:
    builder = tfds.folder_dataset.ImageFolder(path)
  except tf.errors.OpError as error:
    raise ValueError(
        f'dataset={name}: {path!r} cannot be read ({error.message}).'
    ) from error
  if not is_part:
    _check_classes(name, path, builder)
  for split in tfds_source.used_splits(builder):
    _check_headers(name, path, split, image_size)
  try:
    dataset = tfds_source.read_builder(
        name, builder, image_size, is_part=is_part, needs_test=needs_test
    )
  except ValueError as error:
    if isinstance(error.__cause__, tf.errors.OpError):
      _check_files(name, path)
    raise
  return classes.without_unused(dataset) if is_part else dataset


def _warn_of_ignored(name: str, paths: Sequence[str]) -> None:
  """Warns of files that are no images of a class, except hidden ones."""
  files = [
      file
      for path in paths
      for split in _SPLITS
      for pattern, suffixes in ((f'{split}/*', ()), (f'{split}/*/*', _SUFFIXES))
      for file in sorted(pathlib.Path(path).glob(pattern))
      if file.is_file()
      and file.suffix.lower() not in suffixes
      and not file.name.startswith('.')
  ]
  if files:
    logging.warning(
        'dataset=%s: %d files are ignored, such as %s: images are PNG or JPEG'
        ' files in the folder of their class.',
        name,
        len(files),
        files[0],
    )


def _check_clients(name: str, path: str, clients: Sequence[str]) -> None:
  """Checks clients' names and training images; warns of other folders."""
  natural_clients.check_characters(f'dataset={name}: {path}', clients)
  for client in clients:
    folder = os.path.join(path, client)
    if not _image_files(folder, 'train'):
      raise ValueError(
          f'dataset={name}: {os.path.join(folder, "train")} has no images in'
          ' folders of classes; add PNG or JPEG files, or remove the folder'
          f' {client!r}.'
      )
  others = sorted(
      entry.name
      for entry in os.scandir(path)
      if entry.is_dir()
      and entry.name not in clients
      and not entry.name.startswith('.')
  )
  if others:
    logging.warning(
        'dataset=%s: the folders %s in %s have no folder train, so they are no'
        ' clients.',
        name,
        spelling.name_some(others),
        path,
    )


def _check_names(name: str, path: str) -> None:
  """Checks that the names of classes and files can be read."""
  for pattern in ('*', '*/*', '*/*/*'):
    for entry in pathlib.Path(path).glob(pattern):
      if not checks.is_utf8(str(entry)):
        raise ValueError(
            f'dataset={name}: the name of {str(entry)!r} is not UTF-8; rename'
            ' it.'
        )


def _check_headers(
    name: str, path: str, split: str, image_size: Optional[tuple[int, int]]
) -> None:
  """Checks what the headers of images tell, before an image is decoded."""
  files = _image_files(path, split)
  first: Optional[tuple[int, int]] = None
  for file in files:
    # Reading from a pipe may last forever.
    if not file.is_file():
      raise ValueError(
          f'dataset={name}: {file} is no regular file; replace or remove it.'
      )
    try:
      with file.open('rb') as opened:
        size = image_headers.read_size(opened)
    except (OSError, ValueError) as error:
      raise _no_image(name, file) from error
    memory.check_fits(
        f'dataset={name}: the {size[0]}x{size[1]} pixels of {file}',
        _num_bytes(size),
    )
    first = first or size
    if image_size is None and size != first:
      raise images.different_sizes(
          f'dataset={name}', first, size, (str(files[0]), str(file))
      )
  if first is not None and image_size is None:
    memory.check_fits(
        f'dataset={name}: the {len(files)} images of {split}',
        len(files) * _num_bytes(first),
    )


def _num_bytes(size: tuple[int, int]) -> int:
  """Returns the number of bytes of an RGB image."""
  return 3 * size[0] * size[1]


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
      raise _no_image(name, file) from error


def _no_image(name: str, file: pathlib.Path) -> ValueError:
  return ValueError(
      f'dataset={name}: {file} is no readable PNG or JPEG image; replace or'
      ' remove it.'
  )


def _image_files(path: str, split: str) -> list[pathlib.Path]:
  return [
      file
      for file in sorted(pathlib.Path(path).glob(f'{split}/*/*'))
      if file.suffix.lower() in _SUFFIXES
  ]
