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


@pytest.mark.parametrize(
    ('kind', 'count', 'step'),
    [
        (_KILL, 1, 53),
        pytest.param(_KILL, 1, 71, marks=pytest.mark.slow),
        pytest.param(errno.ENOSPC, 1, 83, marks=pytest.mark.slow),
        pytest.param(errno.ENOSPC, _ALWAYS, 151, marks=pytest.mark.slow),
        pytest.param(errno.EIO, 1, 101, marks=pytest.mark.slow),
    ],
)
def test_the_same_command_comes_to_the_same_end(
    library, tmp_path, kind, count, step
):
  (whole,) = _train(library, tmp_path, [['whole', 0, 1, 1]])
  assert whole['status'] == 0
  assert whole['operations'] > 200
  model = training_fakes.build_model()
  expected = _snapshot(tmp_path / 'whole', model)
  numbers = range(1 + step // 2, whole['operations'], step)

  faulty = _train(
      library, tmp_path, [[f'{n}', kind, n, count] for n in numbers]
  )
  again = _train(library, tmp_path, [[f'{n}', 0, 1, 1] for n in numbers])

  for number, first, second in zip(numbers, faulty, again, strict=True):
    if kind == _KILL:
      assert first['status'] == -9
    elif first['status']:
      # Each message says which file it is.
      assert str(tmp_path / str(number)) in first['text'], first
    assert second['status'] == 0, (number, first, second)
    run_dir = tmp_path / str(number)
    assert _snapshot(run_dir, model) == expected, (number, first)
