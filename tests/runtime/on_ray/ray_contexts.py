"""Ray runtimes for tests."""

import re

import pytest

from tff_bn import runtime
from tff_bn.runtime.on_ray import ray_context
from tff_bn.runtime.on_ray import ray_options


def options(**changes) -> ray_options.RayOptions:
  """Two workers on this machine, if nothing else is said."""
  defaults = {
      'address': 'local',
      'num_workers': 2,
      'cpus_per_worker': None,
      'gpus_per_worker': None,
      'client_timeout': None,
      'worker_timeout': 120.0,
  }
  return ray_options.RayOptions(**{**defaults, **changes})


def make(**changes) -> runtime.RayContext:
  """Makes a context that is not yet the default one."""
  return ray_context.RayContext(options(**changes))


@pytest.fixture(scope='module')
def in_process_context():
  """Takes the place of the in-process runtime in the tests of that one."""
  context = make()
  yield context
  context.close()


def pids(context):
  """The process ids of the workers that are ready."""
  return [
      int(re.search(r'process (\d+)', worker.place).group(1))
      for worker in context._workers.ready
  ]


def wait_for(context, number):
  """Waits until so many workers are ready."""
  with context._workers.lock:
    context._workers.grow()
    while len(context._workers.ready) < number:
      context._workers.wait()
