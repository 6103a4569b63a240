"""The clients' part of a computation on one device."""

from collections.abc import Mapping, Sequence
import threading
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import aligned_arrays
from tff_bn.runtime import client_dataset
from tff_bn.runtime import plan_stage
from tff_bn.runtime import symbols


class ClientPart:
  """Computes clients of one invocation of a plan on one device.

  Several threads may use it concurrently for different clients. `server` has at
  least the values that the passes so far need; each is copied to the device on
  first use. `cancellation` can end the computation of clients.

  Attributes:
    device: The device's full name.
  """

  def __init__(
      self,
      device: str,
      server: Mapping[symbols.Leaf, Any],
      cancellation: plan_stage.Cancellation = plan_stage.NEVER,
  ):
    self.device = device
    self._server = server
    self._cancellation = cancellation
    self._copies: dict[symbols.Leaf, tf.Tensor] = {}
    self._lock = threading.Lock()

  def call(
      self,
      stage: plan_stage.Stage,
      first: Sequence[tf.Tensor],
      tensors: Mapping[symbols.Leaf, Any],
  ) -> dict[symbols.Leaf, tf.Tensor]:
    """Calls a function of clients and returns its outputs.

    Args:
      stage: The function.
      first: Its first arguments, which are not of any leaf.
      tensors: The argument of each of the clients' leaves, or a list of
        arguments.
    """
    inputs = list(first)
    for leaf in stage.inputs:
      value = tensors[leaf] if leaf in tensors else self._copy(leaf)
      if isinstance(value, list):
        inputs += value
      else:
        inputs.append(value)
    outputs = stage(inputs, self.device, self._cancellation)
    return dict(zip(stage.outputs, outputs))

  def _copy(self, leaf: symbols.Leaf) -> tf.Tensor:
    """Returns the server's tensor of a leaf, on this device."""
    with self._lock:
      if leaf not in self._copies:
        value = self._server[leaf]
        if not isinstance(leaf.type, tff.SequenceType):
          value = to_tensor(value, self.device)
        self._copies[leaf] = value
      return self._copies[leaf]


def to_tensor(value: Any, device: str) -> tf.Tensor:
  """Returns a value's tensor on a device; a dataset's variant on the CPU."""
  if isinstance(value, client_dataset.ClientDataset):
    return value.build()
  if isinstance(value, tf.data.Dataset):
    return client_dataset.to_variant(value)
  if not isinstance(value, tf.Tensor):
    with tf.device(device):
      value = aligned_arrays.to_tensor(value)
  # `tf.identity` takes some time for a tensor that is on the device already.
  if value.device == device:
    return value
  with tf.device(device):
    return tf.identity(value)
