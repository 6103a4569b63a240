"""What a Ray runtime is asked for. Importing this module imports no Ray."""

import dataclasses
import math
import os
from typing import Optional

import tensorflow as tf

LOCAL = 'local'


class WorkersLostError(RuntimeError):
  """No worker is left that can go on with a computation."""


@dataclasses.dataclass(frozen=True)
class RayOptions:
  """The arguments of `tff_bn.runtime.ray_runtime`, see there."""

  address: Optional[str]
  num_workers: Optional[int]
  cpus_per_worker: Optional[int]
  gpus_per_worker: Optional[float]
  client_timeout: Optional[float]
  worker_timeout: float

  def __post_init__(self):
    if self.address is not None and not self.address:
      raise ValueError(
          "address='' is not understood; it must be 'local', 'auto' or"
          " 'HOST:PORT'."
      )
    for name, lowest in (('num_workers', 1), ('cpus_per_worker', 1)):
      value = getattr(self, name)
      if value is not None and value < lowest:
        raise ValueError(f'{name}={value} must be at least {lowest}.')
    gpus = self.gpus_per_worker
    if gpus is not None and not 0 <= gpus <= 1:
      raise ValueError(
          f'gpus_per_worker={gpus} must be from 0 to 1: a worker computes on'
          ' one device, and several may share one.'
      )
    for name in ('client_timeout', 'worker_timeout'):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise ValueError(f'{name}={value} must be more than 0 seconds.')

  def for_cluster(self, num_gpus: float) -> 'RayOptions':
    """Replaces what depends on the cluster.

    Args:
      num_gpus: The number of GPUs of the cluster.

    Returns:
      Options with numbers of CPUs and GPUs.
    """
    gpus = self.gpus_per_worker
    if gpus is None:
      gpus = 1 if num_gpus >= 1 else 0
    cpus = self.cpus_per_worker
    if cpus is None:
      cpus = 1 if gpus else default_cpus_per_worker()
    return dataclasses.replace(self, cpus_per_worker=cpus, gpus_per_worker=gpus)

  @property
  def needs(self) -> dict[str, float]:
    """What a worker takes of the resources of its machine, by Ray's names."""
    needs = {'CPU': self.cpus_per_worker, 'GPU': self.gpus_per_worker}
    return {name: number for name, number in needs.items() if number}

  def describe_needs(self) -> str:
    """The same in words."""
    needs = [f'{number:g} {name}' for name, number in self.needs.items()]
    return f'a worker needs {" and ".join(needs)}'


def num_threads() -> int:
  """The number of threads of an operation of TensorFlow on this CPU.

  The bits of its results depend on it.
  """
  configured = tf.config.threading.get_intra_op_parallelism_threads()
  from_environment = os.environ.get('TF_NUM_INTRAOP_THREADS', '')
  if not configured and from_environment.isdecimal():
    configured = int(from_environment)
  return configured or len(os.sched_getaffinity(0))


def default_cpus_per_worker() -> int:
  """As in one process, two clients are computed at a time on a machine."""
  return math.ceil(num_threads() / 2)
