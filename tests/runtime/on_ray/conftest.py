"""Fixtures for the tests of Ray."""

import pytest
import ray_example

from tff_bn import runtime


def pytest_collection_modifyitems(items):
  """Repeats no slow variant of the in-process runtime's tests on Ray.

  The variants differ in what is computed, but not in how Ray distributes it.
  """
  items[:] = [
      item
      for item in items
      if item.path.name != 'test_ray_as_in_process.py'
      or not _is_slow_variant(item)
  ]


def _is_slow_variant(item):
  """Whether the test's parameters are marked, not the test or the module."""
  marks = item.callspec.marks if hasattr(item, 'callspec') else []
  return any(mark.name == 'slow' for mark in marks)


@pytest.fixture(scope='session')
def fed_bn():
  """A process with client states."""
  return ray_example.build('build_fed_bn')


@pytest.fixture(scope='session')
def expected(fed_bn):
  """The result of its rounds in process."""
  with runtime.in_process_runtime():
    return ray_example.rounds(fed_bn, ray_example.traps())


@pytest.fixture
def trap(tmp_path):
  """The file that arms a trap, see `ray_example.Trap`."""
  path = tmp_path / 'trap'
  path.touch()
  return path


@pytest.fixture
def quick_to_notice(monkeypatch):
  """Makes the program notice hanging workers sooner."""
  from tff_bn.runtime.on_ray import ray_workers

  monkeypatch.setattr(ray_workers, '_QUIET_SECONDS', 0.5)
  monkeypatch.setattr(ray_workers, '_HANG_SECONDS', 2.0)
