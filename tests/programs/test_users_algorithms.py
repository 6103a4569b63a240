"""Runs of algorithms and corrections of users, by `module:NAME`."""

import sys

import csv_rows
import printed
import pytest
import tiny_runs

from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line

_MODULE = """
from tff_bn import algorithms
from tff_bn.catalog import algorithms as catalog


def build(model, client_optimizer, **options):
  return algorithms.build_fed_avg(model, client_optimizer, **options)


def correct(model, client_optimizer, *, build_process, **options):
  return algorithms.build_fed_prox(
      model,
      client_optimizer,
      proximal_strength=0.5,
      build_process=build_process,
      **options,
  )


LOCAL = catalog.Algorithm(
    'x', 'keeps BN local', 'tff_bn.algorithms.fed_bn:build_fed_bn',
    catalog.ALGORITHMS['fedbn'].options, features=(catalog.CLIENT_MODELS,),
)
"""
_ALGORITHMS = (
    'fedavg,my_algorithms:build,my_algorithms:LOCAL+my_algorithms:correct'
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """The working folder has the module."""
  (tmp_path / 'my_algorithms.py').write_text(_MODULE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  yield tmp_path
  sys.modules.pop('my_algorithms', None)


def _compare(*more):
  arguments = [
      *tiny_runs.FLAGS,
      *(f'--algorithms={_ALGORITHMS}', '--seeds=0', '--output_dir=runs'),
  ]
  return compare.run([*arguments, *more])


@pytest.mark.slow
def test_comparison_and_evaluation(folder, capsys):
  assert _compare() == command_line.OK
  output = capsys.readouterr().out
  assert 'build: an algorithm of yours' in output
  assert 'LOCAL+correct: keeps BN local; a correction of yours' in output
  rows = {row['algorithm']: row for row in csv_rows.read('runs/results.csv')}
  assert list(rows) == ['fedavg', 'build', 'LOCAL+correct']
  # It is FedAvg.
  assert rows['build']['test_loss'] == rows['fedavg']['test_loss']
  assert rows['LOCAL+correct']['test_loss'] != rows['fedavg']['test_loss']
  assert _compare() == command_line.OK
  assert 'All 3 runs are finished.' in capsys.readouterr().err

  run = 'runs/runs/LOCAL+correct-seed0'
  for program, arguments in (
      (evaluate, [f'--run={run}']),
      (train, [f'--flagfile={run}/flags.txt', '--output_dir=other']),
      (compare, ['--flagfile=runs/flags.txt', '--output_dir=other']),
  ):
    sys.modules.pop('my_algorithms')
    assert program.run(arguments) == command_line.USAGE_ERROR
    error = printed.error(capsys.readouterr().err)
    assert 'my_algorithms:LOCAL+my_algorithms:correct' in error
    assert 'names code that is not part of tff_bn' in error
    assert 'my_algorithms' not in sys.modules
    sys.modules['my_algorithms'] = None
  sys.modules.pop('my_algorithms')
  assert evaluate.run([f'--run={run}', '--trust_run']) == command_line.OK
  assert (folder / run / 'evaluation.csv').exists()


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        (
            'my_algorithms:biuld',
            "--algorithm=my_algorithms:biuld: the module 'my_algorithms' has no"
            " 'biuld'. Did you mean build?",
        ),
        ('nowhere:build', "the module 'nowhere' can not be imported"),
        ('my_algorithms:catalog', 'but is a module'),
        (
            'fedtan+my_algorithms:correct',
            "my_algorithms:correct can't be combined with fedtan: the first",
        ),
    ],
)
def test_wrong_names(name, message, capsys):
  assert train.run([f'--algorithm={name}']) == command_line.USAGE_ERROR
  assert message in printed.error(capsys.readouterr().err)
