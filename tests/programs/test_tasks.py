"""Runs of other tasks than classification, from the data to the page."""

import csv_rows
import keras
import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics
import tiny_runs

from tff_bn import data as tff_bn_data
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train


def test_regression(tmp_path, capsys):
  run = tmp_path / 'run'
  arguments = [
      *('--dataset=diabetes', '--split=iid', '--num_clients=2'),
      *('--model=mlp3', '--rounds=1', '--local_steps=2', '--batch_size=16'),
      f'--output_dir={run}',
  ]
  assert train.run(arguments) == 0
  captured = capsys.readouterr()
  assert 'The labels are floats: --task=regression.\n' in captured.err
  assert 'predicted = model.predict(x)\n' in captured.out
  last = csv_rows.read(run / 'metrics.csv')[-1]
  # The metrics of the saved model.
  dataset = tff_bn_data.load_dataset('diabetes')
  predicted = tiny_runs.load(run).predict(dataset.x_test, verbose=0)
  for name, function in (
      ('mae', sklearn_metrics.mean_absolute_error),
      ('r2', sklearn_metrics.r2_score),
      ('loss', sklearn_metrics.mean_squared_error),
  ):
    expected = function(dataset.y_test, predicted)
    assert float(last[f'test_{name}']) == pytest.approx(expected, abs=1e-5)
  whole, *clients = csv_rows.read(run / 'target_metrics.csv')
  expected = sklearn_metrics.root_mean_squared_error(dataset.y_test, predicted)
  assert float(whole['rmse']) == pytest.approx(expected, abs=1e-5)
  assert [row['client'] for row in clients] == ['client_0', 'client_1']
  page = (run / 'report.html').read_text(encoding='utf-8')
  for text in (
      '<dt>Task</dt><dd>regression</dd>',
      '>MAE</button>',
      'MAE: each client&#39;s model on its own test data; value of the last'
      ' round',
      'Loss (mean squared error)',
      'each range of the target and client',
      'Metrics of each target',
      '<td class="text">client_0</td><td class="text">target</td>',
  ):
    assert text in page, text

  assert evaluate.run([f'--run={run}']) == 0
  rows = csv_rows.read(run / 'evaluation.csv')
  assert float(rows[0]['mae']) == pytest.approx(float(last['test_mae']))
  capsys.readouterr()
  assert evaluate.run([f'--run={run}', '--task=binary']) == 2
  assert '--task=binary cannot be changed' in capsys.readouterr().err


def pixel_model(input_shape, num_outputs):
  return keras.Sequential(
      [
          keras.Input(input_shape),
          keras.layers.BatchNormalization(),
          keras.layers.Conv2D(num_outputs, 1),
      ]
  )


@pytest.mark.slow
def test_segmentation(tmp_path, capsys):
  rng = np.random.default_rng(0)
  y = rng.integers(3, size=(24, 8, 8))
  x = (y[..., np.newaxis] + rng.normal(size=(24, 8, 8, 1))).astype(np.float32)
  path = tmp_path / 'pixels.npz'
  np.savez(path, x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
  folder = tmp_path / 'compare'
  arguments = [
      *(f'--dataset={path}', '--split=iid', '--num_clients=2', '--seeds=0'),
      *(
          '--algorithms=fedavg,fedbn',
          f'--model={__name__}:pixel_model',
          '--loss=dice',
      ),
      *('--metrics=dice,accuracy', '--rounds=1', '--local_steps=1'),
      *('--batch_size=4', f'--output_dir={folder}'),
  ]
  assert compare.run(arguments) == 0
  out = capsys.readouterr().out
  titles, _, *rows = csv_rows.cells(out)
  assert titles[:4] == ['Algorithm', 'Dice, %', 'Client Dice, %', 'Accuracy, %']
  results = csv_rows.read(folder / 'results.csv')
  for row, result in zip(rows, results):
    assert row[1] == f'{100 * float(result["test_dice"]):.1f}'
  run = folder / 'runs/fedavg-seed0'
  predicted = tiny_runs.load(run).predict(x[:8], verbose=0).argmax(axis=-1)
  details = csv_rows.read(run / 'class_metrics.csv')[:3]
  assert [float(row['dice']) for row in details] == pytest.approx(
      sklearn_metrics.f1_score(y[:8].ravel(), predicted.ravel(), average=None)
  )
  page = (folder / 'report.html').read_text(encoding='utf-8')
  assert 'Loss (Dice)' in page and 'Dice of each client' in page
  assert '<summary>fedavg</summary>' in page and 'merged from them' in page
  assert {'dice', 'dice_by_megabytes', 'accuracy', 'loss'} <= {
      drawing.stem for drawing in (folder / 'plots').iterdir()
  }
