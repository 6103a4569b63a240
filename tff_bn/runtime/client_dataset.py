"""Client datasets that are built in the process that uses them."""

import abc
from typing import Any, Optional

import tensorflow as tf

from tff_bn.common import batch_arrays
from tff_bn.common import dataset_options
from tff_bn.runtime import devices


class ClientDataset(abc.ABC):
  """A client's data that a runtime turns into a `tf.data.Dataset` when needed.

  The runtimes of this package accept it in place of a `tf.data.Dataset`. They
  build the dataset just before the client is computed, in the process that
  computes it, and free it afterwards. With Ray, this process may be on another
  machine, so the object must be picklable. Its NumPy arrays of 10 kB or more
  are sent to each machine only once and are read-only there; don't change them
  after the first use.
  """

  @property
  @abc.abstractmethod
  def element_spec(self) -> Any:
    """The dataset's `element_spec`, as a `tf.data.Dataset` has it."""

  @abc.abstractmethod
  def build(self) -> tf.Tensor:
    """Builds the dataset and returns its variant tensor, see `to_variant`."""

  def arrays(self) -> Optional[batch_arrays.BatchArrays]:
    """Returns the batches as arrays, or `None` if that is impossible.

    Batches that change when they are read, or need much computation, have no
    arrays.
    """
    return None


def to_variant(dataset: tf.data.Dataset) -> tf.Tensor:
  """Returns the variant tensor, on the CPU, that a computation takes."""
  with tf.device(devices.HOST):
    return tf.data.experimental.to_variant(
        dataset_options.without_useless_optimizer(dataset)
    )
