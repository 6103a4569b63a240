"""The devices of this process on which clients and server are computed."""

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import math
from typing import Any, Optional

import tensorflow as tf

# The CPU of this process, by a name that holds in any `tf.device` block.
HOST = '/job:localhost/replica:0/task:0/device:CPU:0'

# On a CPU, one client's input pipeline and small operations leave cores idle.
LANES_OF_A_CPU = 2
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
  host = tf.DeviceSpec.from_string(HOST)
  known = [
      tf.DeviceSpec.from_string(logical.name)
      for logical in tf.config.list_logical_devices()
  ]
  for spec in known:
    if (spec.device_type, spec.device_index) == (
        asked.device_type,
        asked.device_index,
    ) and asked.job in (None, host.job):
      return host.make_merged_spec(spec).to_string()
  names = ', '.join(f'{d.device_type}:{d.device_index}' for d in known)
  raise ValueError(f'There is no device {device!r}; the devices are {names}.')


class Lanes:
  """Threads in which the clients of one device are computed.

  Attributes:
    number: How many clients are computed at the same time.
  """

  def __init__(self, number: int):
    """Starts no thread yet.

    Args:
      number: How many clients are computed at the same time.
    """
    self.number = number
    self._pool = concurrent.futures.ThreadPoolExecutor(
        number, thread_name_prefix='tff-bn-clients'
    )

  def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future:
    """Calls a function in one of the threads.

    Args:
      function: The function.

    Returns:
      The future of what it returns.

    Raises:
      tf.errors.UnavailableError: If the threads have ended, because the runtime
        was left.
    """
    try:
      return self._pool.submit(function)
    except RuntimeError as error:
      raise tf.errors.UnavailableError(
          None, None, 'The runtime was left; enter it again.'
      ) from error

  def close(self) -> None:
    """Ends the threads once they have done what they are at."""
    # Waits: TensorFlow must not end while a thread that has used it ends.
    self._pool.shutdown(wait=True, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class Device:
  """A device on which clients are computed.

  Attributes:
    name: Its full name in TensorFlow.
    lanes: Its threads.
  """

  name: str
  lanes: Lanes


def find_devices(
    names: Optional[Sequence[str]], max_concurrent_clients: Optional[int]
) -> list[Device]:
  """Finds devices, and gives them the threads that compute their clients.

  Args:
    names: Their names. Default: all GPUs, or the CPU if there is none.
    max_concurrent_clients: How many clients are computed at the same time, on
      all devices together. Default: one on a GPU, two on a CPU.

  Returns:
    The devices; not all, if fewer clients are to be computed at the same time.

  Raises:
    ValueError: If there is no such device.
  """
  if names is None:
    gpus = tf.config.list_logical_devices('GPU')
    names = [gpu.name for gpu in gpus] or [HOST]
  full = [full_name(name) for name in names]
  if not full or len(set(full)) < len(full):
    raise ValueError(
        f'client_devices={list(names)} must name at least one device, and'
        ' each only once.'
    )
  if max_concurrent_clients is not None:
    full = full[:max_concurrent_clients]
  devices = []
  for name in full:
    if max_concurrent_clients is not None:
      number = math.ceil(max_concurrent_clients / len(full))
    elif tf.DeviceSpec.from_string(name).device_type == 'CPU':
      number = LANES_OF_A_CPU
    else:
      number = _LANES_OF_A_GPU
    devices.append(Device(name, Lanes(number)))
  return devices
