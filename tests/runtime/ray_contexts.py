"""Ray runtimes for tests."""

import pytest

from tff_bn import runtime
from tff_bn.runtime import ray_context
from tff_bn.runtime import ray_options


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
