"""The options of the Ray runtime. This module does not import Ray."""

import dataclasses
import math
from typing import Optional

from tff_bn.common import cores

LOCAL = 'local'


class WorkersLostError(RuntimeError):
  """Raised if no worker is left to continue a computation."""


@dataclasses.dataclass(frozen=True)
class RayOptions:
  """The arguments of `tff_bn.runtime.ray_runtime`, which documents them."""

  address: Optional[str]
  num_workers: Optional[int]
  cpus_per_worker: Optional[int]
  gpus_per_worker: Optional[float]
  client_timeout: Optional[float]
  worker_timeout: float

  def __post_init__(self):
    if self.address is not None and not self.address:
      raise ValueError(
          "address='' is not an address; it must be 'local', 'auto' or"
          " 'HOST:PORT'."
      )
    for name in ('num_workers', 'cpus_per_worker'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f'{name}={value} must be at least 1.')
    gpus = self.gpus_per_worker
    if gpus is not None and not 0 <= gpus <= 1:
      raise ValueError(
          f'gpus_per_worker={gpus} must be from 0 to 1: a worker computes on'
          ' one device, and several workers may share a GPU.'
      )
    for name in ('client_timeout', 'worker_timeout'):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise ValueError(f'{name}={value} must be more than 0 seconds.')

  def for_cluster(self, num_gpus: float) -> 'RayOptions':
    """Returns the options with the numbers of CPUs and GPUs filled in.

    Args:
      num_gpus: The number of the cluster's GPUs.
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
    """The resources of a worker by Ray's names."""
    needs = {'CPU': self.cpus_per_worker, 'GPU': self.gpus_per_worker}
    return {name: number for name, number in needs.items() if number}

  def describe_needs(self) -> str:
    """Returns the resources of a worker in words."""
    needs = [f'{number:g} {name}' for name, number in self.needs.items()]
    return f'a worker needs {" and ".join(needs)}'


def default_cpus_per_worker() -> int:
  """Returns a client's cores if they are divided, else half of the machine's.

  As in process, at least two clients are then computed at a time.
  """
  return min(cores.per_operation(), math.ceil(cores.num_cores() / 2))
