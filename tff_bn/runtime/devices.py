"""The devices of this process that compute the clients and the server."""

from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import math
from typing import Optional, TypeVar

import tensorflow as tf

from tff_bn.common import checks
from tff_bn.common import cores

_Result = TypeVar('_Result')

# The full name of this process's CPU, which is valid in any `tf.device` block.
HOST = '/job:localhost/replica:0/task:0/device:CPU:0'

# On a CPU, one client's input pipeline and small operations leave cores idle.
_MIN_CLIENTS_PER_CPU = 2
_CLIENTS_PER_GPU = 1


def full_name(device: str) -> str:
  """Returns the full name, with job and task, of a device like `'GPU:1'`."""
  try:
    asked = tf.DeviceSpec.from_string(
        device if device.startswith('/') else f'/device:{device.upper()}'
    )
  except ValueError:
    asked = tf.DeviceSpec()  # The error below is clearer.
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


class Device:
  """A device, by its full name, that computes clients in threads.

  Attributes:
    name: The full name.
    num_threads: The number of threads.
    is_cpu: Whether it is a CPU.
    all_names: The full names of all logical CPUs, if the device stands for all
      of them; else its name.
  """

  def __init__(
      self, name: str, num_threads: int, all_names: Sequence[str] = ()
  ):
    self.name = name
    self.num_threads = num_threads
    self.all_names = all_names or [name]
    self.is_cpu = tf.DeviceSpec.from_string(name).device_type == 'CPU'
    self._pool = concurrent.futures.ThreadPoolExecutor(
        num_threads, thread_name_prefix='tff-bn-clients'
    )

  def submit(
      self, function: Callable[[], _Result]
  ) -> concurrent.futures.Future[_Result]:
    """Calls a function in one of the threads."""
    try:
      return self._pool.submit(function)
    except RuntimeError as error:
      raise tf.errors.UnavailableError(
          None, None, 'The runtime is closed; create a new one.'
      ) from error

  def close(self) -> None:
    """Ends the threads after the clients that are being computed."""
    # Waits: TensorFlow must not end while a thread that has used it ends.
    self._pool.shutdown(wait=True, cancel_futures=True)


def find_devices(
    names: Optional[Sequence[str]], max_concurrent_clients: Optional[int]
) -> list[Device]:
  """Finds the first `max_concurrent_clients` devices that compute clients.

  See `InProcessContext` for the arguments, their defaults and the errors.
  """
  all_names: list[str] = []
  if names is None:
    names = [gpu.name for gpu in tf.config.list_logical_devices('GPU')]
    if not names:
      names = [HOST]
      cpus = tf.config.list_logical_devices('CPU')
      all_names = [full_name(cpu.name) for cpu in cpus]
  if isinstance(names, str):
    raise TypeError(
        'client_devices must be a list of names, but is a single one; use'
        f' [{names!r}].'
    )
  checks.check_type(
      'client_devices', names, Sequence, 'be a list of names of devices'
  )
  full = [full_name(name) for name in names]
  if not full or len(set(full)) < len(full):
    raise ValueError(
        f'client_devices={list(names)} must name at least one device, and each'
        ' device only once.'
    )
  if max_concurrent_clients is not None:
    full = full[:max_concurrent_clients]
  devices = []
  for name in full:
    if max_concurrent_clients is not None:
      number = math.ceil(max_concurrent_clients / len(full))
    elif tf.DeviceSpec.from_string(name).device_type == 'CPU':
      number = max(_MIN_CLIENTS_PER_CPU, cores.num_concurrent())
    else:
      number = _CLIENTS_PER_GPU
    devices.append(Device(name, number, all_names))
  return devices


def share_gpus() -> None:
  """Keeps this process from reserving all memory of the GPUs it uses."""
  for gpu in tf.config.get_visible_devices('GPU'):
    with contextlib.suppress(RuntimeError):  # The GPU is in use already.
      tf.config.experimental.set_memory_growth(gpu, True)
