"""The printed code and the Keras files of a run, on raw samples."""

import textwrap

import csv_rows
import keras
import numpy as np
import pytest
import tiny_runs

from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.training import finished
from tff_bn.training import saved_models

_CLIENTS = [f'client_{n}' for n in range(4)]
_FLAGS = (
    *tiny_runs.FLAGS,
    '--algorithm=fedbn',
    '--client_learning_rate=0.1',
    '--local_steps=8',
    '--rounds=2',
    '--evaluate_every=1',
    '--validation_share=0.2',
    '--keep_best=loss',
    '--save_client_models=all',
    '--pixel_scaling=standardized',
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('exported') / 'run'
  assert train.run([*_FLAGS, f'--output_dir={folder}']) == 0
  return folder


def _raw(client=None):
  """Returns digits with pixels from 0 to 16, and their classes."""
  data = tiny_runs.split()
  x, y = 16 * data.dataset.x_test, data.dataset.y_test
  indices = slice(None) if client is None else data.test_indices[client]
  return x[indices], y[indices]


def _accuracies(run, folder, *flags):
  """Returns the accuracy of each client's model, and of the global one."""
  arguments = [f'--run={run}', f'--output_dir={folder}', *flags]
  assert evaluate.run(arguments) == 0
  return {
      row['client'] or None: float(row['accuracy'])
      for row in csv_rows.read(folder / 'evaluation.csv')
      if not row['client'] or row['model'] == 'own'
  }


def _accuracy(code, client, **names):
  """Runs code for raw digits of a client, or for all."""
  x, y = _raw(client)
  found = dict(names, x=x)
  exec(code, found)
  return np.mean(found['predicted'] == y)


def _code(printed):
  """Returns the code after `Model:`."""
  _, text = printed.split('Model:   ')
  text, _ = text.split("         and the clients' own models")
  return textwrap.dedent(f'{" " * 9}{text}')


def test_code_and_files(run, tmp_path, capsys):
  expected = _accuracies(run, tmp_path)
  assert list(expected) == [None, *_CLIENTS]
  assert len(set(expected.values())) > 2
  capsys.readouterr()
  assert train.run([*_FLAGS, f'--output_dir={run}']) == 0
  code = _code(capsys.readouterr().out)
  best = run / 'model/best'
  path = f'{best}/model.keras'
  assert path in code and 'values from 0 to 16' in code
  for client, accuracy in expected.items():
    of_client = code
    if client is not None:
      stem = saved_models.client_file_stem(client)
      of_client = code.replace(path, f'{best}/clients/{stem}.keras')
      assert of_client != code
    assert _accuracy(of_client, client) == pytest.approx(accuracy, abs=1e-6)


def test_files_of_the_last_round(run, tmp_path):
  expected = _accuracies(run, tmp_path, '--kept_round=last')
  for client, accuracy in expected.items():
    name = 'model'
    if client is not None:
      name = f'clients/{saved_models.client_file_stem(client)}'
    model = keras.models.load_model(run / f'model/{name}.keras')
    x, y = _raw(client)
    found = np.mean(model.predict(x, verbose=0).argmax(axis=1) == y)
    assert found == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.parametrize('which', ['best', 'last'])
def test_exported_clients(run, which, tmp_path, capsys):
  kept = f'--kept_round={which}'
  expected = _accuracies(run, tmp_path, kept)
  capsys.readouterr()
  arguments = [f'--run={run}', f'--output_dir={tmp_path}', kept]
  assert evaluate.run([*arguments, '--export_client=client_1,client_3']) == 0
  printed = capsys.readouterr().out
  lines, code = printed.split('To predict the classes of samples x with such')
  code = textwrap.dedent(code.split('\n', 1)[1])
  if which == 'best':
    title, lines = lines.split('\n', 1)
    assert title.startswith('Of round ')
  for client, line in zip(('client_1', 'client_3'), lines.split('\n')):
    start, loading = line.split(': ')
    assert start == client
    model = eval(loading, dict(keras=keras))
    found = _accuracy(code, client, model=model)
    assert found == pytest.approx(expected[client], abs=1e-6)


def test_another_command_is_another_run(run, capsys):
  manifest = finished.read_models_manifest(run / 'model')
  assert manifest['export'] == manifest['keras_inputs'] == 'raw'
  assert '--export' not in (run / 'flags.txt').read_text()
  arguments = [*_FLAGS, '--export=training', f'--output_dir={run}']
  assert train.run(arguments) == 2
  assert '--export (not set, now training)' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('scaling', 'message'),
    [('unit', 'does not scale them'), ('symmetric', 'subtracts 0.5 and div')],
)
def test_start_with_another_scaling(run, scaling, message, tmp_path, capsys):
  path = run / 'model/model.keras'
  arguments = [
      *(f for f in tiny_runs.FLAGS if not f.startswith('--model')),
      f'--initial_model={path}',
      f'--pixel_scaling={scaling}',
      f'--output_dir={tmp_path / "next"}',
  ]
  assert train.run(arguments) == 2
  error = capsys.readouterr().err
  assert f'--initial_model={path}: the file takes raw samples' in error
  assert message in error
  assert '--pixel_scaling' in error and '--export=training' in error
  assert not (tmp_path / 'next').exists()
