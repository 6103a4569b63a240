"""Tests of the files with metrics of each class, from runs, by scikit-learn."""

import csv_rows
import keras
import numpy as np
import pandas as pd
import pytest
from scipy import special
from sklearn import metrics as sklearn_metrics
import tiny_runs

from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import detailed_evaluation
from tff_bn.training import evaluation
from tff_bn.training import saved_models

_NAMES = ('a,b', 'say "hi"', '<b>', 'new\nline', 'never')
_CLIENTS = ('one class', 'one, example', 'no "tests"', 'rest')
_FEATURES = ['u', 'v', 'w']


def _table(seed):
  """A table of clients with unusual test data; one class has no test data."""
  rng = np.random.default_rng(seed)
  table = pd.DataFrame(rng.normal(size=(120, 3)), columns=_FEATURES)
  number = np.arange(120)
  table['client'] = np.array(_CLIENTS)[number % 4]
  table['y'] = np.array(_NAMES)[rng.integers(len(_NAMES), size=120)]
  table['test'] = (number % 3 == 0) & (table.y != 'never').to_numpy()
  tests = {name: table.test & (table.client == name) for name in _CLIENTS}
  table.loc[tests['one class'], 'y'] = 'a,b'
  first = tests['one, example'].idxmax()
  table.loc[tests['one, example'] & (number != first), 'test'] = False
  table.loc[tests['no "tests"'], 'test'] = False
  table['test'] = table.test.astype(int)
  return table


@pytest.fixture(name='run', scope='module')
def fixture_run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('detailed')
  _table(0).to_csv(folder / 'table.csv', index=False)
  arguments = [
      *('--model=mlp3', '--rounds=2', '--local_steps=2', '--batch_size=8'),
      *('--algorithm=fedbn', '--client_learning_rate=0.5'),
      *(f'--dataset=csv:{folder / "table.csv"}', '--label_column=y'),
      *('--client_column=client', '--test_column=test'),
      f'--output_dir={folder / "run"}',
  ]
  assert train.run(arguments) == 0
  return folder / 'run'


def _cell(number):
  return None if number is None or np.isnan(number) else pytest.approx(number)


def _read(path):
  return [
      {key: value or None for key, value in row.items()}
      for row in csv_rows.read(path)
  ]


def _check_files(run, folder, prefix, table, classes, clients):
  """Checks all rows of the files against scikit-learn."""
  metrics = _read(folder / f'{prefix}class_metrics.csv')
  confusion = _read(folder / f'{prefix}confusion.csv')
  calibration = _read(folder / f'{prefix}calibration.csv')
  parts = [('global', None, table)]
  parts += [('own', name, table[table.client == name]) for name in clients]
  assert len(calibration) == len(parts)
  assert len(metrics) == len(parts) * len(classes)
  num_pairs = 0
  for number, (kind, client, part) in enumerate(parts):
    part = part[part.test == 1]
    y = np.array([classes.index(name) for name in part.y], int)
    logits = np.zeros((0, len(classes)))
    if len(part):
      x = part[_FEATURES].to_numpy(np.float32)
      logits = tiny_runs.load(run, client).predict(x, verbose=0)
    shares = special.softmax(logits.astype(np.float64), axis=1)
    predicted = logits.argmax(axis=1)
    expected = np.zeros((4, len(classes)))
    expected[:3] = np.nan
    if len(part):
      expected = sklearn_metrics.precision_recall_fscore_support(
          y, predicted, labels=range(len(classes)), zero_division=np.nan
      )
    rows = metrics[number * len(classes) :]
    for label, (row, p, r, f, n) in enumerate(zip(rows, *expected)):
      auc = None
      if 0 < n < len(y):
        auc = sklearn_metrics.roc_auc_score(y == label, shares[:, label])
      assert (row['model'], row['client']) == (kind, client)
      assert row['class'] == classes[label]
      assert int(row['num_examples']) == n
      for name, value in dict(precision=p, recall=r, f1=f, auc=auc).items():
        found = None if row[name] is None else float(row[name])
        assert found == _cell(value), (client, classes[label], name)
    counts = {
        (row['true'], row['predicted']): int(row['count'])
        for row in confusion
        if row['client'] == client
    }
    num_pairs += len(counts)
    pairs = pd.Series([classes[n] for n in y]).str.cat(
        [classes[n] for n in predicted], sep='|'
    )
    assert counts == {
        tuple(pair.split('|')): n for pair, n in pairs.value_counts().items()
    }
    row = calibration[number]
    assert (row['model'], row['client']) == (kind, client)
    assert int(row['num_examples']) == len(y)
    assert (row['calibration_error'] is None) == (not len(y))
    if len(y) == 1:
      error = abs((predicted == y).item() - shares.max())
      assert float(row['calibration_error']) == pytest.approx(error, rel=1e-5)
  assert len(confusion) == num_pairs


def _classes(run):
  return [row['class'] for row in csv_rows.read(run / 'class_metrics.csv')][:5]


@pytest.mark.slow
def test_files_of_a_run(run):
  """Clients without test data are left out, as in client_metrics.csv."""
  clients = [row['client'] for row in csv_rows.read(run / 'client_metrics.csv')]
  assert sorted(clients) == ['one class', 'one, example', 'rest']
  classes = _classes(run)
  assert sorted(classes) == sorted(_NAMES)
  _check_files(run, run, '', _table(0), classes, clients)
  assert not (run / 'target_metrics.csv').exists()
  page = (run / 'report.html').read_text(encoding='utf-8')
  assert 'Metrics of each class' in page
  assert '&lt;b&gt; → a,b' in page and '<b>' not in page


@pytest.mark.parametrize(
    'are_at_once', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_evaluation_of_other_data(
    run, are_at_once, tmp_path, capsys, monkeypatch
):
  if are_at_once:  # All clients in one call.
    monkeypatch.setattr(evaluation, '_MIN_EVALUATED', 0)
  path = tmp_path / 'later.csv'
  later = _table(1)
  later.to_csv(path, index=False)
  output = tmp_path / 'output'
  output.mkdir()
  stale = output / 'evaluation_target_metrics.csv'
  stale.write_text('of an earlier evaluation')
  arguments = [f'--run={run}', f'--dataset=csv:{path}']
  before = csv_rows.contents(run)
  assert evaluate.run([*arguments, f'--output_dir={output}']) == 0
  evaluated = csv_rows.read(output / 'evaluation.csv')
  clients = [row['client'] for row in evaluated]
  assert sorted(clients) == sorted(['', *_CLIENTS])
  pairs = csv_rows.read(output / 'evaluation_confusion.csv')
  for row in evaluated:
    counts = {True: 0, False: 0}
    for pair in pairs:
      if pair['client'] == row['client']:
        counts[pair['true'] == pair['predicted']] += int(pair['count'])
    total = sum(counts.values())
    assert int(row['num_examples']) == total
    assert (row['accuracy'] == row['loss'] == '') == (not total)
    if total:
      assert float(row['accuracy']) == pytest.approx(counts[True] / total)
  _check_files(run, output, 'evaluation_', later, _classes(run), clients[1:])
  assert not stale.exists()
  assert csv_rows.contents(run) == before
  out = capsys.readouterr().out
  for name in ('class_metrics', 'confusion', 'calibration'):
    assert f'       {output}/evaluation_{name}.csv\n' in out
  assert 'Expected calibration error ' in out
  rows = csv_rows.read(output / 'evaluation_class_metrics.csv')
  printed = next(c for c in csv_rows.cells(out) if c[0] == 'a,b')
  (row,) = (r for r in rows if not r['client'] and r['class'] == 'a,b')
  assert printed[3] == f'{100 * float(row["recall"]):.1f}'


def test_reestimated_statistics_are_evaluated(run, tmp_path):
  """The details are about the weights of evaluation.csv."""
  arguments = [f'--run={run}', f'--output_dir={tmp_path}']
  for more in ([], ['--reestimate_statistics']):
    assert evaluate.run([*arguments, *more]) == 0
    rows = csv_rows.read(tmp_path / 'evaluation.csv')
    pairs = csv_rows.read(tmp_path / 'evaluation_confusion.csv')
    for row in rows[-5:]:
      own = [p for p in pairs if p['client'] == row['client']]
      right = sum(int(p['count']) for p in own if p['true'] == p['predicted'])
      if int(row['num_examples']):
        share = right / int(row['num_examples'])
        assert float(row['accuracy']) == pytest.approx(share, abs=1e-6)
  saved, new = rows[0]['accuracy'], rows[5]['accuracy']
  assert saved != new


def test_an_error_leaves_the_old_files(run, tmp_path):
  saved = saved_models.SavedModels(run / 'model')
  old = tmp_path / 'confusion.csv'
  old.write_text('old')
  stale = tmp_path / 'target_metrics.csv'
  stale.write_text('of another task')
  batches = [(np.array([1], np.int32), np.eye(5, dtype=np.float32)[:1])]

  def write(error=None):
    with detailed_evaluation.writing(saved, tmp_path) as details:
      details.add('global', '', batches)
      if error is not None:
        raise error
    return details.names

  with pytest.raises(KeyboardInterrupt):
    write(KeyboardInterrupt())
  assert csv_rows.contents(tmp_path) == {
      'confusion.csv': b'old',
      'target_metrics.csv': b'of another task',
  }
  names = write()
  assert sorted(csv_rows.contents(tmp_path)) == sorted(names)
  assert old.read_text() != 'old'


def test_files_are_removed_with_the_run(run, tmp_path):
  copy = tiny_runs.with_flags(run, tmp_path / 'run')
  for name in run_folder.DETAILS:
    (copy / f'evaluation_{name}').write_text('')
  run_folder.remove(copy)
  assert not list(copy.iterdir()) if copy.exists() else True


def overflowing_model(input_shape, num_outputs):
  """A logistic regression whose outputs are NaN for large samples."""
  x = keras.Input(input_shape)
  y = keras.layers.Dense(num_outputs)(keras.layers.BatchNormalization()(x))
  large = keras.layers.Rescaling(1e30)(y)
  zero_or_nan = keras.layers.Subtract()([large, large])
  return keras.Model(x, keras.layers.Add()([y, zero_or_nan]))


@pytest.mark.slow
def test_binary_run_with_outputs_that_are_nan(tmp_path, capsys):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(60, 3)).astype(np.float32)
  y = (x.sum(axis=1) > 0).astype(int)

  def save():
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])

  path, run = tmp_path / 'data.npz', tmp_path / 'run'
  save()
  arguments = [
      *('--algorithm=fedavg', '--rounds=1', '--local_steps=1'),
      *(f'--dataset={path}', '--task=binary', '--split=iid'),
      *('--num_clients=2', f'--model={__name__}:overflowing_model'),
      *('--batch_size=8', f'--output_dir={run}'),
  ]
  assert train.run(arguments) == 0
  names = [row['class'] for row in csv_rows.read(run / 'class_metrics.csv')]
  assert names == 3 * ['0', '1']
  model = tiny_runs.load(run)
  logits = model.predict(x[40:], verbose=0)[:, 0]
  for row in csv_rows.read(run / 'class_metrics.csv')[:2]:
    auc = sklearn_metrics.roc_auc_score(y[40:], logits)
    assert float(row['auc']) == pytest.approx(auc)

  x[40:43] = 3e37
  save()
  capsys.readouterr()
  assert evaluate.run([f'--run={run}', '--trust_run']) == 0
  is_nan = np.isnan(model.predict(x[40:], verbose=0)[:, 0])
  assert is_nan.sum() == 3
  rows = _read(run / 'evaluation_class_metrics.csv')[:2]
  _, recall, *_ = sklearn_metrics.precision_recall_fscore_support(
      y[40:], np.where(is_nan, 2, logits > 0), labels=[0, 1], zero_division=0
  )
  assert [float(row['recall']) for row in rows] == pytest.approx(recall)
  assert [row['auc'] for row in rows] == [None, None]
  assert (
      _read(run / 'evaluation_calibration.csv')[0]['calibration_error'] is None
  )
  missed = [
      (row['true'], int(row['count']))
      for row in _read(run / 'evaluation_confusion.csv')
      if (row['client'], row['predicted']) == (None, None)
  ]
  assert dict(missed) == {
      str(c): n for c, n in enumerate(np.bincount(y[40:][is_nan])) if n
  }
  # The terminal shows undefined numbers as dashes.
  cells = csv_rows.cells(capsys.readouterr().out)
  assert [row[5] for row in cells if row[0] in ('0', '1')] == ['–', '–']
