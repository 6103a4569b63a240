"""Ray runtimes for tests."""

import re

import pytest

from tff_bn import runtime
from tff_bn.runtime.on_ray import ray_context
from tff_bn.runtime.on_ray import ray_options


def options(**changes) -> ray_options.RayOptions:
  """Returns options; the default is two workers on this machine."""
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
  """Returns a new context, without making it the default one."""
  return ray_context.RayContext(options(**changes))


@pytest.fixture(scope='module')
def in_process_context():
  """Replaces the in-process runtime in its own tests."""
  context = make()
  yield context
  context.close()


@pytest.fixture(scope='module')
def native_context():
  """Replaces TFF's own runtime, which other tests compare with this one."""
  context = runtime.InProcessContext()
  yield context
  context.close()


def pids(context):
  """Returns the process ids of the ready workers."""
  return [
      int(re.search(r'process (\d+)', worker.place).group(1))
      for worker in context._workers.ready
  ]


def wait_for(context, number):
  """Waits until at least a number of workers are ready."""
  with context._workers.lock:
    context._workers.grow()
    while len(context._workers.ready) < number:
      context._workers.wait()
