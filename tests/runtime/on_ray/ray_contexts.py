"""Ray runtimes for tests."""

import contextlib
import re

import pytest
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.runtime.on_ray import ray_context
from tff_bn.runtime.on_ray import ray_options


def make(**options) -> runtime.RayContext:
  """Makes a context that is not yet the default one."""
  return ray_context.RayContext(
      ray_options.RayOptions(
          **{
              'address': 'local',
              'num_workers': 2,
              'cpus_per_worker': None,
              'gpus_per_worker': None,
              'client_timeout': None,
              'worker_timeout': 120.0,
              **options,
          }
      )
  )


@pytest.fixture(scope='module')
def in_process_context():
  """Takes the place of the in-process runtime in the tests of that one."""
  context = make()
  yield context
  context.close()


@contextlib.contextmanager
def default(context):
  """Makes a context the default one for a `with` block."""
  before = tff.framework.get_context_stack().current
  tff.framework.set_default_context(context)
  try:
    yield context
  finally:
    tff.framework.set_default_context(before)


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
