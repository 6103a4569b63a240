"""EMNIST with its writers as natural clients, from TensorFlow Federated.

LEAF: A Benchmark for Federated Settings (https://arxiv.org/abs/1812.01097).
"""

from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tff_bn.data import dataset as dataset_lib

_READ_BATCH_SIZE = 1024
_NUM_DIGITS = 10
_NUM_CHARACTERS = 62


def load_emnist(data_dir: Optional[str] = None) -> dataset_lib.Dataset:
  """Loads the digits of EMNIST and downloads them if necessary.

  Args:
    data_dir: The folder for the downloaded file. Default: TensorFlow
      Federated's own.

  Returns:
    341,873 training and 40,832 test images of shape `[28, 28, 1]`, float32 in
    [0, 1] (1.1 GB), by 3,383 writers.

  Raises:
    ValueError: If the data is missing and can't be downloaded.
  """
  return _load('emnist', _NUM_DIGITS, data_dir)


def load_femnist(data_dir: Optional[str] = None) -> dataset_lib.Dataset:
  """Loads all of EMNIST, see `load_emnist`.

  Args:
    data_dir: See `load_emnist`.

  Returns:
    671,585 training and 77,483 test images (2.2 GB) by 3,400 writers, of 62
    classes: 10 digits, 26 capital letters and 26 small letters.

  Raises:
    ValueError: See `load_emnist`.
  """
  return _load('femnist', _NUM_CHARACTERS, data_dir)


def _load(
    name: str, num_classes: int, data_dir: Optional[str]
) -> dataset_lib.Dataset:
  # The import takes seconds, and only this dataset needs it.
  import tensorflow_federated as tff

  try:
    train, test = tff.simulation.datasets.emnist.load_data(
        only_digits=num_classes == _NUM_DIGITS, cache_dir=data_dir
    )
  # The class depends on the cause: no network, a full disk, a damaged file.
  except Exception as error:
    raise ValueError(
        f'dataset={name} could not be downloaded ({error}). Load it once with'
        ' data_dir=FOLDER on a machine with a network, and pass a copy of this'
        ' folder as `data_dir`.'
    ) from error
  return _to_dataset(name, num_classes, train, test)


def load_emnist_synthetic() -> dataset_lib.Dataset:
  """Loads TensorFlow Federated's stand-in for EMNIST.

  Returns:
    20 images in the format of `load_emnist`. Each of two writers has the same
    ten images, one of each class. The test data equals the training data.
  """
  # The import takes seconds, and only this dataset needs it.
  import tensorflow_federated as tff

  client_data = tff.simulation.datasets.emnist.get_synthetic()
  return _to_dataset('emnist_synthetic', _NUM_DIGITS, client_data, client_data)


def _to_dataset(
    name: str, num_classes: int, train: Any, test: Any
) -> dataset_lib.Dataset:
  """Builds a dataset from two `tff.simulation.datasets.ClientData`."""
  client_names = tuple(train.client_ids)
  x_train, y_train, client_train = _read(train, client_names)
  x_test, y_test, client_test = _read(test, client_names)
  return dataset_lib.create_dataset(
      name,
      x_train,
      y_train,
      x_test,
      y_test,
      num_classes=num_classes,
      client_train=client_train,
      client_test=client_test,
      client_names=client_names,
  )


def _read(
    client_data: Any, client_names: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Reads the images, labels and writers of all clients."""

  def read_writer(number, writer_name):
    return client_data.serializable_dataset_fn(writer_name).map(
        lambda example: (example['pixels'], example['label'], number)
    )

  # One pipeline over all writers: building thousands takes minutes.
  numbers: np.ndarray = np.arange(len(client_names), dtype=np.int32)
  batches = (
      tf.data.Dataset.from_tensor_slices((numbers, list(client_names)))
      .flat_map(read_writer)
      .batch(_READ_BATCH_SIZE)
  )
  x, y, writer = zip(*batches.as_numpy_iterator())
  return np.concatenate(x), np.concatenate(y), np.concatenate(writer)
