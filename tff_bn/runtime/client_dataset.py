"""Clients' datasets, on the machine that uses them."""

import abc
from typing import Any, Optional

import tensorflow as tf

from tff_bn import dataset_options
from tff_bn.runtime.remote_worker import HOST
from tff_bn.runtime.remote_worker import Worker


class ClientDataset(abc.ABC):
  """What the in-process runtime accepts in place of a `tf.data.Dataset`.

  It is made when its client's turn has come, and dropped after that, on the
  machine on which the client runs.

  Attributes:
    home: If it is an int, the client is computed on the device of this number
      (modulo the number of devices), whoever else takes part. For data that
      stays on a machine from round to round.
  """

  home: Optional[int] = None

  @property
  @abc.abstractmethod
  def element_spec(self) -> Any:
    """The spec of the dataset's elements, as of a `tf.data.Dataset`."""

  @abc.abstractmethod
  def build(self, worker: Optional[Worker]) -> tf.Tensor:
    """Makes the dataset.

    Args:
      worker: Where the client runs; `None`: in this process.

    Returns:
      The dataset's variant tensor, see `tf.data.experimental.to_variant`.
    """


def dataset_to_worker(
    dataset: tf.data.Dataset, worker: Optional[Worker]
) -> tf.Tensor:
  """Makes a dataset's variant tensor, where it is used.

  Args:
    dataset: The dataset. With its data it is sent to a worker once, however
      often it is used.
    worker: Where it is used; `None`: in this process.

  Returns:
    The variant tensor.
  """
  with tf.device(HOST):
    variant = tf.data.experimental.to_variant(
        dataset_options.without_useless_optimizer(dataset)
    )
  if worker is None:
    return variant
  # The dataset is kept with the key, so that its identity stays its own.
  return worker.keep(
      ('dataset', id(dataset)),
      lambda: (variant_to_worker(variant, worker), dataset),
  )[0]


def variant_to_worker(
    variant: tf.Tensor, worker: Optional[Worker]
) -> tf.Tensor:
  """Sends a dataset of this process with its data.

  Args:
    variant: Its variant tensor.
    worker: Where it is used; `None`: in this process.

  Returns:
    The variant tensor there.
  """
  if worker is None:
    return variant
  return _copy(variant, HOST, worker.host_device)


def variant_from_worker(
    variant: tf.Tensor, worker: Optional[Worker]
) -> tf.Tensor:
  """Fetches a dataset with its data to this process.

  Args:
    variant: Its variant tensor.
    worker: Where it is; `None`: in this process.

  Returns:
    The variant tensor here.
  """
  if worker is None:
    return variant
  return _copy(variant, worker.host_device, HOST)


def _copy(variant: tf.Tensor, source: str, target: str) -> tf.Tensor:
  # A variant tensor can not leave its process.
  with tf.device(source):
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, strip_device_assignment=True
    )
  with tf.device(target):
    return tf.raw_ops.DatasetFromGraph(graph_def=tf.identity(graph))
