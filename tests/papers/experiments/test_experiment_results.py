"""Tests that run an experiment with the program, and look at its files."""

from typing import NamedTuple
from unittest import mock

import csv_rows
import pytest

from tff_bn.papers import compare_with_experiments
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_results
from tff_bn.programs.plan import comparison
from tff_bn.programs.results import charts
from tff_bn.programs.results import html_report
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_folder

pytestmark = pytest.mark.slow

_TOML = """
title = "New, table 1: accuracy in %"
place = "section 5"
finding = "Pooling is better than averaging."
[flags]
dataset = "digits"
model = "mlp3"
num_clients = 5
rounds = 500
local_steps = 1
evaluate_every = 2
average_last = 1
seeds = "0,1"
[axes.scheme]
"Averaging" = { algorithm = "fedavg" }
"Pooling" = { algorithm = "centralized" }
[axes.data]
"i.i.d." = { split = "iid" }
"skewed" = { split = "classes", classes_per_client = 2 }
[show]
kind = "table"
rows = "scheme"
columns = "data"
value = "test_accuracy"
[[analyses]]
name = "permutation"
runs = "scheme"
flags = { shuffle_probability = 1, num_examples = 4 }
[[analyses]]
name = "kept_share"
flags = { num_units = 16, repeats = 3 }
[[analyses]]
name = "permutation"
runs = "data"
flags = { shuffle_probability = 0, num_examples = 4 }
[digits.flags]
rounds = 2
"""
_CSV = """scheme,data,value
Averaging,skewed,30.5
Pooling,skewed,80.5
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The folder of all experiments."""
  papers = tmp_path_factory.mktemp('papers')
  (papers / 'new').mkdir()
  (papers / 'new' / 'table_1.toml').write_text(_TOML, encoding='utf-8')
  (papers / 'new' / 'table_1.csv').write_text(_CSV, encoding='utf-8')
  return papers


@pytest.fixture(autouse=True)
def use_folder(folder, monkeypatch):
  monkeypatch.setattr(experiment_files, 'FOLDER', folder)


def _compare_quickly(arguments, write_page=lambda *_: None):
  """Runs the program, but builds runs only to train them, and no plots."""
  with (
      mock.patch.object(jobs, 'check'),
      mock.patch.object(charts, 'save'),
      mock.patch.object(html_report, 'write', write_page),
  ):
    return compare_with_experiments.run(arguments)


@pytest.fixture(scope='module')
def finished(folder, tmp_path_factory):
  """The folder of a finished experiment, at the digits scale."""
  output = tmp_path_factory.mktemp('output') / 'new'
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(experiment_files, 'FOLDER', folder)
    assert not _compare_quickly(_arguments(output), html_report.write)
  return output


def _arguments(output, *more):
  return [
      '--experiment=new/table_1',
      '--scale=digits',
      '--seeds=3',
      f'--output_dir={output}',
      *more,
  ]


def test_numbers_are_the_means_of_the_runs(finished):
  results = csv_rows.read(finished / 'results.csv')
  assert len(results) == 2 * 2

  rows = csv_rows.read(finished / 'experiment.csv')

  assert len(rows) == 4
  for row in rows:
    (value,) = [
        100 * float(result['test_accuracy'])
        for result in results
        if (result['scheme'], result['data']) == (row['scheme'], row['data'])
    ]
    assert row['seeds'] == '1'
    assert float(row['mean']) == pytest.approx(value)
  assert [row['paper'] for row in rows] == ['', '30.5', '', '80.5']


def test_flags_name_the_experiment_in_place_of_the_algorithms(finished):
  flags = run_folder.read_flags(finished)

  assert list(flags)[:4] == ['experiment', 'scale', 'seeds', 'average_last']
  assert flags['experiment'] == 'new/table_1'
  assert 'algorithms' not in flags


def test_report_has_table_sentences_and_files(finished):
  text = (finished / 'experiment.md').read_text(encoding='utf-8')

  assert text.startswith('# New, table 1: accuracy in %\n')
  assert '--experiment=new/table_1 --scale=digits --seeds=3`' in text
  assert "Not the experiment's own: --seeds=3." in text
  cells = csv_rows.cells(text.partition('## Analysis')[0])
  assert cells[0] == ['scheme', 'i.i.d.', 'skewed']
  assert [row[0] for row in cells[2:]] == ['Averaging', 'Pooling']
  assert cells[3][2].endswith('(80.50)')
  assert (
      '\nTest accuracy, % (global model on the whole test set; value of the'
      " last round). In parentheses: the paper's number.\n"
  ) in text
  assert '- The paper, section 5: Pooling is better than averaging.\n' in text
  assert '- Here: rounds=2 instead of 500.\n' in text
  assert 'skewed, Test accuracy, %: ' in text and "the paper's" in text
  assert 'The largest difference' not in text
  assert (finished / 'plots' / 'experiment.png').stat().st_size > 5000
  page = (finished / 'report.html').read_text(encoding='utf-8')
  assert "The paper's experiment" in page.replace('&#39;', "'")


def test_analyses_compare_the_points_of_their_axis(finished):
  analyses = finished / 'analyses'
  names = sorted(path.name for path in analyses.iterdir())
  assert names == ['kept_share', 'permutation', 'permutation-2']

  first = csv_rows.read(analyses / 'permutation/permutation.csv')
  second = csv_rows.read(analyses / 'permutation-2/permutation.csv')
  kept = csv_rows.read(analyses / 'kept_share/kept_share.csv')

  assert {row['run'] for row in first} == {
      'Averaging, i.i.d.',
      'Averaging, skewed',
      'Pooling, i.i.d.',
      'Pooling, skewed',
  }
  assert {row['seed'] for row in first} == {'3'}
  assert 'i.i.d., Averaging' in {row['run'] for row in second}
  # Each has its own flags.
  assert {row['kept_share'] for row in first} == {'0'}
  assert {row['kept_share'] for row in second} == {'1'}
  assert {row['num_units'] for row in kept} == {'16'}
  text = (finished / 'experiment.md').read_text(encoding='utf-8')
  for name in names:
    path = analyses / name / f'{name.removesuffix("-2")}.md'
    table = path.read_text(encoding='utf-8').strip()
    assert f'## Analysis {name}\n\n{table}\n' in text


def test_a_finished_experiment_is_shown_again(finished, capsys):
  metrics = finished / 'runs'
  before = {p: p.stat().st_mtime_ns for p in metrics.rglob('metrics.csv')}
  (finished / 'experiment.md').unlink()

  assert not _compare_quickly(_arguments(finished))

  assert {p: p.stat().st_mtime_ns for p in before} == before
  assert (finished / 'experiment.md').exists()
  out = capsys.readouterr().out
  assert 'The paper, section 5: ' in out
  # What a comparison without an experiment prints.
  assert 'Next:' not in out and out.count('\n| Averaging') == 1


def test_list_prints_the_runs_and_writes_nothing(tmp_path, capsys):
  output = tmp_path / 'new'

  assert not compare_with_experiments.run(_arguments(output, '--list'))

  assert '4 runs: 0 finished, 0 begun, 4 new.' in capsys.readouterr().out
  assert not output.exists()


def test_experiments_are_listed_by_paper(folder, capsys):
  assert not compare_with_experiments.run(['--experiment=list'])

  assert capsys.readouterr().out == (
      'new/table_1  New, table 1: accuracy in % (paper, digits, smoke)\n'
  )


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--experiment=new/table_2'], 'Did you mean new/table_1?'),
        (['--scale=digits'], 'has no effect without --experiment'),
        (['--experiment=new/table_1', '--scale=digit'], 'mean digits?'),
        (['--experiment=new/table_1', '--split=iid'], 'its axis data'),
    ],
)
def test_mistakes_are_found_before_any_work(
    tmp_path, monkeypatch, capsys, arguments, message
):
  monkeypatch.chdir(tmp_path)

  assert compare_with_experiments.run(arguments) == 2

  assert message in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def test_default_folder_has_the_names_of_experiment_and_scale(
    tmp_path, monkeypatch, capsys
):
  (tmp_path / 'new').mkdir()
  (tmp_path / 'new' / 'measured.toml').write_text(
      'title = "New, measured"\nplace = "section 5"\n'
      'finding = "They are kept."\n[[analyses]]\n'
      'name = "kept_share"\nflags = { num_units = 16, repeats = 3 }\n',
      encoding='utf-8',
  )
  monkeypatch.setattr(experiment_files, 'FOLDER', tmp_path)
  monkeypatch.chdir(tmp_path)
  arguments = ['--experiment=new/measured', '--scale=paper']

  assert not compare_with_experiments.run(arguments)

  output = tmp_path / 'runs/experiments/new/measured-paper'
  assert (output / 'analyses/kept_share/kept_share.csv').exists()
  text = (output / 'experiment.md').read_text(encoding='utf-8')
  assert 'The paper, section 5: They are kept.' in text
  analysis = (output / 'analyses/kept_share/kept_share.md').read_text()
  assert f'## Analysis kept_share\n\n{analysis.strip()}\n' in text
  assert '(analyses/kept_share/plots/kept_share.png)' in text
  # The same command repeats it.
  assert not compare_with_experiments.run(arguments)
  assert compare_with_experiments.run([*arguments, '--rounds=3']) == 2
  assert '--rounds=3 has no effect' in capsys.readouterr().err
  assert not compare_with_experiments.run([*arguments, '--list'])
  assert 'kept_share' in capsys.readouterr().out


def test_numbers_of_clients_are_those_of_an_evaluation(folder, tmp_path):
  path = folder / 'new' / 'clients.toml'
  path.write_text(
      _TOML.partition('[[analyses]]')[0]
      .partition('[axes.data]')[0]
      .replace('"Averaging" = { algorithm = "fedavg" }\n', '')
      .replace('num_clients = 5', 'split = "domains"')
      .replace('"digits"', '"digits_domains"')
      .replace('rounds = 500', 'rounds = 1')
      + '[show]\nkind = "table"\nrows = "client"\ncolumns = "scheme"\n'
      'value = "client_test_accuracy"\n',
      encoding='utf-8',
  )
  output = tmp_path / 'new'
  arguments = ['--experiment=new/clients', '--seeds=0']
  try:
    assert not _compare_quickly([*arguments, f'--output_dir={output}'])
  finally:
    path.unlink()

  assert (
      "\nClient test accuracy, % (each client's model on its own test data;"
      ' value of the last round).\n'
  ) in (output / 'experiment.md').read_text(encoding='utf-8')
  (run,) = (output / 'runs').iterdir()
  evaluated = {
      row['client']: 100 * float(row['accuracy'])
      for row in csv_rows.read(run / 'evaluation.csv')
      if row['client']
  }
  assert len(evaluated) == 5 and 'inverted' in evaluated
  assert {
      row['client']: float(row['mean'])
      for row in csv_rows.read(output / 'experiment.csv')
  } == pytest.approx(evaluated)


def test_held_out_clients_are_shown(tmp_path):
  (tmp_path / 'held_out.csv').write_text(
      'client,statistics,num_examples,dice,loss\n'
      'a,averaged,4,0.25,1.5\na,reestimated,4,0.5,1.25\nb,averaged,0,,\n'
  )
  run = comparison.Run({'scheme': 'x'}, _Settings(3), 'x-seed3')

  measured = experiment_results.by_client(
      run, tmp_path, ['held_out_averaged_dice', 'held_out_reestimated_loss']
  )

  labels = {'scheme': 'x', 'client': 'a'}
  assert measured == [
      (labels, 3, 'held_out_averaged_dice', 0.25),
      (labels, 3, 'held_out_reestimated_loss', 1.25),
  ]


class _Settings(NamedTuple):
  seed: int
