"""Tests of runs that start from a file, and of frozen layers."""

import re
import shutil

import csv_rows
import keras
import numpy as np
import pytest
import tiny_runs

from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.runs import run_folder

_FLAGS = tuple(
    flag for flag in tiny_runs.FLAGS if not flag.startswith('--model=')
)


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  """A model that was trained in Keras, for a while."""
  folder = tmp_path_factory.mktemp('models')
  data = tiny_runs.split()
  keras.utils.set_random_seed(5)
  inputs = keras.Input((8, 8, 1))
  x = keras.layers.Flatten()(inputs)
  x = keras.layers.Dense(12, name='hidden')(x)
  x = keras.layers.BatchNormalization(name='norm')(x)
  x = keras.layers.ReLU()(x)
  model = keras.Model(inputs, keras.layers.Dense(10, name='logits')(x))
  tiny_runs.train(
      model, tiny_runs.batches(data, 'client_0', local_steps=3), 0.1
  )
  path = folder / 'pretrained.keras'
  model.save(path)
  return path


def _train(file, folder, *arguments):
  return train.run(
      [
          *_FLAGS,
          f'--initial_model={file}',
          '--algorithm=fbn',
          *arguments,
          f'--output_dir={folder}',
      ]
  )


@pytest.fixture(scope='module')
def finished(file, tmp_path_factory):
  """A run that starts from a copy of the file, and that copy."""
  folder = tmp_path_factory.mktemp('runs')
  copy = shutil.copy(file, folder / 'copy.keras')
  assert _train(copy, folder / 'run', '--frozen_layers=hidden') == 0
  return folder / 'run', copy


@pytest.fixture
def run(finished, tmp_path):
  """A copy of the run, and its file, which is back at its place at the end."""
  folder, file = finished
  content = file.read_bytes()
  yield shutil.copytree(folder, tmp_path / 'run'), file
  file.write_bytes(content)


@pytest.mark.slow
def test_round_0_has_the_predictions_of_the_file(finished, file):
  folder, _ = finished
  rows = csv_rows.read(folder / 'metrics.csv')
  assert rows[0]['round'] == '0'
  accuracy, loss = tiny_runs.evaluate(
      keras.models.load_model(file), tiny_runs.split()
  )
  assert float(rows[0]['test_loss']) == pytest.approx(loss, rel=1e-5)
  assert float(rows[0]['test_accuracy']) == pytest.approx(accuracy, rel=1e-5)
  # What is not frozen is trained.
  before, after = keras.models.load_model(file), tiny_runs.load(folder)
  for layer in ('hidden', 'norm', 'logits'):
    pairs = zip(before.get_layer(layer).weights, after.get_layer(layer).weights)
    same = [np.array_equal(a, b) for a, b in pairs]
    assert same == [layer == 'hidden'] * len(same)
  # Kernel and bias of the last layer; scale, shift, mean and variance. The
  # server sends them once, and so do four clients.
  num_values = 10 * (12 + 1) + 4 * 12
  assert float(rows[-1]['megabytes']) == pytest.approx(
      5 * 4 * num_values / 2**20
  )


def test_flags(finished):
  folder, file = finished
  flags = run_folder.read_flags(folder)
  assert flags['initial_model'] == str(file)
  assert re.fullmatch('[0-9a-f]{64}', flags['initial_model_sha256'])
  assert flags['frozen_layers'] == 'hidden'
  # These have no effect.
  assert not flags.keys() & {'model', 'normalization', 'precision', 'pan'}


def test_evaluation_needs_trust(run, capsys):
  folder, file = run
  assert evaluate.run([f'--run={folder}']) == 2
  error = capsys.readouterr().err
  assert f'--initial_model={file} is a model file, which can contain' in error
  assert '--trust_run' in error
  assert evaluate.run([f'--run={folder}', '--trust_run']) == 0
  first, *_ = csv_rows.read(folder / 'evaluation.csv')
  rows = csv_rows.read(folder / 'metrics.csv')
  assert float(first['loss']) == pytest.approx(float(rows[-1]['test_loss']))


def test_the_same_command_finds_the_run_finished(run, capsys):
  folder, file = run
  assert _train(file, folder, '--frozen_layers=hidden') == 0
  assert 'This run is finished.' in capsys.readouterr().out


def test_a_changed_file(run, capsys):
  folder, file = run
  model = keras.models.load_model(file)
  model.get_layer('norm').gamma.assign(np.full(12, 0.5))
  model.save(file)
  flags = '--frozen_layers=hidden', '--rounds=2'
  assert _train(file, folder, *flags) == 2
  error = capsys.readouterr().err
  assert 'holds a run with other flags: --initial_model_sha256' in error
  assert evaluate.run([f'--run={folder}', '--trust_run']) == 2
  error = capsys.readouterr().err
  assert f'--initial_model={file}: the file has changed.' in error


@pytest.mark.slow
def test_more_rounds_and_a_missing_file(run, capsys):
  folder, file = run
  flags = '--frozen_layers=hidden', '--rounds=2'
  assert _train(file, folder, *flags) == 0
  assert [row['round'] for row in csv_rows.read(folder / 'metrics.csv')] == [
      *('0', '2')
  ]
  file.unlink()
  assert _train(file, folder, *flags) == 2
  error = capsys.readouterr().err
  assert f'--initial_model={file}: there is no such file.' in error


@pytest.mark.slow
def test_the_model_of_a_run(finished, tmp_path):
  """A run's model.keras has batch normalization of this package."""
  earlier, _ = finished
  assert _train(earlier / 'model/model.keras', tmp_path / 'next') == 0
  rows = csv_rows.read(tmp_path / 'next/metrics.csv')
  before = csv_rows.read(earlier / 'metrics.csv')
  assert rows[0]['test_loss'] == before[-1]['test_loss']
