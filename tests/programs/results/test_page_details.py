"""Tests of the part of the page with metrics of each class or target."""

import dataclasses

import detailed_files
import numpy as np
import pytest

from tff_bn import training
from tff_bn.programs.results import detailed_tables
from tff_bn.programs.results import page_details
from tff_bn.programs.results import report


def _write(folder, task='classification', clients=('a', 'b'), num_classes=3):
  """Writes the files of a run."""
  folder.mkdir()
  rng = np.random.default_rng(len(folder.name))
  details = []
  for client in ('', *clients):
    y = rng.integers(num_classes, size=9)
    if task == 'regression':
      y = rng.normal(size=(9, num_classes))
    logits = rng.normal(size=(9, num_classes))
    found = training.detailed_report(task, y, logits)
    details.append(
        detailed_tables.Details.of(found, 'own' if client else 'global', client)
    )
  for name, text in detailed_files.texts(task, details).items():
    (folder / name).write_text(text)
  return details


def _run(name='fedavg', seed=0, has_client_models=False):
  return report.Run(
      {'algorithm': name}, seed, [], has_client_models=has_client_models
  )


def test_a_single_run(tmp_path):
  details = _write(tmp_path / 'run')
  found = page_details.section([_run()], [tmp_path / 'run'], 'classification')
  assert found.noun == 'class'
  whole, *clients = found.tables
  assert whole.caption.startswith(
      'Global model on the whole test set, 9 examples, expected calibration'
  )
  assert not whole.is_folded and all(table.is_folded for table in clients)
  assert [c.caption.split(',')[0] for c in clients] == [
      *('a (own model)', 'b (own model)')
  ]
  for table, expected in zip(found.tables, details):
    assert table.lines == detailed_tables.cells(expected)
    assert sum(n for _, row in table.matrix.rows for n, _ in row) == 9
  assert any('15 bins' in note for note in found.notes)
  assert not any('merged' in note for note in found.notes)


def test_the_clients_of_a_regression_share_a_table(tmp_path):
  details = _write(tmp_path / 'run', 'regression', num_classes=2)
  found = page_details.section([_run()], [tmp_path / 'run'], 'regression')
  whole, clients = found.tables
  assert whole.lines == detailed_tables.cells(details[0])
  assert clients.titles[:2] == ['Client', 'Target']
  assert [line[:2] for line in clients.lines] == [
      [name, f'target_{n}'] for name in 'ab' for n in (1, 2)
  ]
  assert found.noun == 'target'


def test_several_runs_have_means_over_the_seeds(tmp_path):
  names = [('fedavg', 0), ('fedbn', 0), ('fedavg', 1), ('failed', 0)]
  folders = [tmp_path / f'{name}{seed}' for name, seed in names]
  found_details = {f: _write(f) for f in folders[:3]}
  runs = [_run(*name, has_client_models=name[0] == 'fedbn') for name in names]
  found = page_details.section(runs, folders, 'classification')
  assert [table.caption for table in found.tables] == ['fedavg', 'fedbn']
  seeds = [found_details[folders[n]][0] for n in (0, 2)]
  expected = detailed_tables.means('classification', seeds)
  assert (found.tables[0].titles, found.tables[0].lines) == expected
  assert 'mean over the seeds ± standard deviation.' in found.notes[0]
  assert 'merged' in found.notes[-1]
  assert all(table.is_folded for table in found.tables)


@pytest.mark.parametrize('names', [['fedavg'], ['fedavg', 'fedbn']])
@pytest.mark.parametrize(
    ('keep_best', 'expected'),
    [
        (None, 'alue of the last round'),
        ('accuracy', 'alue of the round with the best validation accuracy'),
    ],
)
def test_notes_say_of_which_round_the_numbers_are(
    names, keep_best, expected, tmp_path
):
  rows = [dict(round=n, validation_accuracy=a) for n, a in ((1, 0.5), (2, 0.4))]
  folders = [tmp_path / name for name in names]
  runs = []
  for name, folder in zip(names, folders):
    _write(folder)
    run = _run(name)
    runs.append(dataclasses.replace(run, rows=rows, keep_best=keep_best))
  found = page_details.section(runs, folders, 'classification')
  assert sum(expected in note for note in found.notes) == 1


def test_a_run_without_the_files(tmp_path):
  for runs in ([_run()], [_run(), _run('fedbn')]):
    found = page_details.section(runs, [tmp_path] * len(runs), 'binary')
    assert found == page_details.Section('', (), ())


def test_large_pages_name_the_file(tmp_path, monkeypatch):
  _write(tmp_path / 'run')
  monkeypatch.setattr(page_details, '_MAX_LINES', 8)
  found = page_details.section([_run()], [tmp_path / 'run'], 'classification')
  assert found.tables == []
  assert found.notes == [
      'There are more than 8 lines; see class_metrics.csv in the folder of'
      ' each run.'
  ]


@pytest.mark.parametrize(
    ('num_classes', 'is_drawn'), [(100, True), (101, False)]
)
def test_matrices_that_are_too_large(num_classes, is_drawn, tmp_path):
  _write(tmp_path / 'run', num_classes=num_classes)
  found = page_details.section([_run()], [tmp_path / 'run'], 'classification')
  assert (found.tables[0].matrix is not None) == is_drawn
  assert any('confusion.csv' in note for note in found.notes) != is_drawn
  # The matrix of a client has the classes that its nine examples need.
  assert 1 < len(found.tables[1].matrix.columns) <= 18
