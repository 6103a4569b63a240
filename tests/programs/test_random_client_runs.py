"""Runs with --pixel_scaling=random_client, whose truth is NumPy and Keras."""

import json

import csv_rows
import keras
import numpy as np
import pytest
import tiny_runs

from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.runs import run_folder
from tff_bn.training import saved_models

_CLIENTS = tuple(f'client_{n}' for n in range(4))
_FLAGS = (
    *tiny_runs.FLAGS,
    '--pixel_scaling=random_client',
    '--client_learning_rate=0.1',
    '--local_steps=8',
    '--rounds=2',
    '--evaluate_every=1',
)


@pytest.fixture(
    scope='module',
    params=['fedbn', pytest.param('fedavg', marks=pytest.mark.slow)],
)
def run(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp('random_client') / request.param
  more = []
  if request.param == 'fedbn':  # Whose clients have own models.
    more = ['--save_client_models=all']
  arguments = [*_FLAGS, f'--algorithm={request.param}', *more]
  assert train.run([*arguments, f'--output_dir={folder}']) == 0
  return folder


def _statistics(client):
  data = tiny_runs.split()
  x = data.dataset.x_train[data.train_indices[client]].astype(np.float64)
  return x.mean((1, 2)).mean(0), x.std((1, 2)).mean(0)


def _scaling(client):
  if client is not None:
    return _statistics(client)
  return np.mean([_statistics(each) for each in _CLIENTS], 0)


def _test_data(client):
  data = tiny_runs.split()
  x, y = data.dataset.x_test, data.dataset.y_test
  return x, y, slice(None) if client is None else data.test_indices[client]


def _outputs(run, client, x):
  """The outputs of the model of a client, or of the global one."""
  mean, deviation = _scaling(client)
  own = client if (run / 'model/clients.npy').exists() else None
  return tiny_runs.load(run, own).predict((x - mean) / deviation, verbose=0)


@pytest.mark.parametrize('client', [None, 'client_1', 'client_3'])
def test_evaluation(run, client, tmp_path):
  arguments = [f'--run={run}', f'--output_dir={tmp_path}', '--each_source']
  assert evaluate.run(arguments) == 0
  x, y, positions = _test_data(client)
  right = _outputs(run, client, x).argmax(axis=1) == y
  rows = csv_rows.read(tmp_path / 'evaluation.csv')
  found = {row['client']: float(row['accuracy']) for row in rows}
  assert found[client or ''] == pytest.approx(right[positions].mean(), abs=1e-6)
  if client is not None:
    of_run = csv_rows.read(run / 'client_metrics.csv')
    (row,) = (row for row in of_run if row['client'] == client)
    assert float(row['accuracy']) == pytest.approx(found[client], abs=1e-6)
  # Each client's model has its own scaling on the data of all others, too.
  sources = csv_rows.read(tmp_path / run_folder.SOURCES_CSV)
  whole = {
      row['client']: float(row['accuracy'])
      for row in sources
      if not row['source']
  }
  assert list(whole) == ['', *_CLIENTS]
  assert whole[client or ''] == pytest.approx(right.mean(), abs=1e-6)


def test_whole_test_set_in_training(run):
  """If clients have own models, it is the mean over these."""
  has_own = (run / 'model/clients.npy').exists()
  x, y, _ = _test_data(None)
  accuracies = [
      np.mean(_outputs(run, client, x).argmax(axis=1) == y)
      for client in (_CLIENTS if has_own else [None])
  ]
  last = csv_rows.read(run / 'metrics.csv')[-1]
  expected = pytest.approx(np.mean(accuracies), abs=1e-6)
  assert float(last['test_accuracy']) == expected


@pytest.mark.parametrize('client', [None, 'client_2'])
def test_predictions_and_files(run, client, tmp_path, capsys):
  x, _, _ = _test_data(None)
  x = x[:20]
  expected = _outputs(run, client, x)
  np.save(tmp_path / 'x.npy', 16 * x)
  arguments = [f'--run={run}', f'--output_dir={tmp_path}']
  predict = [*arguments, f'--predict={tmp_path / "x.npy"}']
  path = run / 'model/model.keras'
  if client is not None:
    predict.append(f'--client={client}')
    assert evaluate.run([*arguments, f'--export_client={client}']) == 0
    stem = saved_models.client_file_stem(client)
    path = tmp_path / run_folder.EXPORTED / f'{stem}.keras'
    has_own = (run / 'model/clients.npy').exists()
    note = " (the global model with the client's scaling)"
    assert (note in capsys.readouterr().out) is not has_own
    if has_own:
      of_run = keras.models.load_model(run / f'model/clients/{stem}.keras')
      outputs = of_run.predict(16 * x, verbose=0)
      np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-4)
  # The file takes raw digits.
  outputs = keras.models.load_model(path).predict(16 * x, verbose=0)
  np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-4)
  assert evaluate.run(predict) == 0
  rows = csv_rows.read(tmp_path / 'predictions.csv')
  assert [int(row['predicted']) for row in rows] == list(expected.argmax(1))


def test_unknown_clients(run, tmp_path, capsys):
  for flag in ('--client=paris', '--export_client=paris'):
    arguments = [f'--run={run}', f'--output_dir={tmp_path}', flag]
    if flag.startswith('--client'):
      arguments.append(f'--predict={tmp_path / "x.npy"}')
    assert evaluate.run(arguments) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.slow
def test_client_that_comes_later(run, tmp_path):
  """Its statistics are computed, and its file has them."""
  dataset = tiny_runs.split().dataset
  x, y = 0.5 + 0.2 * dataset.x_train[:200], dataset.y_train[:200]
  path = tmp_path / 'paris.npz'
  np.savez(path, x_train=x, y_train=y, x_test=x[:50], y_test=y[:50])
  arguments = [
      *(f'--run={run}', f'--dataset=domains:paris=npz:{path}'),
      f'--output_dir={tmp_path}',
  ]
  assert evaluate.run(arguments) == 0
  model = tiny_runs.load(run)
  values = (x - x.mean((1, 2)).mean(0)) / x.std((1, 2)).mean(0)
  outputs = model.predict(values[:50], verbose=0)
  *_, row = csv_rows.read(tmp_path / 'evaluation.csv')
  assert row['client'] == 'paris'
  expected = np.mean(outputs.argmax(1) == y[:50])
  assert float(row['accuracy']) == pytest.approx(expected, abs=1e-6)
  assert evaluate.run([*arguments, '--adapt=statistics']) == 0
  stem = saved_models.client_file_stem('paris')
  adapted = keras.models.load_model(tmp_path / f'adapted_clients/{stem}.keras')
  found = adapted.predict(x[:50], verbose=0)
  alone = tiny_runs.alone(adapted).predict(values[:50], verbose=0)
  np.testing.assert_allclose(found, alone, rtol=1e-3, atol=1e-4)


def test_recorded_settings(run):
  manifest = json.loads((run / 'model/manifest.json').read_bytes())
  assert manifest['settings']['pixel_scaling'] == 'random_client'
  assert list(manifest['client_pixel_scaling']) == list(_CLIENTS)


@pytest.mark.slow
def test_held_out_clients(tmp_path):
  held_out = 'client_3'
  folder = tmp_path / 'run'
  arguments = [*_FLAGS, f'--held_out_clients={held_out}']
  assert train.run([*arguments, f'--output_dir={folder}']) == 0
  manifest = json.loads((folder / 'model/manifest.json').read_bytes())
  assert list(manifest['client_pixel_scaling']) == list(_CLIENTS[:3])
  data = tiny_runs.split()
  mean, deviation = _statistics(held_out)
  positions = data.test_indices[held_out]
  x = (data.dataset.x_test[positions] - mean) / deviation
  outputs = tiny_runs.load(folder).predict(x, verbose=0)
  accuracy = np.mean(outputs.argmax(1) == data.dataset.y_test[positions])
  row, *_ = csv_rows.read(folder / 'held_out.csv')
  assert row['statistics'] == 'averaged'
  assert float(row['accuracy']) == pytest.approx(accuracy, abs=1e-6)


def test_samples_that_are_no_images(tmp_path, capsys):
  path = tmp_path / 'data.npz'
  x, y = np.ones([8, 5]), np.arange(8) % 2
  np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
  arguments = [
      *(f'--dataset=npz:{path}', '--model=mlp3', '--num_clients=2'),
      *('--split=iid', '--pixel_scaling=random_client'),
      f'--output_dir={tmp_path / "run"}',
  ]
  assert train.run(arguments) == 2
  assert '--pixel_scaling=random_client is for' in capsys.readouterr().err
