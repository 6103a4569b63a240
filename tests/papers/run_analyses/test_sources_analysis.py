"""Tests of the models of finished runs on each source."""

import collections

import csv_rows
import numpy as np
import pytest
import tiny_runs

from tff_bn.papers import analyze
from tff_bn.training import measures


def _accuracy(model, data, positions):
  logits = model(data.dataset.x_test[positions], training=False).numpy()
  return np.mean(logits.argmax(axis=1) == data.dataset.y_test[positions])


@pytest.mark.slow
def test_a_comparison(comparison, tmp_path):
  result = tiny_runs.analyze('sources', comparison, folder=tmp_path)
  sources = [*(f'client_{n}' for n in range(4)), '']
  assert [
      (row['run'], row['seed'], row['client'], row['source'])
      for row in result.rows
  ] == [
      (f'cmp {algorithm}', seed, client, source)
      for algorithm, clients in (
          ('fedavg', ['']),
          ('fedbn', ['', *sources[:4]]),
      )
      for seed in '01'
      for client in clients
      for source in sources
  ]
  by_cell = collections.defaultdict(list)
  for row in result.rows:
    _, algorithm = row['run'].split()
    run = comparison / 'runs' / f'{algorithm}-seed{row["seed"]}'
    data = tiny_runs.split(int(row['seed']))
    positions = np.arange(len(data.dataset.y_test))
    if row['source']:
      positions = data.test_indices[row['source']]
    accuracy = _accuracy(
        tiny_runs.load(run, row['client'] or None), data, positions
    )
    assert float(row['accuracy']) == pytest.approx(accuracy, abs=1e-6)
    name = row['run'] + (f': {row["client"]}' if row['client'] else '')
    source = row['source'] or measures.WHOLE_TEST_SET
    by_cell[name, source].append(100 * accuracy)
  titles, _, *lines = csv_rows.cells(result.markdown)
  assert titles == ['Model', *sources[:4], measures.WHOLE_TEST_SET]
  # What is merged from the models of clients is in the CSV file only.
  assert [line[0] for line in lines] == [
      'cmp fedavg',
      *(f'cmp fedbn: client_{n}' for n in range(4)),
  ]
  for name, *texts in lines:
    for title, text in zip(titles[1:], texts, strict=True):
      seeds = by_cell[name, title]
      assert text == f'{np.mean(seeds):.1f} ± {np.std(seeds, ddof=1):.1f}'


@pytest.mark.slow
def test_too_many_models(fedbn, monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(measures, 'MAX_TABLE_CLIENTS', 3)
  arguments = ['sources', f'--run={fedbn}', f'--output_dir={tmp_path}']
  assert analyze.run(arguments) == 2
  error = ' '.join(capsys.readouterr().err.split())
  assert '4 own models of clients' in error and 'at most 3' in error


@pytest.mark.slow
def test_different_metrics(fedavg, regression, tmp_path, capsys):
  runs = f'--run={fedavg},{regression}'
  assert analyze.run(['sources', runs, f'--output_dir={tmp_path}']) == 2
  assert 'accuracy, mae' in ' '.join(capsys.readouterr().err.split())
