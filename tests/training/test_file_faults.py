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
  """Trains with faults, and once more: the end is that of an undisturbed run.

  Args:
    library: The library that makes the faults.
    folder: For the runs.
    faults: A kind, a number of successive faulty operations, and a step: runs
      with the first fault after half a step, and after each further step.
  """
  (whole,) = _train(library, folder, [['whole', 0, 1, 1]])
  assert whole['status'] == 0
  assert whole['operations'] > 200
  model = training_fakes.build_model()
  expected = _snapshot(folder / 'whole', model)
  runs = [
      [f'{kind} {count} {number}', kind, number, count]
      for kind, count, step in faults
      for number in range(1 + step // 2, whole['operations'], step)
  ]

  faulty = _train(library, folder, runs)
  again = _train(library, folder, [[name, 0, 1, 1] for name, *_ in runs])

  for (name, kind, *_), first, second in zip(runs, faulty, again, strict=True):
    if kind == _KILL:
      assert first['status'] == -9
    elif first['status']:
      # Each message says which file it is.
      assert str(folder / name) in first['text'], first
    assert second['status'] == 0, (name, first, second)
    assert _snapshot(folder / name, model) == expected, (name, first)


def test_after_a_fault_the_same_command_comes_to_the_same_end(
    library, tmp_path
):
  _check_faults(library, tmp_path, [(_KILL, 1, 89), (errno.ENOSPC, 1, 149)])


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
