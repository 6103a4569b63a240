"""`tff-bn-evaluate --adapt`: clients that join after the training."""

import json

import csv_rows
import keras
import numpy as np
import pytest
import tiny_runs

from tff_bn import data as tff_bn_data
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.testing import adapted_clients
from tff_bn.training import later_clients
from tff_bn.training import saved_models

_RUN = (
    *('--algorithm=fedbn', '--dataset=digits', '--model=mlp3'),
    *('--split=iid', '--num_clients=2', '--rounds=2', '--local_epochs=1'),
    '--batch_size=32',
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('adapt') / 'run'
  assert train.run([*_RUN, f'--output_dir={folder}']) == 0
  return folder


@pytest.fixture(scope='module')
def later(tmp_path_factory):
  """A client with little contrast, and few pictures of most classes."""
  path = tmp_path_factory.mktemp('later') / 'paris.npz'
  dataset = tiny_runs.split().dataset
  x, y = 0.5 + 0.2 * dataset.x_train, dataset.y_train
  keep = np.sort(
      np.concatenate(
          [
              np.flatnonzero(y == label)[: 60 if label == 3 else 8]
              for label in range(10)
              if label != 7
          ]
      )
  )
  np.savez(
      path,
      x_train=x[keep],
      y_train=y[keep],
      x_test=0.5 + 0.2 * dataset.x_test,
      y_test=dataset.y_test,
  )
  return path


def _adapt(run, later, out, *arguments):
  return evaluate.run(
      [
          *(f'--run={run}', f'--dataset=domains:paris=npz:{later}'),
          *(f'--output_dir={out}', *arguments),
      ]
  )


def _model(out, client='paris'):
  stem = saved_models.client_file_stem(client)
  return keras.models.load_model(out / f'adapted_clients/{stem}.keras')


@pytest.mark.parametrize(
    ('arguments', 'name'),
    [
        (['--adapt=statistics'], 'adapted: statistics'),
        (
            ['--adapt=statistics', '--balance_classes'],
            'adapted: statistics, balanced classes',
        ),
        pytest.param(
            ['--adapt=batch_norm', '--adapt_epochs=2'],
            'adapted: batch_norm',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_saved_model_has_the_printed_accuracy(
    run, later, arguments, name, tmp_path, capsys
):
  before = csv_rows.read(run / 'metrics.csv')
  assert _adapt(run, later, tmp_path, *arguments) == 0
  captured = capsys.readouterr()
  (row,) = csv_rows.read(tmp_path / 'evaluation.csv')
  assert (row['model'], row['client']) == (adapted_clients.ADAPTED, 'paris')
  assert row['statistics'] == name
  with np.load(later) as arrays:
    # The tests of a client are of the classes that it has.
    known = arrays['y_test'] != 7
    x, y = np.float32(arrays['x_test'][known]), arrays['y_test'][known]
    number = len(arrays['y_train'])
  adapted = _model(tmp_path)
  accuracy = np.mean(adapted.predict(x, verbose=0).argmax(axis=-1) == y)
  assert float(row['accuracy']) == pytest.approx(accuracy, abs=1e-6)
  old = tiny_runs.load(run)
  old_accuracy = np.mean(old.predict(x, verbose=0).argmax(axis=-1) == y)
  assert csv_rows.cells(captured.out)[2] == [
      *('paris', str(number), str(len(y))),
      *(f'{100 * value:.1f}' for value in (old_accuracy, accuracy)),
  ]
  assert accuracy > old_accuracy + 0.2
  # The kernels did not change.
  np.testing.assert_array_equal(old.weights[0], adapted.weights[0])
  # The output says what label shift does, or what can't be balanced.
  if name == 'adapted: statistics':
    assert (
        "differs from the run's for paris (3: 48% instead of 10%)"
        in captured.err
    )
  assert ('paris (7)' in captured.err) == ('balanced' in name)
  assert csv_rows.read(run / 'metrics.csv') == before


def test_frozen_model_is_built_once(run, later, tmp_path, monkeypatch):
  built = []
  build = later_clients.batch_norm_only
  monkeypatch.setattr(
      later_clients,
      'batch_norm_only',
      lambda *arguments: built.append(build(*arguments)) or built[-1],
  )
  arguments = ['--adapt=batch_norm', '--adapt_epochs=1']
  assert _adapt(run, later, tmp_path, *arguments) == 0
  assert len(built) == 1


@pytest.mark.slow
def test_passes_are_over_all_data(later, tmp_path):
  """Also after a run whose clients make a single step in a round."""
  run = tmp_path / 'run'
  arguments = [
      *(*_RUN[:-2], '--local_steps=1', '--batch_size=32'),
      f'--output_dir={run}',
  ]
  assert train.run(arguments) == 0
  arguments = ['--adapt=batch_norm', '--adapt_epochs=2']
  assert _adapt(run, later, tmp_path, *arguments) == 0
  with np.load(later) as arrays:
    x, y = np.float32(arrays['x_train']), arrays['y_train']
  dataset = tff_bn_data.Dataset('later', x, y, x[:0], y[:0], 10)
  data = tff_bn_data.FederatedData(
      dataset, {'paris': np.arange(len(x))}, {'paris': []}
  )
  expected = tiny_runs.load(run)
  assert len(x) > 3 * 32
  values = expected.get_layer('hidden')(x.reshape(len(x), -1)).numpy()
  for layer in expected.layers:
    layer.trainable = isinstance(layer, keras.layers.BatchNormalization)
    if layer.trainable:
      layer.moving_mean.assign(values.mean(axis=0))
      layer.moving_variance.assign(values.var(axis=0))
  batches = [
      batch
      for epoch in (1, 2)
      for batch in tiny_runs.batches(
          data, 'paris', round_num=epoch, batch_size=32, local_epochs=1
      )
  ]
  tiny_runs.train(expected, batches, 0.1)
  for a, b in zip(
      tiny_runs.alone(_model(tmp_path)).get_weights(), expected.get_weights()
  ):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ('shares', 'expected'),
    [
        # The client's 100 samples are of class 0.
        ([0.5, 0.5, 0, 0], 0.5 - np.sqrt(2 * 0.25 / (100 * np.pi))),
        ([1, 0, 0, 0], 0),
    ],
)
def test_label_shift_has_a_closed_form(shares, expected):
  found = adapted_clients.label_shift(
      np.array([1, 0, 0, 0]), 100, np.array(shares)
  )
  assert found == pytest.approx(expected)


def test_small_clients_are_no_false_alarms():
  """Draws of 20 samples with the shares of the run, which are unequal."""
  shares = np.array([0.55, 0.25, 0.15, 0.05])
  draws = np.random.default_rng(0).multinomial(20, shares, size=200)
  found = [adapted_clients.label_shift(n / 20, 20, shares) for n in draws]
  assert np.mean(found) == pytest.approx(0, abs=0.02)
  assert max(found) < 0.25


@pytest.mark.slow
def test_clients_without_a_variance(run, later, tmp_path, capsys):
  """One sample has none in a dense layer; other clients are adapted."""
  alone = tmp_path / 'alone.npz'
  with np.load(later) as arrays:
    y = arrays['y_train'][:1]
    is_same = arrays['y_test'] == y
    np.savez(
        alone,
        x_train=arrays['x_train'][:1],
        y_train=y,
        x_test=arrays['x_test'][is_same],
        y_test=arrays['y_test'][is_same],
    )
  for how in ('statistics', 'batch_norm'):
    arguments = [f'--run={run}', f'--adapt={how}']
    if how == 'batch_norm':
      arguments.append('--adapt_epochs=1')
    out = tmp_path / how
    arguments.append(f'--output_dir={out}')
    both = f'--dataset=domains:oslo=npz:{alone},paris=npz:{later}'
    assert evaluate.run([*arguments, both]) == 0
    output = capsys.readouterr().out
    assert 'oslo: not adapted. The inputs of ' in output
    assert [row['client'] for row in csv_rows.read(out / 'evaluation.csv')] == [
        'paris'
    ]
    alone_only = f'--dataset=domains:oslo=npz:{alone}'
    assert evaluate.run([*arguments, alone_only]) == 2
    assert f'--adapt={how} is impossible for each' in capsys.readouterr().err
    assert len(list((out / 'adapted_clients').iterdir())) == 1


def test_each_client_of_a_run(run, tmp_path, capsys):
  arguments = [f'--run={run}', '--adapt=statistics', f'--output_dir={tmp_path}']
  assert evaluate.run(arguments) == 0
  capsys.readouterr()
  rows = csv_rows.read(tmp_path / 'evaluation.csv')
  assert [row['client'] for row in rows] == ['client_0', 'client_1']
  assert len(list((tmp_path / 'adapted_clients').iterdir())) == 2


@pytest.mark.slow
def test_clients_with_layers_of_their_own(tmp_path, capsys):
  """Each keeps its own last layer, and only its batch normalization trains."""
  folder, out = tmp_path / 'run', tmp_path / 'out'
  arguments = [*_RUN, '--local_layers=logits', f'--output_dir={folder}']
  assert train.run(arguments) == 0
  arguments = [f'--run={folder}', '--adapt=batch_norm', '--adapt_epochs=1']
  assert evaluate.run([*arguments, f'--output_dir={out}']) == 0
  capsys.readouterr()
  kernels = []
  for client in ('client_0', 'client_1'):
    before = tiny_runs.load(folder, client)
    after = tiny_runs.alone(_model(out, client))
    for old, new in zip(before.variables, after.variables, strict=True):
      is_same = np.array_equal(old.numpy(), new.numpy())
      assert is_same != old.path.startswith('norm/'), old.path
    kernels.append(after.get_layer('logits').kernel.numpy())
  assert (kernels[0] != kernels[1]).any()


def test_run_records_its_classes(run):
  manifest = json.loads((run / 'model/manifest.json').read_text('utf-8'))
  counts = np.bincount(tiny_runs.split().dataset.y_train)
  assert manifest['class_counts'] == counts.tolist()
  assert len(set(counts)) > 1


def test_balanced_statistics_of_an_evaluation(run, later, tmp_path, capsys):
  assert _adapt(run, later, tmp_path, '--adapt=statistics') == 0
  arguments = ['--reestimate_statistics', '--balance_classes']
  assert _adapt(run, later, tmp_path, *arguments) == 0
  capsys.readouterr()
  rows = csv_rows.read(tmp_path / 'evaluation.csv')
  assert [row['statistics'] for row in rows] == [
      'adapted: statistics',
      *['reestimated, balanced classes'] * 2,
  ]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['--adapt=batch_norm', '--balance_classes'],
            '--balance_classes=true has an effect with',
        ),
        (['--adapt_epochs=3'], '--adapt_epochs=3 is only for --adapt=batch_n'),
        (
            ['--adapt=statistics', '--predict=a.png'],
            '--adapt=statistics has no effect with --predict',
        ),
        (
            ['--adapt=statistics', '--reestimate_statistics'],
            '--reestimate_statistics=true has no effect with --adapt',
        ),
        (['--adapt=all'], '--adapt=all: must be'),
    ],
)
def test_wrong_flags(run, arguments, message, capsys):
  assert evaluate.run([f'--run={run}', *arguments]) == 2
  assert message in capsys.readouterr().err


def test_model_without_batch_norm(tmp_path, capsys):
  folder = tmp_path / 'run'
  arguments = [*tiny_runs.FLAGS, '--normalization=none']
  assert train.run([*arguments, f'--output_dir={folder}']) == 0
  for how in ('statistics', 'batch_norm'):
    assert evaluate.run([f'--run={folder}', f'--adapt={how}']) == 2
    assert f'--adapt={how} has no effect: the model' in capsys.readouterr().err


def test_model_with_frozen_batch_norm(tmp_path, capsys):
  folder = tmp_path / 'run'
  arguments = [*tiny_runs.FLAGS, '--frozen_layers=norm']
  assert train.run([*arguments, f'--output_dir={folder}']) == 0
  assert evaluate.run([f'--run={folder}', '--adapt=batch_norm']) == 2
  assert (
      f'--adapt=batch_norm is impossible with --run={folder}: The model has no'
      ' batch normalization with trainable scale or shift'
      in capsys.readouterr().err
  )
