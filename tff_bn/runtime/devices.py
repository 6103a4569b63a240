"""The devices of this process."""

from collections.abc import Sequence
import math
from typing import Optional

import tensorflow as tf

from tff_bn.runtime import execution

_CPU = 'CPU:0'
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
  known = {d.name: d for d in tf.config.list_logical_devices()}
  short = '/device:' + device.removeprefix('/').removeprefix('device:').upper()
  for name in (device, short):
    if name in known:
      with tf.device(name):
        return tf.identity(tf.constant(0)).device
  raise ValueError(
      f'There is no device {device!r}; the devices are'
      f' {", ".join(name.removeprefix("/device:") for name in known)}.'
  )


def client_devices(
    names: Optional[Sequence[str]], max_concurrent_clients: Optional[int]
) -> list[execution.Device]:
  """The devices for the clients.

  Args:
    names: Their names. Default: all GPUs, or the CPU if there is none.
    max_concurrent_clients: How many clients are computed at the same time, on
      all devices together. Default: one on a GPU, two on a CPU.

  Returns:
    The devices.

  Raises:
    ValueError: If there is no such device, or the number is less than 1.
  """
  if names is None:
    gpus = tf.config.list_logical_devices('GPU')
    names = [gpu.name for gpu in gpus] or [_CPU]
  if not names:
    raise ValueError('client_devices is empty; name at least one device.')
  names = [full_name(name) for name in names]
  if len(set(names)) < len(names):
    raise ValueError(f'client_devices names a device twice: {names}.')
  if max_concurrent_clients is None:
    return [
        execution.Device(name, execution.Lanes(_num_lanes(name), name))
        for name in names
    ]
  if max_concurrent_clients < 1:
    raise ValueError(
        f'max_concurrent_clients={max_concurrent_clients} must be at least 1.'
    )
  names = names[:max_concurrent_clients]
  lanes = math.ceil(max_concurrent_clients / len(names))
  return [
      execution.Device(name, execution.Lanes(lanes, name)) for name in names
  ]


def _num_lanes(name: str) -> int:
  is_cpu = tf.DeviceSpec.from_string(name).device_type == 'CPU'
  return _LANES_OF_A_CPU if is_cpu else _LANES_OF_A_GPU


def server_device(
    name: Optional[str], clients: Sequence[execution.Device]
) -> str:
  """The full name of the device for the server.

  Args:
    name: Its name. Default: the clients' device if they have only one, else
      the CPU.
    clients: The clients' devices.

  Returns:
    The full name.

  Raises:
    ValueError: If there is no such device.
  """
  if name is not None:
    return full_name(name)
  if len(clients) == 1 and clients[0].worker is None:
    return clients[0].name
  return full_name(_CPU)
