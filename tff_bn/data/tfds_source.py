"""Datasets of TensorFlow Datasets, by name."""

import contextlib
import pathlib
import sys
from typing import Any, Optional
import urllib.parse

import numpy as np
import tensorflow as tf

from tff_bn.catalog import datasets
from tff_bn.common import progress
from tff_bn.common import spelling
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import images
from tff_bn.data import tfds_features

_TRAIN = datasets.TRAIN_SPLIT
_TEST = datasets.TEST_SPLITS
_TIMEOUT_SECONDS = 10


def load_tfds(
    name: str,
    data_dir: Optional[str] = None,
    image_size: Optional[tuple[int, int]] = None,
) -> dataset_lib.Dataset:
  """Loads a dataset of images and labels and downloads it if necessary.

  Args:
    name: `tfds:` and the name in TensorFlow Datasets, for example
      `tfds:cifar10` or `tfds:domainnet/real`.
    data_dir: The folder of the prepared datasets. Default: TensorFlow Datasets'
      own.
    image_size: The height and width to resize images to. Default: no resizing.

  Returns:
    The dataset. Its test data is the split `test`, or `validation` if there is
    no `test`.

  Raises:
    ValueError: If the dataset is unknown, can't be downloaded, or has no images
      with labels in these splits.
  """
  # The import takes seconds, and only these datasets need it.
  import tensorflow_datasets as tfds

  source = f'dataset={name}'
  tfds_name = datasets.path(name)
  if data_dir is not None:
    tfds_features.check(tfds_name, pathlib.Path(data_dir))
  try:
    builder = tfds.builder(tfds_name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError as error:
    known = tfds.list_builders(with_community_datasets=False)
    raise ValueError(
        f'{source}: neither TensorFlow Datasets nor'
        f' {_data_dir_text(data_dir)} has a dataset {tfds_name!r}.'
        f'{spelling.suggestion(tfds_name, known)}'
    ) from error
  # The class depends on the cause: a wrong version, a wrong configuration.
  except Exception as error:
    raise ValueError(f'{source}: {_first_line(error)}') from error
  if not builder.is_prepared():
    progress.say(f'Downloading {name} to {builder.data_path} …')
    try:
      _check_hosts(builder)
      # Its messages are no results of a program.
      with contextlib.redirect_stdout(sys.stderr):
        builder.download_and_prepare()
    # Each of the hundreds of datasets has its own download code and errors.
    except Exception as error:
      raise ValueError(
          f'{source} is not prepared in {builder.data_path} and could not be'
          f' downloaded ({_first_line(error)}). Prepare it on a machine with a'
          f' network, by `tfds build {tfds_name} --data_dir=FOLDER`, and pass'
          ' this folder as `data_dir`.'
      ) from error
  return classes.without_numbers(read_builder(name, builder, image_size))


def _check_hosts(builder: Any) -> None:
  """Raises an error if a host with a dataset's files can't be reached.

  TensorFlow Datasets would try again for minutes, which Ctrl-C does not end.
  """
  import requests  # TensorFlow Datasets downloads with it, too.

  urls = {
      urllib.parse.urlsplit(url).hostname: url
      for url in builder.url_infos or ()
      if url.startswith('http')
  }
  for host, url in urls.items():
    try:
      requests.head(url, timeout=_TIMEOUT_SECONDS)
    except (requests.ConnectionError, requests.Timeout) as error:
      raise ConnectionError(f'{host} cannot be reached') from error


def read_builder(
    name: str,
    builder: Any,
    image_size: Optional[tuple[int, int]] = None,
    *,
    is_part: bool = False,
    needs_test: bool = True,
) -> dataset_lib.Dataset:
  """Reads the data of a prepared builder.

  Args:
    name: The dataset's name for `load_dataset`.
    builder: A `tfds.core.DatasetBuilder`.
    image_size: The height and width to resize images to. Default: no resizing.
    is_part: Whether there may be a single class, see `create_dataset`.
    needs_test: Whether there must be test data.

  Returns:
    The dataset, whose classes have the builder's names.

  Raises:
    ValueError: If the builder has no training or test data, or if the data is
      not images of one size with labels.
  """
  import tensorflow_datasets as tfds

  source = f'dataset={name}'
  info = builder.info
  kinds = [info.features[key] for key in info.supervised_keys or ()]
  if (
      len(kinds) != 2
      or not isinstance(kinds[0], tfds.features.Image)
      or not isinstance(kinds[1], tfds.features.ClassLabel)
  ):
    raise ValueError(
        f'{source} is not a dataset of images with one label each.'
    )
  splits = used_splits(builder)
  if _TRAIN not in splits or (needs_test and len(splits) != 2):
    raise ValueError(
        f'{source} has the splits {", ".join(info.splits) or "(none)"}; it'
        f' needs {_TRAIN}, and {" or ".join(_TEST)}.'
    )
  if image_size is not None:
    for split in splits:
      # Images of at least one channel of uint8.
      images.check_memory(name, info.splits[split].num_examples, image_size, 1)
  x_train, y_train = _read_split(source, builder, splits[0], image_size)
  described: dict[str, Any] = dict(
      num_classes=kinds[1].num_classes, class_names=tuple(kinds[1].names)
  )
  if len(splits) == 1:
    return dataset_lib.Dataset(
        name, x_train, y_train, x_train[:0], y_train[:0], **described
    )
  x_test, y_test = _read_split(source, builder, splits[1], image_size)
  return dataset_lib.create_dataset(
      name, x_train, y_train, x_test, y_test, is_part=is_part, **described
  )


def used_splits(builder: Any) -> tuple[str, ...]:
  """Returns the training and the test split; one of them may be missing."""
  splits = builder.info.splits
  test = [split for split in _TEST if split in splits][:1]
  return tuple(split for split in (_TRAIN, *test) if split in splits)


def _read_split(
    source: str,
    builder: Any,
    split: str,
    image_size: Optional[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray]:
  """Reads the images and labels of one split."""
  examples = builder.as_dataset(split=split, as_supervised=True)
  if image_size is not None:
    examples = examples.map(
        lambda image, label: (images.resize(image, image_size), label)
    )
  x: list[np.ndarray] = []
  y: list[int] = []
  try:
    for image, label in examples.as_numpy_iterator():
      if x and image.shape != x[0].shape:
        raise images.different_sizes(source, x[0].shape, image.shape)
      x.append(image)
      y.append(label)
  except tf.errors.OpError as error:
    raise ValueError(
        f'{source}: the split {split} cannot be read'
        f' ({_first_line(error.message)}).'
    ) from error
  if not x:
    raise ValueError(f'{source}: the split {split} is empty.')
  return np.stack(x), np.array(y)


def _data_dir_text(data_dir: Optional[str]) -> str:
  return 'the default folder' if data_dir is None else f'data_dir={data_dir}'


def _first_line(message: Any) -> str:
  """The first line of an exception or its message."""
  lines = str(message).strip().splitlines()
  return lines[0] if lines else type(message).__name__
