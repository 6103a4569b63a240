"""Training on a disk that fails, or that is killed, at any file operation."""

import errno

import faults
import numpy as np
import pytest
import training_fakes

from tff_bn import training
from tff_bn.training import saved_models

pytestmark = pytest.mark.skipif(
    not faults.IS_POSSIBLE, reason='needs gcc and LD_PRELOAD'
)


@pytest.fixture(scope='module')
def library(tmp_path_factory):
  return faults.build_library(tmp_path_factory.mktemp('library'))


def _snapshot(run_dir):
  """What must not depend on faults."""
  assert training.is_finished(run_dir)
  assert not list(run_dir.rglob('unusable*'))
  model = training_fakes.build_model()
  found = []
  for manifest in sorted((run_dir / 'model').rglob('manifest.json')):
    saved = saved_models.SavedModels(manifest.parent)
    weights = [saved.weights(model, c) for c in [None, *saved.client_ids]]
    found.append(
        [[np.asarray(v).tobytes() for v in w[0] + w[1]] for w in weights]
    )
  tables = ('metrics.csv', 'client_metrics.csv')
  return [(run_dir / name).read_bytes() for name in tables], found


@pytest.mark.slow
@pytest.mark.parametrize('task', ['train', 'keep_best'])
def test_after_a_fault_the_same_command_comes_to_the_same_end(
    task, library, tmp_path
):
  kinds = [
      (faults.KILL, 1, 71),
      (errno.ENOSPC, 1, 137),
      (errno.ENOSPC, faults.ALWAYS, 211),
      (errno.EIO, 1, 163),
  ]
  task = f'faulty_training:{task}'
  whole = faults.check(library, task, tmp_path, kinds, _snapshot)
  assert whole['operations'] > 200
