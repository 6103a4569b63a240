"""Runs on clients of the user's own, from files to predictions."""

import textwrap

import csv_rows
import numpy as np
import pandas as pd
import pytest

from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.runs import run_folder

_FLAGS = (
    '--model=mlp3',
    '--rounds=1',
    '--local_steps=2',
    '--batch_size=8',
    '--client_learning_rate=0.5',
)


def _patients(seed, hospitals, size=20):
  """A table of patients, of whom some have no age."""
  rng = np.random.default_rng(seed)
  table = pd.DataFrame(
      dict(
          hospital=np.repeat(hospitals, size),
          age=rng.integers(20, 90, size * len(hospitals)).astype(float),
          sex=rng.choice(['f', 'm'], size * len(hospitals)),
          marker=rng.normal(size=size * len(hospitals)),
      )
  )
  table['ill'] = np.where(table.marker + (table.sex == 'm') > 0.5, 'yes', 'no')
  table.loc[::7, 'age'] = np.nan
  return table


@pytest.fixture(
    name='table_run',
    scope='module',
    params=[
        (),
        pytest.param(
            ('--categories=embedded', '--model=tabular'),
            marks=pytest.mark.slow,
            id='embedded',
        ),
    ],
)
def fixture_table_run(tmp_path_factory, request):
  folder = tmp_path_factory.mktemp('tables')
  _patients(0, ['a', 'b', 'c']).to_csv(folder / 'patients.csv', index=False)
  arguments = [
      *_FLAGS,
      f'--dataset=csv:{folder / "patients.csv"}',
      '--label_column=ill',
      '--client_column=hospital',
      '--missing_values=median',
      '--pixel_scaling=standardized',
      '--algorithm=fedbn',
      f'--output_dir={folder / "run"}',
      *request.param,
  ]
  return arguments, folder / 'run'


@pytest.mark.slow
def test_a_table(table_run, tmp_path, capsys):
  arguments, run = table_run
  assert train.run(arguments) == 0
  captured = capsys.readouterr()
  assert 'The dataset has clients' in captured.err
  assert run_folder.read_flags(run)['split'] == 'natural'
  clients = csv_rows.read(run / 'client_metrics.csv')
  assert [row['client'] for row in clients] == ['a', 'b', 'c']

  # A later table, with the columns in another order.
  later = _patients(1, ['b', 'd'])[['ill', 'sex', 'marker', 'age', 'hospital']]
  later['test'] = np.arange(len(later)) % 2
  path = tmp_path / 'later.csv'
  later.to_csv(path, index=False)
  assert (
      evaluate.run(
          [
              f'--run={run}',
              f'--dataset=csv:{path}',
              '--test_column=test',
              f'--output_dir={tmp_path / "later"}',
          ]
      )
      == 0
  )
  rows = csv_rows.read(tmp_path / 'later/evaluation.csv')
  # The printed code makes the same predictions.
  _, printed = captured.out.split('Model:   ')
  code, _ = printed.split('         and a client')
  found = {'table': later[later.test == 1]}
  exec(textwrap.dedent(f'{" " * 9}{code}'), found)
  right = np.mean(np.array(found['predicted']) == found['table'].ill)
  assert float(rows[0]['accuracy']) == pytest.approx(right, abs=1e-6)
  for flag in ('--categories=embedded', '--missing_values=mean'):
    with_flag = [f'--run={run}', f'--dataset=csv:{path}', flag]
    assert evaluate.run(with_flag) == 2
    error = capsys.readouterr().err
    assert f'{flag} cannot be changed after the training; the run' in error
  # So does the program, for rows that need no labels.
  later.drop(columns='ill').to_csv(path, index=False)
  assert (
      evaluate.run(
          [f'--run={run}', f'--predict={path}', f'--output_dir={tmp_path}/new']
      )
      == 0
  )
  rows = csv_rows.read(tmp_path / 'new/predictions.csv')
  assert [row['row'] for row in rows] == [str(n + 1) for n in range(len(later))]
  assert [
      row['predicted'] for row, test in zip(rows, later.test) if test
  ] == list(found['predicted'])


def test_a_model_without_embeddings(tmp_path, capsys):
  # It is found before the table is read.
  path = tmp_path / 'patients.csv'
  flags = [
      f'--dataset=csv:{path}',
      '--label_column=ill',
      '--missing_values=mean',
      '--categories=embedded',
  ]
  for model in ('--model=mlp3', '--model=small_cnn'):
    assert train.run([*flags, model, f'--output_dir={tmp_path / "run"}']) == 2
    error = capsys.readouterr().err
    assert f'--categories=embedded is impossible with {model}' in error
    assert 'use --model=tabular, or --categories=one_hot' in error


@pytest.mark.slow
def test_an_archive_of_clients(tmp_path, capsys):
  rng = np.random.default_rng(0)
  path = tmp_path / 'windows.npz'
  clients = np.repeat(np.arange(30), 4)
  arrays = {
      f'{array}_{part}': value
      for part in ('train', 'test')
      for array, value in (
          ('x', rng.normal(size=(120, 6, 2)).astype(np.float32)),
          ('y', rng.integers(3, size=120)),
          ('client', clients),
      )
  }
  np.savez(path, **arrays)
  run = tmp_path / 'run'
  arguments = [
      *_FLAGS,
      f'--dataset=series:{path}',
      '--algorithm=fedavg',
      f'--output_dir={run}',
  ]
  assert train.run(arguments) == 0
  rows = csv_rows.read(run / 'client_metrics.csv')
  assert [row['client'] for row in rows] == list(map(str, range(30)))
  assert 'The dataset has clients' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (
            ('--dataset=digits', '--label_column=y'),
            '--label_column=y has no effect with --dataset=digits; it is for',
        ),
        (
            ('--dataset=csv:none.csv', '--label_column=y'),
            '--dataset=csv:',
        ),
        (
            (
                '--dataset=csv:a.csv',
                '--label_column=y',
                '--test_column=t',
                '--test_share=0.1',
            ),
            '--test_column=t and --test_share=0.1 exclude each other',
        ),
        (
            ('--dataset=csv:a.csv', '--label_column=y', '--test_share=1'),
            '--test_share=1',
        ),
    ],
)
def test_wrong_flags(flags, message, tmp_path, capsys):
  assert train.run([*flags, f'--output_dir={tmp_path / "run"}']) == 2
  assert message in capsys.readouterr().err
