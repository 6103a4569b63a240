"""Tests that run algorithms with a correction of the clients' drift."""

from absl import logging
import csv_rows
import numpy as np
import pytest

from tff_bn.programs import compare
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import training_flags

_SMALL = (
    '--model=mlp3',
    '--evaluate_every=1',
    '--local_steps=2',
    '--num_clients=4',
    '--classes_per_client=3',
)


@pytest.mark.slow
def test_comparison(tmp_path):
  names = ['moon', 'fedtan_ii+fedprox']
  arguments = [
      f'--algorithms=fedavg,{",".join(names)}',
      *_SMALL,
      '--rounds=2',
      '--sync_rounds=1',
      '--seeds=0',
      f'--output_dir={tmp_path}',
  ]
  assert compare.run(arguments) == command_line.OK
  fedavg, *rows = csv_rows.read(tmp_path / 'results.csv')
  assert [row['algorithm'] for row in rows] == names
  table = (tmp_path / 'results.md').read_text(encoding='utf-8')
  for row in rows:
    assert f'| {row["algorithm"]} ' in table
    assert np.isfinite(float(row['test_loss']))
    assert row['test_loss'] != fedavg['test_loss']
  moon, fedtan_ii = rows
  megabytes = 2350 * 4 * (1 + 4) * 2 / 2**20
  assert float(fedavg['megabytes']) == pytest.approx(megabytes)
  assert moon['megabytes'] == fedavg['megabytes']
  # The first of FedTAN's steps exchanges the statistics of the layer of mlp3
  # twice, and their gradients once.
  exchanges = [row['exchanges'] for row in (fedavg, *rows)]
  assert exchanges == ['2', '2', '5']
  # Mean and variance of 30 neurons, of 4 bytes each, and their gradients.
  statistics = 2 * 2 * 30 * 4 * (1 + 4) / 2**20
  assert float(fedtan_ii['megabytes']) == pytest.approx(megabytes + statistics)
  # The clients of moon keep a state, but have no own models.
  assert not (tmp_path / 'runs/moon-seed0/model/clients.npy').exists()


# In a full round, the server and the clients also send control variates of all
# trainable weights.
@pytest.mark.slow
@pytest.mark.parametrize(
    ('flag', 'num_sampled', 'full', 'repeated'),
    [
        ('--local_steps=2', 4, 0, 0),
        ('--clients_per_round=3', 3, 3, 0),
        # The first round shows that clients have different numbers of batches.
        ('--local_epochs=1', 4, 3, 1),
    ],
)
def test_rounds_with_control_variates_are_counted(
    tmp_path, flag, num_sampled, full, repeated
):
  arguments = [
      '--algorithm=scaffold',
      *(f for f in _SMALL if 'local_steps' not in f or 'epochs' not in flag),
      '--split=unbalanced',
      '--rounds=3',
      flag,
  ]
  arguments = [a for a in arguments if 'classes_per_client' not in a]
  assert train.run([*arguments, f'--output_dir={tmp_path}']) == command_line.OK
  *_, last = csv_rows.read(tmp_path / 'metrics.csv')
  assert last['exchanges'] == f'{3 + repeated}'
  number = (3 + repeated) * 2350 + full * 2290
  megabytes = number * 4 * (1 + num_sampled) / 2**20
  assert float(last['megabytes']) == pytest.approx(megabytes)
  assert last['full_rounds'] == f'{full}'
  assert last['repeated_rounds'] == f'{repeated}'


@pytest.mark.slow
def test_fedbs_switches_once_when_the_losses_are_alike(tmp_path):
  arguments = [
      '--algorithm=fedbs',
      *_SMALL,
      '--rounds=6',
      '--proximal_strength=0.5',
      '--fedbs_epsilon=0.08',
      f'--output_dir={tmp_path}',
  ]
  assert train.run(arguments) == command_line.OK
  first, *rows = csv_rows.read(tmp_path / 'metrics.csv')
  assert first['switched_to_fedprox'] == first['loss_std'] == ''
  are_alike = [float(row['loss_std']) < 0.08 for row in rows]
  # Otherwise the test shows nothing.
  assert 0 < are_alike.index(True) < 5
  expected = np.maximum.accumulate(are_alike).astype(int).astype(str)
  assert [row['switched_to_fedprox'] for row in rows] == list(expected)


# So large that all weights overflow in the first step.
_TOO_LARGE = '--client_learning_rate=1e38'


def test_run_stops_when_too_many_rounds_fail(tmp_path, capsys):
  arguments = [
      '--algorithm=fedavg',
      *_SMALL,
      _TOO_LARGE,
      '--rounds=8',
      '--max_failed_rounds=3',
      '--checkpoint_every=2',
      f'--output_dir={tmp_path}',
  ]
  assert train.run(arguments) == command_line.FAILED
  error = capsys.readouterr().err
  assert 'stopped after round 3: in the last 3 rounds the loss' in error
  assert '--max_failed_rounds=3' in error
  assert 'Likely causes: --client_learning_rate=1e+38, ' in error
  rows = csv_rows.read(tmp_path / 'metrics.csv')
  assert [row['round'] for row in rows] == ['0', '1', '2', '3']
  assert [row['num_dropped_clients'] for row in rows[1:]] == ['4'] * 3
  # The server keeps its model.
  assert len({row['test_loss'] for row in rows}) == 1
  assert not (tmp_path / 'model').exists()
  # The same command comes to the same end.
  before = (tmp_path / 'metrics.csv').read_bytes()
  assert train.run(arguments) == command_line.FAILED
  assert 'stopped after round 3' in capsys.readouterr().err
  assert (tmp_path / 'metrics.csv').read_bytes() == before


def test_run_whose_rounds_all_fail_is_no_success(tmp_path, capsys):
  arguments = [*_SMALL, _TOO_LARGE, '--max_failed_rounds=3', '--rounds=2']
  arguments.append(f'--output_dir={tmp_path}')
  assert train.run(arguments) == command_line.FAILED
  message = 'The final model is the initial model: all 2 rounds failed'
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'model').exists()
  assert len(csv_rows.read(tmp_path / 'metrics.csv')) == 3


@pytest.mark.slow
def test_run_with_fewer_failed_rounds_goes_on(tmp_path, monkeypatch):
  warnings = []
  monkeypatch.setattr(
      logging, 'warning', lambda *args: warnings.append(args[0] % args[1:])
  )
  arguments = [*_SMALL, '--client_learning_rate_schedule=3:0', '--rounds=4']
  specs = training_flags.TrainingFlags.specs()
  assert specs['max_failed_rounds'].default > 2
  assert (
      train.run([*arguments, _TOO_LARGE, f'--output_dir={tmp_path}'])
      == command_line.OK
  )
  changed_nothing = [w for w in warnings if 'changed nothing' in w]
  assert [w.split()[1] for w in changed_nothing] == ['1', '2']
  dropped = [
      row['num_dropped_clients']
      for row in csv_rows.read(tmp_path / 'metrics.csv')
  ]
  assert dropped == ['0', '4', '4', '0', '0']


@pytest.mark.slow
def test_comparison_goes_on_when_a_run_stops(tmp_path, capsys):
  arguments = [
      '--algorithms=centralized,fedbn',
      *_SMALL,
      # Centralized training ends with weights that are not finite, too.
      _TOO_LARGE,
      '--seeds=0',
      '--rounds=4',
      '--max_failed_rounds=1',
      f'--output_dir={tmp_path}',
  ]
  assert compare.run(arguments) == command_line.FAILED
  captured = capsys.readouterr()
  assert '[2/2] fedbn, seed 0' in captured.err
  assert captured.err.count('stopped after round 1: ') == 2
  assert '2 of 2 runs failed' in captured.err
  assert 'results: centralized, seed 0; fedbn, seed 0.' in captured.err
  results = csv_rows.read(tmp_path / 'results.csv')
  assert [row['rounds'] for row in results] == ['1', '1']
  assert results[0]['test_loss']
