"""Programs on a disk that fails, or that are killed, at any file operation."""

import errno

import faults
import pytest
import training_fakes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not faults.IS_POSSIBLE, reason='needs gcc and LD_PRELOAD'
    ),
]
# They depend on the time.
_TIMES = ('client_seconds.csv', 'timing.json')


@pytest.fixture(scope='module')
def library(tmp_path_factory):
  return faults.build_library(tmp_path_factory.mktemp('library'))


def _snapshot(run_dir):
  """The tables and the models in a folder."""
  found = {}
  for path in sorted(run_dir.rglob('*')):
    name = path.relative_to(run_dir).as_posix()
    assert 'unusable' not in name
    if path.suffix == '.keras':
      found[name] = training_fakes.saved_weights(path)
    elif path.suffix in ('.csv', '.md', '.png', '.npy', '.txt'):
      found[name] = path.name in _TIMES or path.read_bytes()
  assert found
  return found


@pytest.mark.parametrize(
    ('task', 'operations'),
    [('train', 508), ('compare', 545), ('evaluate', 104), ('messages', 22)],
)
def test_after_a_fault_the_same_command_comes_to_the_same_end(
    task, operations, library, tmp_path
):
  kinds = [
      (*kind, round(share * operations))
      for kind, share in (
          ((faults.KILL, 1), 0.6),
          ((errno.ENOSPC, faults.ALWAYS), 0.9),
      )
  ]
  faults.check(library, f'faulty_programs:{task}', tmp_path, kinds, _snapshot)
