"""What the tests of Ray need."""

import pytest
import ray_example

from tff_bn import runtime


@pytest.fixture(scope='module')
def fed_bn():
  """A process whose clients keep something."""
  return ray_example.build('build_fed_bn')


@pytest.fixture(scope='module')
def expected(fed_bn):
  """What comes of its rounds in process."""
  with runtime.in_process_runtime():
    return ray_example.rounds(fed_bn, ray_example.traps())


@pytest.fixture
def trap(tmp_path):
  """A file; who removes it is trapped."""
  path = tmp_path / 'trap'
  path.touch()
  return path


@pytest.fixture
def quick_to_notice(monkeypatch):
  """Workers that hang are noticed sooner."""
  from tff_bn.runtime.on_ray import ray_workers

  monkeypatch.setattr(ray_workers, '_QUIET_SECONDS', 0.5)
  monkeypatch.setattr(ray_workers, '_HANG_SECONDS', 2.0)
