"""Tests of evaluations on clients that came after the training."""

import csv_rows
import keras
import numpy as np
import pytest
import tiny_runs

from tff_bn.programs import evaluate
from tff_bn.programs import train

_NUM_CLASSES = 3
_FLAGS = (
    *('--model=mlp3', '--rounds=1', '--local_steps=2', '--batch_size=6'),
    '--client_learning_rate=0.1',
)


def _write(path, seed, scale, shift):
  """Writes images whose brightness and contrast are those of a domain."""
  rng = np.random.default_rng(seed)
  arrays = {}
  for part, number in (('train', 30), ('test', 21)):
    y = np.arange(number) % _NUM_CLASSES
    x = rng.normal(y[:, None, None], 0.7, (number, 4, 4))
    arrays |= {f'x_{part}': np.float32(scale * x + shift), f'y_{part}': y}
  np.savez(path, **arrays)


@pytest.fixture(scope='module')
def domains(tmp_path_factory):
  """The files of two domains that train and of two others."""
  folder = tmp_path_factory.mktemp('domains')
  for seed, (name, scale, shift) in enumerate(
      [('rome', 1, 0), ('wien', -1, 1), ('paris', 4, -3), ('oslo', -2, 9)]
  ):
    _write(folder / f'{name}.npz', seed, scale, shift)
  return folder


def _train(folder, domains, *arguments):
  dataset = f'domains:rome={domains}/rome.npz,wien={domains}/wien.npz'
  arguments = [*_FLAGS, *arguments, f'--dataset={dataset}']
  assert train.run([*arguments, f'--output_dir={folder}']) == 0
  return folder


@pytest.fixture(scope='module')
def run(tmp_path_factory, domains):
  """A run whose clients are the domains, with own models."""
  return _train(
      tmp_path_factory.mktemp('runs') / 'fedbn',
      domains,
      *('--algorithm=fedbn', '--split=domains', '--clients_per_round=2'),
      '--num_clients=2',
  )


def _evaluate(run, folder, *arguments):
  arguments = [*arguments, f'--run={run}', f'--output_dir={folder}']
  assert evaluate.run(arguments) == 0
  return csv_rows.read(folder / 'evaluation.csv')


def _expected_loss(model, path, statistics_of=()):
  """Computes the test loss in Keras, with the statistics of training data."""
  test = np.load(path)
  if statistics_of:
    # mlp3 normalizes a linear function of the pixels.
    hidden = model.get_layer('hidden').get_weights()[0].astype(np.float64)
    x = np.concatenate([np.load(p)['x_train'] for p in statistics_of])
    values = x.reshape(len(x), -1) @ hidden
    (norm,) = (
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    )
    norm.moving_mean.assign(values.mean(axis=0))
    norm.moving_variance.assign(values.var(axis=0))
  logits = model(test['x_test'][..., None], training=False)
  return float(
      keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
          test['y_test'], logits
      )
  )


@pytest.mark.parametrize(
    ('dataset', 'recorded', 'client', 'model'),
    [
        ('{}/paris.npz', '{}/paris.npz', 'paris', 'global'),
        pytest.param(
            *('npz:{}/paris.npz', 'npz:{}/paris.npz', 'paris', 'global'),
            marks=pytest.mark.slow,
        ),
        (
            'domains:Paris={}/paris.npz',
            'domains:Paris={}/paris.npz',
            'Paris',
            'global',
        ),
        # A client that trained, with new data.
        (
            'domains:wien={}/paris.npz',
            'domains:wien={}/paris.npz',
            'wien',
            'own',
        ),
    ],
)
def test_one_new_client(
    run, domains, tmp_path, dataset, recorded, client, model
):
  rows = _evaluate(run, tmp_path, f'--dataset={dataset.format(domains)}')
  assert [row['client'] for row in rows] == ['', client]
  assert [row['model'] for row in rows] == ['global', model]
  assert {row['dataset'] for row in rows} == {recorded.format(domains)}
  assert {row['num_examples'] for row in rows} == {'21'}
  path = domains / 'paris.npz'
  expected = [
      _expected_loss(tiny_runs.load(run), path),
      _expected_loss(
          tiny_runs.load(run, client if model == 'own' else None), path
      ),
  ]
  np.testing.assert_allclose(
      [float(row['loss']) for row in rows], expected, rtol=1e-4
  )


def test_statistics_are_those_of_the_evaluated_client(
    run, domains, tmp_path, capsys
):
  """Of a client's own training data; on the whole test set, of all clients."""
  names = ('paris', 'wien', 'oslo')
  paths = [domains / f'{name}.npz' for name in names]
  dataset = ','.join(f'{n}={p}' for n, p in zip(names, paths))
  rows = _evaluate(
      run, tmp_path, f'--dataset=domains:{dataset}', '--reestimate_statistics'
  )
  assert [(row['client'], row['model']) for row in rows] == [
      ('', 'global'),
      ('paris', 'global'),
      ('wien', 'own'),
      ('oslo', 'global'),
  ]
  expected = [
      np.mean([_expected_loss(tiny_runs.load(run), p, paths) for p in paths]),
      _expected_loss(tiny_runs.load(run), paths[0], paths[:1]),
      _expected_loss(tiny_runs.load(run, 'wien'), paths[1], paths[1:2]),
      _expected_loss(tiny_runs.load(run), paths[2], paths[2:]),
  ]
  np.testing.assert_allclose(
      [float(row['loss']) for row in rows], expected, rtol=1e-4
  )
  table = csv_rows.cells(capsys.readouterr().out)
  assert table[0][2] == 'BN statistics from'
  assert [row[2] for row in table[2 : 3 + len(names)]] == [
      'training data of all clients',
      *(f'training data of {name} alone' for name in names),
  ]


@pytest.mark.slow
def test_new_client_of_a_run_whose_clients_are_no_domains(domains, tmp_path):
  run = _train(
      tmp_path / 'run',
      domains,
      *('--algorithm=fedavg', '--split=iid', '--num_clients=6'),
      *('--clients_per_round=4', '--attack=label_flip', '--num_attackers=2'),
  )
  dataset = f'--dataset=domains:paris={domains}/paris.npz'
  rows = _evaluate(run, tmp_path, dataset)
  assert [row['client'] for row in rows] == ['', 'paris']
  expected = _expected_loss(tiny_runs.load(run), domains / 'paris.npz')
  assert float(rows[1]['loss']) == pytest.approx(expected, rel=1e-4)
  # The split that the command gives is used.
  rows = _evaluate(run, tmp_path / '2', dataset, '--split=iid')
  assert [row['client'] for row in rows][1:] == [
      f'client_{n}' for n in range(6)
  ]


def test_unknown_client_is_not_taken_for_another(run, capsys):
  assert evaluate.run([f'--run={run}', '--export_client=paris']) == 2
  error = capsys.readouterr().err
  assert 'the run has no such client' in error
  assert 'clients is 2: rome, wien.' in error
  assert 'Did you mean' not in error
  assert f'tff-bn-evaluate --run={run} lists all' in error
  assert '--dataset=domains:paris=DATASET' in error
  # A misspelled one is.
  assert evaluate.run([f'--run={run}', '--export_client=wienn']) == 2
  assert 'Did you mean wien?' in capsys.readouterr().err
