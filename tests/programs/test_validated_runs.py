"""Runs with validation data, from the flags to the table and the page."""

import json

import csv_rows
import numpy as np
import pytest

from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.runs import run_folder

_ARGUMENTS = [
    *('--dataset=digits_domains', '--split=domains', '--model=mlp3'),
    *('--evaluate_every=1', '--local_steps=1', '--batch_size=16'),
    *('--validation_share=0.2', '--keep_best=accuracy'),
]


@pytest.fixture(scope='module')
def comparison(tmp_path_factory):
  folder = tmp_path_factory.mktemp('validated')
  arguments = [
      *(*_ARGUMENTS, '--algorithms=fedavg,fedbn', '--seeds=0'),
      *('--rounds=30', '--patience=1', '--client_metrics_over_time'),
      f'--output_dir={folder}',
  ]
  assert compare.run(arguments) == 0
  return folder


def test_table_has_the_best_round(comparison):
  for result in csv_rows.read(comparison / 'results.csv'):
    run = comparison / 'runs' / f'{result["algorithm"]}-seed0'
    rows = csv_rows.read(run / 'metrics.csv')
    values = [float(row['validation_accuracy']) for row in rows]
    best = 1 + int(np.argmax(values[1:]))
    assert int(result['best_round']) == best
    assert int(result['rounds']) == len(rows) - 1 < 30
    assert len(rows) - 1 == best + 1
    assert result['test_accuracy'] == rows[best]['test_accuracy']
    manifest = json.loads((run / 'model/best/manifest.json').read_text())
    assert manifest['round'] == best and manifest['kept_for'] == 'accuracy'
    rounds = {
        int(r['round']) for r in csv_rows.read(run / 'client_metrics.csv')
    }
    assert rounds == set(range(len(rows)))
    seconds = csv_rows.read(run / run_folder.CLIENT_SECONDS)
    assert len(seconds) == 5
    assert all(float(row['seconds_per_round']) > 0 for row in seconds)
  text = 'value of the round with the best validation accuracy'
  for name in ('results.md', 'report.html'):
    assert text in (comparison / name).read_text(encoding='utf-8')


def test_evaluation_of_the_best_and_the_last_round(
    comparison, tmp_path, capsys
):
  run = comparison / 'runs/fedbn-seed0'
  rows = csv_rows.read(run / 'metrics.csv')
  result = csv_rows.read(comparison / 'results.csv')[1]
  for which, number in (
      ('', int(result['best_round'])),
      ('--kept_round=best', int(result['best_round'])),
      ('--kept_round=last', int(result['rounds'])),
  ):
    out = tmp_path / f'evaluation{which}'
    arguments = [f'--run={run}', f'--output_dir={out}', which]
    assert evaluate.run([a for a in arguments if a]) == 0
    assert f'after {number} rounds' in capsys.readouterr().out
    found = csv_rows.read(out / 'evaluation.csv')
    assert {row['rounds'] for row in found} == {str(number)}
    clients = [float(r['accuracy']) for r in found if r['client']]
    assert np.mean(clients) == pytest.approx(
        float(rows[number]['client_test_accuracy']), abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    'arguments',
    [[], ['--adapt=statistics'], ['--predict'], ['--export_client']],
)
def test_outputs_say_of_which_round_they_are(
    comparison, arguments, tmp_path, capsys
):
  run = comparison / 'runs/fedbn-seed0'
  best = csv_rows.read(comparison / 'results.csv')[1]['best_round']
  if '--predict' in arguments:
    np.save(tmp_path / 'x.npy', np.zeros((1, 8, 8, 1), np.float32))
    arguments = [f'--predict={tmp_path / "x.npy"}']
  if '--export_client' in arguments:
    arguments = ['--export_client=plain']
  arguments = [f'--run={run}', *arguments, f'--output_dir={tmp_path / "out"}']
  text = f'Of round {best}, with the best validation accuracy:\n'
  assert evaluate.run(arguments) == 0
  assert capsys.readouterr().out.startswith(text)
  assert evaluate.run([*arguments, '--kept_round=last']) == 0
  assert 'validation' not in capsys.readouterr().out


def test_run_that_keeps_no_best_round(tmp_path, capsys):
  run = tmp_path / 'run'
  arguments = [
      *(*_ARGUMENTS[:-2], '--rounds=1', '--validation_share=0.2'),
      f'--output_dir={run}',
  ]
  assert train.run(arguments) == 0
  assert 'on its own validation data (mean)' in capsys.readouterr().out
  assert evaluate.run([f'--run={run}', '--kept_round=best']) == 2
  assert '--kept_round=best' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--keep_best=loss'], 'no effect without --validation_share'),
        (
            ['--validation_share=0.2', '--patience=3'],
            '--patience=3 has no effect without --keep_best',
        ),
        (['--validation_share=0'], '--validation_share=0: must be a number'),
        (
            ['--validation_share=0.2', '--keep_best=auc'],
            '--keep_best=auc: there is no such metric, only accuracy, loss',
        ),
        (
            ['--validation_share=0.0001'],
            '--validation_share=0.0001 leaves no validation data',
        ),
    ],
)
def test_wrong_flags(flags, message, tmp_path, capsys):
  assert train.run([*flags, '--model=mlp3', f'--output_dir={tmp_path}/x']) == 2
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'x').exists()


def test_average_of_rounds_beside_the_best_round(tmp_path, capsys):
  arguments = [*_ARGUMENTS, '--average_last=2', f'--output_dir={tmp_path}/x']
  assert compare.run(arguments) == 2
  assert '--average_last=2 has no effect with' in capsys.readouterr().err
