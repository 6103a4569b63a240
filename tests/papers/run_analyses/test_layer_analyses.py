"""Tests of the analyses that train clients: divergence, matching, preference.

The expected training is written with Keras and a gradient tape.
"""

import itertools
import re

import csv_rows
import numpy as np
import pytest
import tiny_runs

from tff_bn import runtime
from tff_bn.papers import analyze as analyze_program
from tff_bn.papers import units
from tff_bn.papers.run_analyses import analysis_programs
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.programs import train

_SEEDS = (0, 1)
_LAYERS = ('hidden', 'norm', 'logits')


def _clients(run, clients=None, seed=0, rate=0.5):
  """Returns the clients' models after a step in the second round."""
  data = tiny_runs.split(seed)
  models = {}
  for client in clients or data.client_ids:
    model = tiny_runs.load(run, client if 'fedbn' in run.name else None)
    steps = tiny_runs.batches(data, client, seed=seed)
    models[client] = tiny_runs.train(model, steps, rate)
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


@pytest.mark.slow
def test_new_clients_have_personal_phases(tmp_path):
  flags = (*tiny_runs.FLAGS, '--pan=add', '--pan_personal_share=0.5')
  folders = {number: tmp_path / str(number) for number in (2, 4)}
  for number, folder in folders.items():
    arguments = [f'--clients_per_round={number}', f'--output_dir={folder}']
    assert train.run([*flags, *arguments]) == 0
  (run,) = analyzed_run.load(analysis_programs.named_runs((str(folders[2]),)))
  phases = {}
  for client in run.data.client_ids:
    # In the other run, all clients take part, so all phases are saved.
    expected = tiny_runs.load(folders[4], client).get_layer('hidden_position')
    phases[client] = expected.personal_phase.numpy()
    model = run.model.to_keras(run.client_weights(client))
    found = model.get_layer('hidden_position').personal_phase.numpy()
    assert found == phases[client]
  assert len(set(phases.values())) == 4
  # Training leaves them as they are.
  with runtime.in_process_runtime():
    trained = run.train_clients(run.data.client_ids)
  for client, weights in zip(run.data.client_ids, trained, strict=True):
    model = run.model.to_keras(weights)
    found = model.get_layer('hidden_position').personal_phase.numpy()
    assert found == phases[client]


def test_frozen_weights_are_always_the_runs(frozen):
  (run,) = analyzed_run.load(
      analysis_programs.named_runs((str(frozen),), is_trusted=True)
  )
  names = [run.model.variables[p].name for p in run.model.constants]
  assert sorted(names) == ['other_state_0', 'other_state_1']
  client_ids = run.data.client_ids[:2]
  with runtime.in_process_runtime():
    found = [w for part in run.train_rounds(client_ids, 2) for w in part]
    found += run.train_halves(1, 0)
  expected = run.model.from_model_weights(run.weights)
  for weights in found:
    values = run.model.from_model_weights(weights)
    for p, (a, b) in enumerate(zip(values, expected)):
      assert np.array_equal(a, b) == (p in run.model.constants)
  expected[1] = expected[1] + 1
  with pytest.raises(
      ValueError, match='1 of .* variables that training cannot'
  ):
    run.client_state(run.model.to_model_weights(expected))


def test_clients_of_fedbn_start_from_different_models(fedbn):
  """Otherwise the test above would not notice wrong starts."""
  data = tiny_runs.split()
  start = _divergence([tiny_runs.load(fedbn, c) for c in data.client_ids])
  assert start['norm'] > 1e-3
  assert start['hidden'] == start['logits'] == 0


def test_table_and_figure_of_weight_divergence(comparison, divergence):
  rows = divergence.rows
  assert list(rows[0]) == ['run', 'seed', 'layer', 'divergence']
  assert len(rows) == 2 * 2 * 3
  cells = tiny_runs.cells(divergence.markdown)
  assert cells[0] == ['Layer', 'cmp fedavg', 'cmp fedbn']
  for line, layer in zip(cells[2:], _LAYERS, strict=True):
    values = [
        _values(rows, 'divergence', run='cmp fedbn', seed=str(seed))[layer]
        for seed in _SEEDS
    ]
    mean, spread = np.mean(values), np.std(values, ddof=1)
    assert (line[0], line[2]) == (layer, f'{mean:.4f} ± {spread:.4f}')
  (axes,) = divergence.drawings['weight_divergence'].axes
  bars = [c for c in axes.containers if hasattr(c, 'patches')]
  assert [container.get_label() for container in bars] == cells[0][1:]
  # The last mean of the table.
  assert bars[-1][-1].get_height() == pytest.approx(mean, rel=1e-6)
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


@pytest.mark.slow
def test_learning_rate_of_the_round_after_the_last(fedavg, tmp_path):
  run = tiny_runs.with_flags(
      fedavg, tmp_path / 'run', client_learning_rate_schedule='2:0.25,3:0'
  )
  result = tiny_runs.analyze('weight_divergence', run)
  expected = _divergence(_clients(fedavg, rate=0.5 * 0.25).values())
  found = _values(result.rows, 'divergence')
  assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_epochs_and_momentum(fedavg, tmp_path):
  run = tiny_runs.with_flags(
      fedavg,
      tmp_path / 'run',
      local_steps=None,
      local_epochs=2,
      batch_size=100,
      client_learning_rate=0.05,
      client_momentum=0.5,
  )
  result = tiny_runs.analyze('weight_divergence', run)
  data = tiny_runs.split()
  models = []
  for client in data.client_ids:
    steps = tiny_runs.batches(data, client, batch_size=100, local_epochs=2)
    assert len(steps) > 1
    models.append(tiny_runs.train(tiny_runs.load(fedavg), steps, 0.05, 0.5))
  found = _values(result.rows, 'divergence')
  assert found == pytest.approx(_divergence(models), rel=1e-3)


@pytest.mark.parametrize(
    'flags',
    [
        {},
        pytest.param(
            dict(local_steps=None, local_epochs=1, batch_size=200),
            marks=pytest.mark.slow,
        ),
    ],
    ids=['steps', 'epochs'],
)
def test_more_rounds(fedavg, tmp_path, flags):
  """Between two rounds, FedAvg weights clients by their examples."""
  flags = dict(flags, client_learning_rate=0.1)
  run = tiny_runs.with_flags(fedavg, tmp_path / 'run', **flags)
  result = tiny_runs.analyze('weight_divergence', run, '--num_rounds=3')
  data = tiny_runs.split()
  length = dict(local_steps=1)
  counts = [1, 1, 1, 1]
  if flags.get('local_epochs'):
    length = dict(local_epochs=1)
    counts = [len(samples) for samples in data.train_indices.values()]
  weights = tiny_runs.load(run).get_weights()
  by_round = []
  for round_num in (2, 3, 4):
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
      tiny_runs.train(models[-1], steps, 0.1)
    by_round.append(_divergence(models))
    weights = [
        np.average(values, axis=0, weights=counts)
        for values in zip(*(model.get_weights() for model in models))
    ]
  expected = {x: np.mean([d[x] for d in by_round]) for x in _LAYERS}
  found = _values(result.rows, 'divergence')
  assert found == pytest.approx(expected, rel=1e-3)
  assert by_round[0] != pytest.approx(expected, rel=1e-2)
  assert 'in each of the 3 rounds' in result.markdown


def test_clients_with_their_own_models_train_one_round(
    comparison, fedbn, capsys
):
  before = sorted(comparison.rglob('*'))
  arguments = ['weight_divergence', f'--run={fedbn}', '--num_rounds=2']
  assert analyze_program.run(arguments) == 2
  assert '--num_rounds=2 is impossible' in capsys.readouterr().err
  assert sorted(comparison.rglob('*')) == before


def test_clients_that_are_drawn(fedavg, tmp_path):
  """All analyses draw the same clients with the same seed."""
  drawn = set()
  for seed in (0, 1):
    flags = ('--num_clients=2', f'--seed={seed}')
    matched = tiny_runs.analyze(
        'matching', fedavg, *flags, '--num_examples=5', folder=tmp_path
    )
    clients = list(dict.fromkeys(row['client'] for row in matched.rows))
    assert len(clients) == 2
    ids = tiny_runs.split().client_ids
    assert ids.index(clients[0]) < ids.index(clients[1])
    drawn.add(tuple(clients))
    found = _values(
        tiny_runs.analyze(
            'weight_divergence', fedavg, *flags, folder=tmp_path
        ).rows,
        'divergence',
    )
    expected = _divergence(_clients(fedavg, clients).values())
    assert found == pytest.approx(expected, rel=1e-4)
  assert len(drawn) > 1


@pytest.mark.slow
def test_default_number_of_clients(fedavg, tmp_path):
  run = tiny_runs.with_flags(fedavg, tmp_path / 'run', clients_per_round=2)
  found = _values(
      tiny_runs.analyze('weight_divergence', run).rows, 'divergence'
  )
  models = _clients(fedavg)
  assert any(
      found == pytest.approx(_divergence(pair), rel=1e-4)
      for pair in itertools.combinations(models.values(), 2)
  )


def _start(run, client):
  return tiny_runs.load(run, client if 'fedbn' in run.name else None)


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
        pytest.param(
            'preference', 'agreeing_share', _prefer, marks=pytest.mark.slow
        ),
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
      '--num_clients=4',
      f'--layers={",".join(layers)}',
      folder=tmp_path / 'out',
  )
  data = tiny_runs.split()
  x, y = data.dataset.x_test, data.dataset.y_test
  expected = []
  for run in runs:
    after = _clients(run, rate=4)
    for client in data.client_ids:
      for layer in layers:
        share = measure(_start(run, client), after[client], layer, x, y)
        units = 10 if layer == 'logits' else 30
        expected.append((run.name, '0', client, layer, str(units), share))
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
  cells = tiny_runs.cells(result.markdown)
  assert cells[0] == ['Layer', *(run.name for run in runs)]
  assert [line[0] for line in cells[2:]] == list(layers)
  assert re.fullmatch(r'[01]\.\d{3} ± 0\.\d{3}', cells[2][1])
  # Each unit is drawn for the first client of both runs.
  assert result.drawings.keys() == {name, f'{name}_units'}
  titles = [axes.get_title() for axes in result.drawings[f'{name}_units'].axes]
  firsts = [row for row in result.rows if row['client'] == data.client_ids[0]]
  assert titles == [
      f'{row["layer"]} [{float(row[column]):.3f}]' for row in firsts
  ]


@pytest.mark.parametrize('name', ['matching', 'preference'])
def test_default_layers_and_client(fedavg, tmp_path, name):
  result = tiny_runs.analyze(name, fedavg, folder=tmp_path)
  (row,) = result.rows
  assert row['layer'] == 'relu'
  assert '±' not in result.markdown
  assert 'at most 500 test examples' in result.markdown
  assert re.search(r'\| relu +\| +[01]\.\d{3} +\|', result.markdown)


def _spy(monkeypatch, name):
  calls = []
  original = getattr(units, name)

  def spied(*arguments):
    calls.append(arguments)
    return original(*arguments)

  monkeypatch.setattr(units, name, spied)
  return calls


def _positions(x, data):
  """Returns the positions in the test set; the first among equal examples."""
  same = (data.dataset.x_test[None] == x[:, None]).all(axis=(2, 3, 4))
  assert same.any(axis=1).all()
  return same.argmax(axis=1)


@pytest.mark.slow
def test_examples_that_are_drawn(comparison, tmp_path, monkeypatch):
  runs = [comparison / 'runs' / f'fedavg-seed{seed}' for seed in _SEEDS]
  matched = _spy(monkeypatch, 'match_layers')
  preferred = _spy(monkeypatch, 'preference_vectors_by_layer')
  for name, seed in (('matching', 0), ('matching', 1), ('preference', 0)):
    arguments = ('--num_examples=20', f'--seed={seed}')
    tiny_runs.analyze(name, runs, *arguments, folder=tmp_path)
  data = tiny_runs.split()
  positions = [_positions(call[3], data) for call in matched]
  # Both runs have the same examples.
  assert list(positions[0]) == list(positions[1])
  assert list(positions[2]) == list(positions[3])
  assert set(positions[0]) != set(positions[2])
  for call, chosen in zip(matched, positions, strict=True):
    assert len(call[3]) == 20
    assert len(set(chosen)) >= 19
    # The examples are from the whole test set.
    assert chosen.max() > 200
  assert len(preferred) == 4
  for _, _, x, y in preferred:
    assert list(_positions(x, data)) == list(positions[0])
    np.testing.assert_array_equal(y, data.dataset.y_test[positions[0]])


def test_num_examples_may_exceed_the_test_set(fedavg, tmp_path, monkeypatch):
  calls = _spy(monkeypatch, 'match_layers')
  tiny_runs.analyze('matching', fedavg, '--num_examples=1000', folder=tmp_path)
  ((_, _, _, x),) = calls
  np.testing.assert_array_equal(x, tiny_runs.split().dataset.x_test)


def test_training_that_diverges(fedavg, tmp_path, capsys):
  run = tiny_runs.with_flags(
      fedavg,
      tmp_path / 'run',
      local_steps=3,
      client_learning_rate_schedule='2:1e30',
  )
  before = sorted(run.rglob('*'))
  for name in ('weight_divergence', 'matching', 'preference'):
    assert analyze_program.run([name, f'--run={run}']) == 1
    _, _, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f'tff-bn-analyze {name}: ')
    assert f'--run={run} diverged' in error
  assert sorted(run.rglob('*')) == before
