"""Tests of the analyses that train clients: divergence, matching, preference.

The expected training is written with Keras and a gradient tape.
"""

import re

import csv_rows
import numpy as np
import pytest
import tiny_runs

from tff_bn.papers import analyze as analyze_program
from tff_bn.papers import units

pytestmark = pytest.mark.slow

_SEEDS = (0, 1)
_LAYERS = ('hidden', 'norm', 'logits')


def _start(run, client):
  return tiny_runs.load(run, client if 'fedbn' in run.name else None)


def _clients(run, clients=None, seed=0, rate=0.5):
  """Returns the clients' models after a step in the second round."""
  data = tiny_runs.split(seed)
  models = {}
  for client in clients or data.client_ids:
    steps = tiny_runs.batches(data, client, seed=seed)
    models[client] = tiny_runs.train(_start(run, client), steps, rate)
  return models


def _divergence(models):
  return units.weight_divergence_by_layer(list(models))


def _values(rows, column, **which):
  return {
      row['layer']: float(row[column])
      for row in rows
      if which.items() <= row.items()
  }


@pytest.fixture(scope='module')
def divergence(comparison):
  return tiny_runs.analyze('weight_divergence', comparison)


@pytest.mark.parametrize(('algorithm', 'seed'), [('fedavg', 0), ('fedbn', 1)])
def test_weight_divergence(comparison, divergence, algorithm, seed):
  run = comparison / 'runs' / f'{algorithm}-seed{seed}'
  expected = _divergence(_clients(run, seed=seed).values())
  found = _values(
      divergence.rows, 'divergence', run=f'cmp {algorithm}', seed=str(seed)
  )
  assert list(found) == list(_LAYERS)
  assert found == pytest.approx(expected, rel=1e-4)
  # The clients have different batches.
  assert min(expected.values()) > 1e-3
  if algorithm == 'fedbn':  # They start from different models.
    ids = tiny_runs.split(seed).client_ids
    start = _divergence([tiny_runs.load(run, client) for client in ids])
    assert start['norm'] > 1e-3
    assert start['hidden'] == start['logits'] == 0


def test_table_of_weight_divergence(comparison, divergence):
  rows = divergence.rows
  assert list(rows[0]) == ['run', 'seed', 'layer', 'divergence']
  assert len(rows) == 2 * 2 * 3
  cells = csv_rows.cells(divergence.markdown)
  assert cells[0] == ['Layer', 'cmp fedavg', 'cmp fedbn']
  for line, layer in zip(cells[2:], _LAYERS, strict=True):
    values = [
        _values(rows, 'divergence', run='cmp fedbn', seed=str(seed))[layer]
        for seed in _SEEDS
    ]
    mean, spread = np.mean(values), np.std(values, ddof=1)
    assert (line[0], line[2]) == (layer, f'{mean:.4f} ± {spread:.4f}')
  for algorithm in ('fedavg', 'fedbn'):
    accuracies = []
    for seed in _SEEDS:
      run = comparison / 'runs' / f'{algorithm}-seed{seed}'
      metrics = csv_rows.read(run / 'metrics.csv')
      accuracies.append(100 * float(metrics[-1]['test_accuracy']))
    assert (
        f'Test accuracy of cmp {algorithm}: {np.mean(accuracies):.2f} % ±'
        f' {np.std(accuracies, ddof=1):.2f} over 2 seeds.'
    ) in divergence.markdown
    assert accuracies[0] != accuracies[1]


def test_a_run_alone(fedavg, divergence, tmp_path, capsys):
  result = tiny_runs.analyze('weight_divergence', fedavg, folder=tmp_path)
  printed = capsys.readouterr()
  assert printed.err.splitlines() == [
      f'[1/1] Loading {fedavg} …',
      '[1/1] Analyzing fedavg-seed0, seed 0 …',
  ]
  assert result.markdown in printed.out
  for name in ('weight_divergence.md', 'plots/weight_divergence.png'):
    assert str(tmp_path / name) in printed.out
  values = _values(result.rows, 'divergence', run='fedavg-seed0')
  assert values == _values(
      divergence.rows, 'divergence', run='cmp fedavg', seed='0'
  )
  assert '±' not in result.markdown
  metrics = csv_rows.read(fedavg / 'metrics.csv')
  accuracy = 100 * float(metrics[-1]['test_accuracy'])
  note = f'Test accuracy of fedavg-seed0: {accuracy:.2f} %.'
  assert note in result.markdown
  # The run changes the accuracy.
  assert metrics[0]['test_accuracy'] != metrics[-1]['test_accuracy']


@pytest.mark.parametrize(
    ('flags', 'rate', 'num_rounds'),
    [
        ({}, 0.1, 2),
        (
            dict(client_learning_rate_schedule='2:0.25,3:0'),
            0.1 * 0.25,
            1,
        ),
        (
            dict(local_steps=None, local_epochs=1, batch_size=200),
            0.1,
            3,
        ),
        (
            dict(
                local_steps=None,
                local_epochs=2,
                batch_size=100,
                client_momentum=0.5,
            ),
            0.1,
            1,
        ),
    ],
    ids=['steps', 'schedule', 'epochs', 'momentum'],
)
def test_local_training(fedavg, tmp_path, flags, rate, num_rounds):
  """Between two rounds, FedAvg weights clients by their examples."""
  run = tiny_runs.with_flags(
      fedavg, tmp_path / 'run', client_learning_rate=0.1, **flags
  )
  arguments = ['weight_divergence', run, f'--num_rounds={num_rounds}']
  result = tiny_runs.analyze(*arguments)
  data = tiny_runs.split()
  length = dict(local_steps=1)
  counts = [1, 1, 1, 1]
  if flags.get('local_epochs'):
    length = dict(local_epochs=flags['local_epochs'])
    counts = [len(samples) for samples in data.train_indices.values()]
  weights = tiny_runs.load(run).get_weights()
  by_round = []
  for round_num in range(2, 2 + num_rounds):
    models = []
    for client in data.client_ids:
      models.append(tiny_runs.load(run))
      models[-1].set_weights(weights)
      steps = tiny_runs.batches(
          data,
          client,
          round_num=round_num,
          batch_size=flags.get('batch_size', 8),
          **length,
      )
      momentum = flags.get('client_momentum', 0.0)
      tiny_runs.train(models[-1], steps, rate, momentum)
    by_round.append(_divergence(models))
    weights = [
        np.average(values, axis=0, weights=counts)
        for values in zip(*(model.get_weights() for model in models))
    ]
  expected = {x: np.mean([d[x] for d in by_round]) for x in _LAYERS}
  found = _values(result.rows, 'divergence')
  assert found == pytest.approx(expected, rel=1e-3)
  if num_rounds > 1:
    assert by_round[0] != pytest.approx(expected, rel=1e-2)
    assert f'in each of the {num_rounds} rounds' in result.markdown


def test_clients_with_their_own_models_train_one_round(
    comparison, fedbn, capsys
):
  before = sorted(comparison.rglob('*'))
  arguments = ['weight_divergence', f'--run={fedbn}', '--num_rounds=2']
  assert analyze_program.run(arguments) == 2
  assert '--num_rounds=2 is impossible' in capsys.readouterr().err
  assert sorted(comparison.rglob('*')) == before


def test_clients_of_weight_divergence(fedavg, tmp_path, capsys):
  run = tiny_runs.with_flags(fedavg, tmp_path / 'run', clients_per_round=1)
  assert analyze_program.run(['weight_divergence', f'--run={run}']) == 2
  error = capsys.readouterr().err
  assert 'trains one client in a round' in error and '--num_clients' in error
  arguments = ('weight_divergence', run, '--num_clients=2', '--seed=1')
  result = tiny_runs.analyze(*arguments)
  clients = tiny_runs.analyzed(fedavg).draw_clients(2, 1)
  expected = _divergence(_clients(fedavg, clients).values())
  found = _values(result.rows, 'divergence')
  assert found == pytest.approx(expected, rel=1e-4)


def _match(before, after, layer, x, y):
  del y
  return units.match_layers(before, after, layer, x).diagonal_share


def _prefer(before, after, layer, x, y):
  return units.agreeing_share(
      *(
          units.preferred_classes(units.preference_vectors(model, layer, x, y))
          for model in (before, after)
      )
  )


@pytest.mark.parametrize(
    ('name', 'column', 'measure'),
    [
        ('matching', 'diagonal_share', _match),
        ('preference', 'agreeing_share', _prefer),
    ],
)
def test_layers_before_and_after(
    fedavg, fedbn, tmp_path, name, column, measure
):
  # Larger steps move units to other places.
  runs = [
      tiny_runs.with_flags(run, tmp_path / run.name, client_learning_rate=4)
      for run in (fedavg, fedbn)
  ]
  layers = ('relu', 'logits')
  result = tiny_runs.analyze(
      name,
      runs,
      *('--num_clients=2', '--num_examples=200'),
      f'--layers={",".join(layers)}',
      folder=tmp_path / 'out',
  )
  analyzed = tiny_runs.analyzed(fedavg)
  x, y = analyzed.test_examples(200, 0)
  clients = analyzed.draw_clients(2, 0)
  expected = []
  for run in runs:
    after = _clients(run, clients, rate=4)
    for client in clients:
      for layer in layers:
        share = measure(_start(run, client), after[client], layer, x, y)
        size = '10' if layer == 'logits' else '30'
        expected.append((run.name, '0', client, layer, size, share))
  columns = ['run', 'seed', 'client', 'layer', 'units', column]
  assert list(result.rows[0]) == columns
  assert [tuple(row.values())[:-1] for row in result.rows] == [
      row[:-1] for row in expected
  ]
  # Rounding may change the match of one unit in 30.
  shares = [float(row[column]) for row in result.rows]
  truth = [row[-1] for row in expected]
  assert np.mean(np.isclose(shares, truth, atol=1e-6)) > 0.8
  np.testing.assert_allclose(shares, truth, atol=0.11)
  assert min(truth) < 0.9
  cells = csv_rows.cells(result.markdown)
  assert cells[0] == ['Layer', *(run.name for run in runs)]
  assert [line[0] for line in cells[2:]] == list(layers)
  assert re.fullmatch(r'[01]\.\d{3} ± 0\.\d{3}', cells[2][1])
  # Each unit is drawn for the first client of both runs.
  assert result.drawings.keys() == {name, f'{name}_units'}
  titles = [axes.get_title() for axes in result.drawings[f'{name}_units'].axes]
  firsts = [row for row in result.rows if row['client'] == clients[0]]
  assert titles == [
      f'{row["layer"]} [{float(row[column]):.3f}]' for row in firsts
  ]


@pytest.mark.parametrize(
    ('name', 'arguments', 'drawn'),
    [
        ('matching', ('--num_clients=2', '--seed=1'), (2, 1)),
        ('preference', (), (1, 0)),
    ],
)
def test_default_layers_and_clients(fedavg, tmp_path, name, arguments, drawn):
  result = tiny_runs.analyze(name, fedavg, *arguments, folder=tmp_path)
  clients = tiny_runs.analyzed(fedavg).draw_clients(*drawn)
  assert [row['client'] for row in result.rows] == clients
  assert {row['layer'] for row in result.rows} == {'relu'}
  assert ('±' in result.markdown) == (len(clients) > 1)
  assert 'at most 500 test examples' in result.markdown
  assert re.search(r'\| relu +\| +[01]\.\d{3} ', result.markdown)


def test_training_that_diverges(fedavg, tmp_path, capsys):
  run = tiny_runs.with_flags(
      fedavg,
      tmp_path / 'run',
      local_steps=3,
      client_learning_rate_schedule='2:1e30',
  )
  before = sorted(run.rglob('*'))
  assert analyze_program.run(['matching', f'--run={run}']) == 1
  _, _, error = capsys.readouterr().err.splitlines()
  assert error.startswith('tff-bn-analyze matching: ')
  assert f'--run={run} diverged' in error
  assert sorted(run.rglob('*')) == before
