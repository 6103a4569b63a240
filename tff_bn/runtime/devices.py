"""The devices on which clients and server are computed."""

from collections.abc import Sequence
import math
from typing import Optional

import tensorflow as tf

from tff_bn.runtime import execution
from tff_bn.runtime import remote_worker

# On a CPU, one client's input pipeline and small operations leave cores idle.
_LANES_OF_A_CPU = 2
_LANES_OF_A_GPU = 1


def full_name(device: str) -> str:
  """The full name of a device of this process.

  Args:
    device: A name such as `'GPU:1'`.

  Returns:
    Its name in TensorFlow, with job and task.

  Raises:
    ValueError: If there is no such device.
  """
  asked = tf.DeviceSpec.from_string(
      device if device.startswith('/') else f'/device:{device.upper()}'
  )
  host = tf.DeviceSpec.from_string(remote_worker.HOST)
  # With a cluster, the list has other machines' devices, too.
  known = [
      spec
      for spec in (
          tf.DeviceSpec.from_string(logical.name)
          for logical in tf.config.list_logical_devices()
      )
      if spec.job in (None, host.job)
  ]
  for spec in known:
    if (spec.device_type, spec.device_index) == (
        asked.device_type,
        asked.device_index,
    ) and asked.job in (None, host.job):
      return host.make_merged_spec(spec).to_string()
  names = ', '.join(f'{d.device_type}:{d.device_index}' for d in known)
  raise ValueError(f'There is no device {device!r}; the devices are {names}.')


def make_devices(
    places: Sequence[tuple[str, Optional[remote_worker.Worker]]],
    max_concurrent_clients: Optional[int],
) -> list[execution.Device]:
  """Gives devices the threads that compute their clients.

  Args:
    places: Each device's full name, and its worker (`None`: this process).
    max_concurrent_clients: How many clients are computed at the same time, on
      all devices together. Default: one on a GPU, two on a CPU.

  Returns:
    The devices; not all, if fewer clients are to be computed at the same time.
  """
  if max_concurrent_clients is not None:
    places = places[:max_concurrent_clients]
  devices = []
  for name, worker in places:
    if max_concurrent_clients is not None:
      number = math.ceil(max_concurrent_clients / len(places))
    elif tf.DeviceSpec.from_string(name).device_type == 'CPU':
      number = _LANES_OF_A_CPU
    else:
      number = _LANES_OF_A_GPU
    devices.append(execution.Device(name, execution.Lanes(number), worker))
  return devices


class LocalDevices:
  """Devices of this process.

  Attributes:
    devices: The devices.
  """

  def __init__(
      self,
      names: Optional[Sequence[str]],
      max_concurrent_clients: Optional[int],
  ):
    """Finds the devices.

    Args:
      names: Their names. Default: all GPUs, or the CPU if there is none.
      max_concurrent_clients: See `make_devices`.

    Raises:
      ValueError: If there is no such device.
    """
    if names is None:
      gpus = tf.config.list_logical_devices('GPU')
      names = [gpu.name for gpu in gpus] or [remote_worker.HOST]
    full = [full_name(name) for name in names]
    if not full or len(set(full)) < len(full):
      raise ValueError(
          f'client_devices={list(names)} must name at least one device, and'
          ' each only once.'
      )
    self.devices = make_devices(
        [(name, None) for name in full], max_concurrent_clients
    )

  def recover(
      self, devices: Sequence[execution.Device], error: Exception
  ) -> list[execution.Device]:
    """Raises the error: devices of this process are never lost alone."""
    del devices  # All of them go on working.
    raise error

  def close(self) -> None:
    """Ends the devices' threads."""
    for device in self.devices:
      device.lanes.close()
