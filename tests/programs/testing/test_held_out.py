"""Tests of clients that take no part in training."""

import shutil
from unittest import mock

import csv_rows
import keras
import numpy as np
import pandas as pd
import pytest
import tiny_runs

from tff_bn import data as tff_bn_data
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.results import charts
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import held_out
from tff_bn.training import folder_lock

_FLAGS = (
    '--dataset=digits_domains',
    '--split=domains',
    '--model=mlp3',
    '--local_steps=2',
    '--batch_size=16',
    '--rounds=2',
    '--held_out_clients=inverted,blurred_shifted',
)


def _data():
  return tff_bn_data.split_dataset(
      tff_bn_data.load_dataset('digits_domains'), 'domains', None, 0
  )


def _layer(model):
  (layer,) = (
      layer
      for layer in model.layers
      if isinstance(layer, keras.layers.BatchNormalization)
  )
  return layer


def _accuracy(model, data, client):
  indices = data.test_indices[client]
  logits = model(data.dataset.x_test[indices], training=False).numpy()
  return (logits.argmax(axis=1) == data.dataset.y_test[indices]).mean()


def _expected(run, data, client, prior):
  """Computes the accuracies in Keras and NumPy."""
  model = tiny_runs.load(run)
  accuracies = dict(averaged=_accuracy(model, data, client))
  # mlp3 normalizes a linear function of the pixels.
  hidden = model.get_layer('hidden').get_weights()[0].astype(np.float64)
  x = data.dataset.x_train[data.train_indices[client]]
  values = x.reshape(len(x), -1) @ hidden
  layer = _layer(model)
  old = layer.moving_mean.numpy(), layer.moving_variance.numpy()
  layer.moving_mean.assign(values.mean(axis=0))
  layer.moving_variance.assign(values.var(axis=0))
  accuracies['reestimated'] = _accuracy(model, data, client)
  mean = (prior * old[0] + values.sum(axis=0)) / (prior + len(x))
  square = prior * (old[1] + old[0] ** 2) + np.square(values).sum(axis=0)
  layer.moving_mean.assign(mean)
  layer.moving_variance.assign(square / (prior + len(x)) - mean**2)
  accuracies['mixed'] = _accuracy(model, data, client)
  return accuracies


@pytest.mark.slow
@pytest.mark.parametrize(
    'algorithm', ['fedbn', pytest.param('fbn', marks=pytest.mark.slow)]
)
def test_files_of_a_run(algorithm, tmp_path, capsys):
  run = tmp_path / 'run'
  arguments = [
      *_FLAGS,
      f'--algorithm={algorithm}',
      '--held_out_prior=40',
      # Not of the held-out clients' data.
      '--augment=flip_crop',
      f'--output_dir={run}',
  ]
  assert train.run(arguments) == 0
  out = capsys.readouterr().out
  assert f'Held-out clients: {run / "held_out.csv"}' in out
  rows = csv_rows.read(run / 'held_out.csv')
  data = _data()
  last = csv_rows.read(run / 'metrics.csv')[-1]
  assert {row['round'] for row in rows} == {last['round']}
  assert [(row['client'], row['statistics']) for row in rows] == [
      (client, name)
      for client in ('inverted', 'blurred_shifted')
      for name in ('averaged', 'reestimated', 'mixed')
  ]
  for client in ('inverted', 'blurred_shifted'):
    expected = _expected(run, data, client, 40)
    for row in rows:
      if row['client'] == client:
        number = len(data.test_indices[client])
        assert int(row['num_examples']) == number
        np.testing.assert_allclose(
            float(row['accuracy']),
            expected[row['statistics']],
            # One example.
            atol=1.01 / number,
        )
        assert np.isfinite(float(row['loss']))
  table = csv_rows.cells(out)
  assert table[0] == ['Client', 'averaged, %', 'reestimated, %', 'mixed, %']
  assert table[2][0] == 'inverted'
  assert table[2][1] == f'{100 * float(rows[0]["accuracy"]):.1f}'
  page = (run / 'report.html').read_text(encoding='utf-8')
  assert 'id="held_out"' in page
  for line in table[2:]:
    cells = [f'<td class="text">{line[0]}</td>']
    cells += [f'<td>{cell}</td>' for cell in line[1:]]
    assert ''.join(cells) in page


def _trained_in_keras(run, data, client, epochs):
  """Trains the client's batch normalization in Keras, and evaluates it."""
  model = tiny_runs.load(run)
  x = data.dataset.x_train[data.train_indices[client]]
  values = model.get_layer('hidden')(x.reshape(len(x), -1)).numpy()
  layer = _layer(model)
  layer.moving_mean.assign(values.mean(axis=0))
  layer.moving_variance.assign(values.var(axis=0))
  for other in model.layers:
    other.trainable = other is layer
  model.compile(
      keras.optimizers.SGD(0.1),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
  )
  for epoch in range(1, epochs + 1):
    batches = data.client_dataset(
        [client], seed=0, round_num=epoch, batch_size=16, local_epochs=1
    )
    model.fit(batches, shuffle=False, verbose=0)
  indices = data.test_indices[client]
  return model.evaluate(
      data.dataset.x_test[indices], data.dataset.y_test[indices], verbose=0
  )


@pytest.mark.parametrize(
    'algorithm', ['fedbn', pytest.param('fedavg', marks=pytest.mark.slow)]
)
def test_clients_train_own_batch_norm(algorithm, tmp_path, capsys):
  run = tmp_path / 'run'
  arguments = [
      *(*_FLAGS, f'--algorithm={algorithm}', '--held_out_epochs=3'),
      *('--client_learning_rate=0.1', f'--output_dir={run}'),
  ]
  assert train.run(arguments) == 0
  out = capsys.readouterr().out
  rows = csv_rows.read(run / 'held_out.csv')
  _, held_out_data = _data().hold_out(['inverted', 'blurred_shifted'])
  trained = {r['client']: r for r in rows if r['statistics'] == 'trained'}
  assert list(trained) == ['inverted', 'blurred_shifted']
  for client, row in trained.items():
    loss, accuracy = _trained_in_keras(run, held_out_data, client, 3)
    assert float(row['loss']) == pytest.approx(loss, rel=1e-3)
    number = int(row['num_examples'])
    assert abs(float(row['accuracy']) - accuracy) < 1.01 / number
    (before,) = (
        float(r['loss'])
        for r in rows
        if (r['client'], r['statistics']) == (client, 'reestimated')
    )
    assert float(row['loss']) < before
  table = csv_rows.cells(out)
  assert table[0][-2:] == ['mixed, %', 'trained, %']
  assert '- trained: the second, then' in out


def test_training_without_batch_norm_to_train(tmp_path, capsys):
  arguments = [
      *(*_FLAGS, '--held_out_epochs=1', '--normalization=none'),
      f'--output_dir={tmp_path / "run"}',
  ]
  assert train.run(arguments) == 2
  error = ' '.join(capsys.readouterr().err.split())
  assert 'there is no batch normalization' in error
  arguments = ['--held_out_epochs=1', f'--output_dir={tmp_path / "run"}']
  assert train.run(arguments) == 2
  error = ' '.join(capsys.readouterr().err.split())
  assert '--held_out_epochs=1 has no effect without --held_out_clients' in error


def _compare(arguments):
  """Runs the program, but builds runs only to train them, and no plots."""
  with mock.patch.object(jobs, 'check'), mock.patch.object(charts, 'save'):
    assert compare.run(arguments) == 0


@pytest.fixture(scope='module')
def comparison(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'compare'
  arguments = [
      *_FLAGS,
      '--algorithms=fedavg,silobn',
      '--rounds=1',
      '--seeds=0',
      f'--output_dir={folder}',
  ]
  _compare(arguments)
  return folder, arguments


@pytest.mark.slow
def test_files_of_a_comparison(comparison):
  folder, arguments = comparison
  rows = csv_rows.read(folder / 'held_out.csv')
  assert len(rows) == 2 * 2 * 3
  of_runs = []
  for algorithm in ('fedavg', 'silobn'):
    run = folder / 'runs' / f'{algorithm}-seed0'
    of_runs += [
        dict(row, algorithm=algorithm, seed='0')
        for row in csv_rows.read(run / 'held_out.csv')
    ]
  assert rows == of_runs
  cells = csv_rows.cells((folder / 'held_out.md').read_text())
  assert cells[0][:3] == ['Algorithm', 'Client', 'averaged, %']
  assert [row[:2] for row in cells[2:]] == [
      [algorithm, client]
      for algorithm in ('fedavg', 'silobn')
      for client in ('inverted', 'blurred_shifted')
  ]
  (accuracy,) = (
      100 * float(row['accuracy'])
      for row in rows
      if (row['algorithm'], row['client'], row['statistics'])
      == ('silobn', 'inverted', 'mixed')
  )
  assert cells[4][4] == f'{accuracy:.1f}'
  page = (folder / 'report.html').read_text(encoding='utf-8')
  for line in cells[2:]:
    names = ''.join(f'<td class="text">{cell}</td>' for cell in line[:2])
    numbers = ''.join(f'<td>{cell}</td>' for cell in line[2:])
    assert names + numbers in page
  # A run that was stopped between its model and the test is tested again.
  path = folder / 'runs/fedavg-seed0/held_out.csv'
  text = path.read_text()
  path.unlink()
  _compare(arguments)
  assert path.read_text() == text


def test_table_averages_over_seeds():
  results = pd.DataFrame(
      [
          ('fedavg', 'a', 'averaged', '0.2'),
          ('fedavg', 'a', 'mixed', '0.5'),
          ('fedbn', 'a', 'averaged', '0.75'),
          ('fedbn', 'a', 'mixed', ''),
          ('fedavg', 'a', 'averaged', '0.4'),
          ('fedavg', 'a', 'mixed', ''),
      ],
      columns=['algorithm', 'client', 'statistics', 'accuracy'],
  ).assign(round='7')
  text = held_out.table(results, 'Algorithm')
  assert csv_rows.cells(text)[2:] == [
      ['fedavg', 'a', '30.0 ± 14.1', '–', '50.0'],
      ['fedbn', 'a', '75.0', '–', '–'],
  ]


@pytest.mark.slow
def test_held_out_clients_have_no_models(comparison, tmp_path, capsys):
  run = comparison[0] / 'runs/silobn-seed0'
  assert evaluate.run([f'--run={run}', f'--output_dir={tmp_path}']) == 0
  clients = {
      row['client'] for row in csv_rows.read(tmp_path / 'evaluation.csv')
  }
  assert clients == {'', 'plain', 'low_contrast', 'noisy_background'}
  # Other data has all its clients.
  other = [
      *(f'--run={run}', f'--output_dir={tmp_path}'),
      *('--dataset=digits', '--split=iid', '--num_clients=2'),
  ]
  assert evaluate.run(other) == 0
  clients = {
      row['client']
      for row in csv_rows.read(tmp_path / 'evaluation.csv')
      if row['dataset'] == 'digits'
  }
  assert clients == {'', 'client_0', 'client_1'}


def test_overwriting_removes_the_files(comparison, tmp_path):
  folder = tmp_path / 'run'
  shutil.copytree(comparison[0], folder)
  assert list(folder.rglob('held_out.*'))
  with folder_lock.claim(folder):
    run_folder.remove(folder)
  assert not list(folder.rglob('held_out.*'))


@pytest.mark.slow
def test_evaluation_has_the_scaling_of_the_training(tmp_path, capsys):
  run = tmp_path / 'run'
  arguments = [
      *('--split=iid', '--num_clients=2', '--model=mlp3', '--rounds=1'),
      *('--pixel_scaling=standardized', f'--output_dir={run}'),
  ]
  assert train.run(arguments) == 0
  other = np.random.default_rng(0).random((30, 8, 8, 1), np.float32) / 4
  y = np.arange(30) % 10
  path = tmp_path / 'other.npz'
  np.savez(path, x_train=other, y_train=y, x_test=other, y_test=y)
  command = [f'--run={run}', f'--dataset={path}', f'--output_dir={tmp_path}']
  assert evaluate.run(command) == 0
  row = csv_rows.read(tmp_path / 'evaluation.csv')[0]
  digits = tff_bn_data.load_dataset('digits').x_train.astype(np.float64)
  model = tiny_runs.load(run)
  logits = model((other - digits.mean()) / digits.std()).numpy()
  logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
  loss = -logits[np.arange(30), y].mean()
  np.testing.assert_allclose(float(row['loss']), loss, rtol=1e-4)
  capsys.readouterr()
  assert evaluate.run([*command, '--pixel_scaling=unit']) == 2
  assert '--pixel_scaling=unit cannot be changed' in capsys.readouterr().err
  np.savez(
      path,
      **dict.fromkeys(('x_train', 'x_test'), np.tile(other, 3)),
      **dict.fromkeys(('y_train', 'y_test'), y),
  )
  assert evaluate.run(command) == 2
  error = capsys.readouterr().err
  assert 'has 3 channels, but the run scales 1.' in error


def test_table_of_errors():
  results = pd.DataFrame(
      [('a', 'averaged', '4', '0.25', '1.5'), ('b', 'averaged', '0', '', '')],
      columns=['client', 'statistics', 'num_examples', 'mae', 'loss'],
  ).assign(round='7')
  text = held_out.table(results, 'Client')
  titles, _, *rows = csv_rows.cells(text)
  assert titles[:2] == ['Client', 'averaged']
  assert rows[0][:2] == ['a', '0.250']
  assert '- MAE: global model on the own test data' in text
