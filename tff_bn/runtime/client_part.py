"""What one device computes for clients."""

from collections.abc import Mapping, Sequence
import threading
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import client_dataset
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import symbols


class ClientPart:
  """The clients' part of one invocation of a plan, on one device.

  Several threads may use it at the same time, for different clients.
  """

  def __init__(
      self,
      plan: plan_lib.Plan,
      device: str,
      server: Mapping[symbols.Leaf, Any],
  ):
    """Initializes the part.

    Args:
      plan: The plan.
      device: The full name of the device.
      server: The server's values, tensors or arrays; at least those that the
        passes so far need. Each is copied to the device when it is first used.
    """
    self._plan = plan
    self._device = device
    self._server = server
    self._copies: dict[symbols.Leaf, tf.Tensor] = {}
    self._lock = threading.Lock()

  def begin(self, values: Sequence[Any]) -> dict[symbols.Leaf, tf.Tensor]:
    """Makes a client's part of the argument tensors on the device.

    Args:
      values: The values, in the order of the plan's `client_inputs`.

    Returns:
      The tensors by leaf, for `compute`.
    """
    return {
        leaf: to_tensor(value, self._device)
        for leaf, value in zip(self._plan.client_inputs, values, strict=True)
    }

  def compute(
      self, tensors: dict[symbols.Leaf, tf.Tensor], number: int
  ) -> None:
    """Adds to a client's tensors what it computes in a pass.

    Args:
      tensors: Its tensors after the pass before.
      number: The number of the pass.
    """
    stage = self._plan.passes[number].clients
    inputs = [
        tensors[leaf] if leaf in tensors else self._copy(leaf)
        for leaf in stage.inputs
    ]
    outputs = stage(inputs, self._device)
    tensors.update(zip(stage.outputs, outputs))

  def _copy(self, leaf: symbols.Leaf) -> tf.Tensor:
    """The server's tensor of a leaf, on the device."""
    with self._lock:
      if leaf not in self._copies:
        value = self._server[leaf]
        if not isinstance(leaf.type, tff.SequenceType):
          value = to_tensor(value, self._device)
        self._copies[leaf] = value
      return self._copies[leaf]


def to_tensor(value: Any, device: str) -> tf.Tensor:
  """Makes a part of an argument a tensor on a device.

  Args:
    value: An array, a tensor, a `tf.data.Dataset` or a `ClientDataset`.
    device: The full name of the device; datasets are on the CPU.

  Returns:
    The tensor.
  """
  if isinstance(value, client_dataset.ClientDataset):
    return value.build()
  if isinstance(value, tf.data.Dataset):
    return client_dataset.to_variant(value)
  with tf.device(device):
    return tf.identity(value)
