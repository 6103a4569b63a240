"""Tests that workers with different results are not used."""

import os
import signal

from absl.testing import absltest
import contexts
import pytest
import ray_contexts
import ray_example

from tff_bn.imports import versions

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def context():
  """A context with two workers, on a cluster of two cores."""
  from tff_bn.runtime.on_ray import ray_cluster

  with ray_cluster.connected(ray_contexts.options(cpus_per_worker=1)):
    context = _make()
    yield context
    context.close()


def _make(**options):
  return ray_contexts.make(address=None, cpus_per_worker=1, **options)


def _name():
  return 'a'


def test_later_worker_that_differs_is_not_used(
    context, fed_bn, expected, tmp_path
):
  path = tmp_path / 'file'
  path.touch()

  def check():
    return path.exists()

  context.check_workers('the file', check, True)
  path.unlink()
  before = ray_contexts.pids(context)
  os.kill(before[0], signal.SIGKILL)
  with (
      contexts.default(context),
      absltest.TestCase().assertLogs(level='WARNING') as logs,
  ):
    while not any('differs' in line for line in logs.output):
      assert ray_example.rounds(fed_bn, ray_example.traps()) == expected
  assert any('the file gives False there' in line for line in logs.output)
  assert ray_contexts.pids(context) == before[1:]
  # The other worker stays for the next test.
  path.touch()
  context._workers._refusals.clear()


def _fail():
  raise OSError('There is no such file.')


# The tests before it use the workers, of which it leaves none.
def test_other_versions_and_answers(context, monkeypatch):
  context.check_workers('the machine', _name, 'a')
  name = 'tff_bn source'
  here = {**versions.versions(), name: 'something else'}
  monkeypatch.setattr(versions, 'versions', lambda: here)
  with pytest.raises(
      ValueError,
      match=(
          f'differs: its {name} is .*, here it is something else; the file'
          r' gives OSError: There is no such file\. there, here it gives c\.$'
      ),
  ):
    context.check_workers('the file', _fail, 'c')


@pytest.mark.usefixtures('context')
def test_cluster_without_room_is_refused_at_once():
  with pytest.raises(
      ValueError,
      match=r'room for 2 of 3 workers; a worker needs 1 CPU\.',
  ):
    _make(num_workers=3)
  with pytest.raises(ValueError, match='room for 0 of 1 .* 1 CPU and 1 GPU'):
    _make(num_workers=1, gpus_per_worker=1)


@pytest.mark.usefixtures('context')
def test_second_cluster_is_refused():
  with pytest.raises(ValueError, match="address='10.0.0.5:1'.*already"):
    ray_contexts.make(address='10.0.0.5:1')
