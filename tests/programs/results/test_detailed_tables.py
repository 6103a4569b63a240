"""Tests of the files and tables with metrics of each class, label or target."""

import csv
import io

import csv_rows
import detailed_files
import numpy as np
import pytest

from tff_bn import training
from tff_bn.programs.results import detailed_tables

_ODD = ('a,b', 'say "hi"', 'x\ny')


def _details(task, model='global', client='', names=(), seed=0, n=12, nan=()):
  rng = np.random.default_rng(seed)
  shape = {'classification': (), 'binary': ()}.get(task, (3,))
  y = rng.integers(2, size=(n, *shape))
  z = rng.normal(size=(n, 1 if task == 'binary' else 3))
  z[list(nan)] = np.nan
  report = training.detailed_report(task, y, z, names)
  return detailed_tables.Details.of(report, model, client)


@pytest.mark.parametrize(
    'task', ['classification', 'binary', 'multilabel', 'regression']
)
def test_files_are_read_as_they_were_written(task, tmp_path):
  names = ('a,b', '"') if task == 'binary' else _ODD
  details = [
      _details(task, names=names, nan=[1]),
      _details(task, 'own', 'c,1', names, 1),
      _details(task, 'global', 'none', names, 2, 0),
      _details(task, 'own', ' ', names, 3, 1),
  ]
  for name, text in detailed_files.texts(task, details).items():
    (tmp_path / name).write_text(text, encoding='utf-8')
    rows = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in rows} == {len(rows[0])}
  assert detailed_tables.read(tmp_path, task) == details
  whole = detailed_tables.read(tmp_path, task, only_global=True)
  assert whole == details[:1]


def test_files_that_are_missing_or_damaged(tmp_path):
  assert detailed_tables.read(tmp_path, 'binary') == []
  texts = detailed_files.texts('binary', [_details('binary')])
  for name, text in texts.items():
    (tmp_path / name).write_text(text)
  for name, text in texts.items():
    header, row, _ = text.split('\n', 2)
    for damaged in (
        text.replace(header, 'a,b'),
        f'{header}\n{row}x\n',
        f'{header}\n{row.rpartition(",")[0]}\n',
        f'{header}\n{row.replace("global", "other")}\n',
    ):
      (tmp_path / name).write_text(damaged)
      if 'other' in damaged and name == 'class_metrics.csv':
        continue  # Another model.
      with pytest.raises(ValueError, match=f'{name}.* is damaged. Remove'):
        detailed_tables.read(tmp_path, 'binary')
    (tmp_path / name).write_text(text)


def test_undefined_numbers_are_empty_cells():
  details = _details('classification', n=1)
  texts = detailed_files.texts('classification', [details])
  lines = texts['class_metrics.csv'].splitlines()
  assert lines[0] == 'model,client,class,num_examples,precision,recall,f1,auc'
  # The class 2 neither occurs nor is it predicted, or it is without example.
  assert all(line.endswith(',') for line in lines[1:])
  assert 'nan' not in ''.join(texts.values())


def test_few_classes_are_printed():
  rng = np.random.default_rng(0)
  y, z = rng.integers(30, size=99), rng.normal(size=(99, 30))
  names = [f'class\n{n}' for n in range(30)]
  report = training.detailed_report('classification', y, z, names)
  details = detailed_tables.Details.of(report, 'global', '')
  text = detailed_tables.markdown('classification', details)
  titles, _, *rows = csv_rows.cells(text)
  assert titles == [
      *('Class', 'Examples', 'Precision, %', 'Recall, %', 'F1, %', 'AUC')
  ]
  assert [row[0] for row in rows] == [f'class {n}' for n in range(20)]
  number = report.metrics['recall'][3]
  assert rows[3][3] == f'{100 * number:.1f}'
  assert rows[3][1] == str(report.metrics['num_examples'][3])
  assert '\n… and 10 more rows in the table.\n' in text
  error = f'{100 * report.calibration_error:.1f}'
  assert text.endswith(f'Expected calibration error {error} %')


@pytest.mark.parametrize(
    ('task', 'titles'),
    [
        ('multilabel', ['Label', 'TP', 'FP', 'FN', 'TN']),
        ('regression', ['Target', 'MAE', 'RMSE', 'R²']),
    ],
)
def test_titles(task, titles):
  text = detailed_tables.markdown(task, _details(task))
  found = csv_rows.cells(text)[0]
  assert [title for title in found if title in titles] == titles


def test_means_over_seeds():
  seeds = [_details('classification', seed=seed, n=4) for seed in range(3)]
  titles, lines = detailed_tables.means('classification', seeds)
  assert titles == detailed_tables.titles('classification', seeds[0].names)
  assert [line[0] for line in lines] == ['0', '1', '2']
  for name, *texts in lines:
    numbers = zip(*(seed.rows[name] for seed in seeds))
    for column, text, values in zip(seeds[0].names, texts, numbers):
      values = [v for v in values if v is not None]
      if column == 'num_examples':
        assert text == f'{np.mean(values):.0f}'
      elif column == 'recall' and len(values) > 1:
        mean, deviation = 100 * np.mean(values), 100 * np.std(values, ddof=1)
        assert text == f'{mean:.1f} ± {deviation:.1f}'
      elif not values:
        assert text == '–'


def test_matrix():
  report = training.detailed_report(
      'classification',
      [0, 0, 0, 2],
      np.array([[9, 0, 0, 0], [9, 0, 0, 0], [0, 0, 9, 0], [np.nan, 0, 0, 0.0]]),
  )
  whole = detailed_tables.matrix(
      detailed_tables.Details.of(report, 'global', '')
  )
  assert whole.columns == ['0', '1', '2', '3', '']
  assert [name for name, _ in whole.rows] == ['0', '1', '2', '3']
  assert whole.rows[0][1][::2] == [(2, 2 / 3), (1, 1 / 3), (0, 0)]
  assert whole.rows[2][1][-1] == (1, 1)
  client = detailed_tables.Details.of(report, 'own', 'c')
  small = detailed_tables.matrix(client)
  assert small.columns == ['0', '2', '']
  assert [name for name, _ in small.rows] == ['0', '2']
  assert detailed_tables.matrix(client, 1) is None
  assert detailed_tables.matrix(_details('multilabel')) is None
