"""A client's dataset that is made where it is used."""

import abc
from typing import Any

import tensorflow as tf


class ClientDataset(abc.ABC):
  """What the in-process runtime accepts in place of a `tf.data.Dataset`.

  It is made when its client's turn has come, and dropped after that, on the
  machine on which the client runs.
  """

  @property
  @abc.abstractmethod
  def element_spec(self) -> Any:
    """The spec of the dataset's elements, as of a `tf.data.Dataset`."""

  @abc.abstractmethod
  def build(self, worker: Any) -> tf.data.Dataset:
    """Makes the dataset.

    Args:
      worker: The `tff_bn.runtime.Worker` on which the client runs, within whose
        device this is called; `None`: this process.

    Returns:
      The dataset.
    """
