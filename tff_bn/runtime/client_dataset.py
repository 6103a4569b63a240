"""Clients' datasets, made where they are used."""

import abc
from typing import Any

import tensorflow as tf

from tff_bn.common import dataset_options
from tff_bn.runtime import devices


class ClientDataset(abc.ABC):
  """What the runtimes of this package accept in place of a `tf.data.Dataset`.

  It is made when its client's turn has come, and dropped after that, in the
  process in which the client is computed. With Ray, that is another process,
  and maybe another machine: the object is pickled. NumPy arrays of 10 kB or
  more that it has are sent to each machine once, not each time, and are
  read-only there; so nobody may change them later.
  """

  @property
  @abc.abstractmethod
  def element_spec(self) -> Any:
    """The spec of the dataset's elements, as of a `tf.data.Dataset`."""

  @abc.abstractmethod
  def build(self) -> tf.Tensor:
    """Makes the dataset.

    Returns:
      The dataset's variant tensor, see `to_variant`.
    """


def to_variant(dataset: tf.data.Dataset) -> tf.Tensor:
  """Makes a dataset the variant tensor that computations get.

  Args:
    dataset: The dataset.

  Returns:
    The tensor, on the CPU of this process.
  """
  with tf.device(devices.HOST):
    return tf.data.experimental.to_variant(
        dataset_options.without_useless_optimizer(dataset)
    )
