"""Training on a disk that fails, or that is killed, at any file operation."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys

import faulty_training
import numpy as np
import pytest
import training_fakes

from tff_bn import training
from tff_bn.training import saved_models

_HERE = pathlib.Path(__file__).parent
_KILL = 1
# More than a run needs, so the fault lasts to its end.
_ALWAYS = 10**6
pytestmark = pytest.mark.skipif(
    not shutil.which('gcc') or sys.platform != 'linux',
    reason='needs gcc and LD_PRELOAD',
)


@pytest.fixture(scope='module')
def library(tmp_path_factory):
  path = tmp_path_factory.mktemp('library') / 'file_faults.so'
  subprocess.run(
      ['gcc', '-shared', '-fPIC', '-O1', '-o', path]
      + [_HERE / 'file_faults.c', '-ldl'],
      check=True,
  )
  return path


def _train(library, folder, faults):
  """Trains with each fault; returns what came of it."""
  result = subprocess.run(
      [sys.executable, faulty_training.__file__, folder, json.dumps(faults)],
      env={
          **os.environ,
          'LD_PRELOAD': os.fspath(library),
          'TF_CPP_MIN_LOG_LEVEL': '3',
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      check=True,
  )
  return [json.loads(line) for line in result.stdout.splitlines()]


def _snapshot(run_dir, model):
  """What must not depend on faults."""
  assert training.is_finished(run_dir)
  assert not list(run_dir.rglob('*.part'))
  assert not list(run_dir.rglob('unusable*'))
  saved = saved_models.SavedModels(run_dir / 'model')
  weights = [saved.weights(model, c) for c in [None, *saved.client_ids]]
  return (
      (run_dir / 'metrics.csv').read_bytes(),
      [[np.asarray(v).tobytes() for v in w[0] + w[1]] for w in weights],
  )


def _check_faults(library, folder, faults):
  """After each fault, the same command ends as an undisturbed run does."""
  whole, *runs = _train(library, folder, faults)
  assert whole['status'] == 0
  assert whole['operations'] > 200
  assert len(runs) > len(faults)
  model = training_fakes.build_model()
  expected = _snapshot(folder / 'whole', model)
  for run in runs:
    first, second = run['pair']
    if run['kind'] == _KILL:
      assert first['status'] == -9
    elif first['status']:
      # Each message says which file it is.
      assert run['run_dir'] in first['text'], run
    assert second['status'] == 0, run
    assert _snapshot(pathlib.Path(run['run_dir']), model) == expected, run


@pytest.mark.slow
def test_after_a_fault_the_same_command_comes_to_the_same_end(
    library, tmp_path
):
  _check_faults(library, tmp_path, [(_KILL, 1, 149)])


@pytest.mark.slow
def test_more_faults(library, tmp_path):
  _check_faults(
      library,
      tmp_path,
      [
          (_KILL, 1, 71),
          (errno.ENOSPC, 1, 83),
          (errno.ENOSPC, _ALWAYS, 151),
          (errno.EIO, 1, 101),
      ],
  )
