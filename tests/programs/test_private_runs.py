"""Runs with `--privacy`, from the flags to the files."""

import csv_rows
import flag_cases
import numpy as np
import pytest

from tff_bn.analysis import privacy_accounting
from tff_bn.analysis.privacy_accounting import Sampling
from tff_bn.programs import compare
from tff_bn.programs import train

_ARGUMENTS = [
    *('--model=mlp3', '--num_clients=20', '--clients_per_round=4'),
    *('--local_steps=1', '--batch_size=8', '--evaluate_every=1'),
]
_DP = [*_ARGUMENTS, '--privacy=dp', '--dp_noise_multiplier=0.5']

pytestmark = pytest.mark.filterwarnings('ignore:Secure aggregation:UserWarning')


def _rows(folder):
  return csv_rows.read(folder / 'metrics.csv')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """Four rounds of FedTAN with noise."""
  folder = tmp_path_factory.mktemp('private') / 'run'
  arguments = [*_DP, '--algorithm=fedtan', '--rounds=4']
  assert train.run([*arguments, f'--output_dir={folder}']) == 0
  return folder


def test_epsilon_of_each_round(run):
  expected = [
      privacy_accounting.epsilon(0.5, Sampling(20, 4), rounds, 1e-5)
      for rounds in range(5)
  ]
  found = [float(row['epsilon']) for row in _rows(run)]
  np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_continued_run_repeats_the_noise(run, tmp_path):
  arguments = [*_DP, '--algorithm=fedtan', f'--output_dir={tmp_path}']
  for rounds in (1, 3, 4):
    assert train.run([*arguments, f'--rounds={rounds}']) == 0
  assert (tmp_path / 'metrics.csv').read_bytes() == (
      run / 'metrics.csv'
  ).read_bytes()
  assert (tmp_path / 'model/global.keras').exists() == (
      run / 'model/global.keras'
  ).exists()


@pytest.mark.slow
def test_more_rounds_need_other_noise_for_an_epsilon(tmp_path, capsys):
  arguments = [
      *(*_ARGUMENTS, '--algorithm=fedavg', '--privacy=dp', '--dp_epsilon=50'),
      f'--output_dir={tmp_path}',
  ]
  assert train.run([*arguments, '--rounds=1']) == 0
  noise = privacy_accounting.noise_multiplier(50, Sampling(20, 4), 1, 1e-5)
  said = capsys.readouterr().err
  assert f'noise multiplier {noise:.4g}, ε = 49.' in said
  before = (tmp_path / 'metrics.csv').read_bytes()
  assert train.run([*arguments, '--rounds=2']) != 0
  assert 'hyperparameters of the algorithm' in capsys.readouterr().err
  assert (tmp_path / 'metrics.csv').read_bytes() == before


@pytest.mark.slow
def test_secure_sums_are_counted_and_compared(tmp_path, capsys):
  arguments = [
      *(*_ARGUMENTS, '--algorithms=fedavg,fbn', '--rounds=1', '--seeds=0'),
      f'--output_dir={tmp_path / "plain"}',
  ]
  assert compare.run(arguments) == 0
  arguments[-1] = f'--output_dir={tmp_path / "secure"}'
  assert compare.run([*arguments, '--privacy=secure_sum']) == 0
  for name in ('fedavg', 'fbn'):
    plain, secure = (
        _rows(tmp_path / kind / 'runs' / f'{name}-seed0')[-1]
        for kind in ('plain', 'secure')
    )
    assert secure.pop('clipped_clients') == '0'
    assert float(secure['test_loss']) == pytest.approx(
        float(plain['test_loss']), rel=1e-4
    )
  assert 'out of the bounds' not in capsys.readouterr().err


@pytest.mark.slow
def test_values_out_of_bounds_are_said(tmp_path, caplog):
  arguments = [
      *(*_ARGUMENTS, '--algorithm=fedavg', '--rounds=1'),
      *('--privacy=secure_sum', '--secure_update_bound=1e-4'),
  ]
  assert train.run([*arguments, f'--output_dir={tmp_path}']) == 0
  assert int(_rows(tmp_path)[-1]['clipped_clients']) >= 4
  assert 'Round 1: values of clients were out of the bounds' in caplog.text


@flag_cases.parametrize("""
--privacy=dp
  --privacy=dp needs --dp_noise_multiplier or --dp_epsilon
--privacy=dp --dp_noise_multiplier=1 --dp_epsilon=2
  --dp_noise_multiplier=1.0 and --dp_epsilon=2.0 exclude each other
--privacy=dp --dp_noise_multiplier=-1
  --dp_noise_multiplier=-1
--privacy=dp --dp_epsilon=0
  --dp_epsilon=0
--privacy=dp --dp_epsilon=1 --dp_delta=1
  --dp_delta=1
--privacy=private
  --privacy=private
--dp_noise_multiplier=1
  --dp_noise_multiplier=1.0 is only for --privacy=dp
--privacy=secure_sum --dp_clip_norm=1
  --dp_clip_norm=1.0 is only for --privacy=dp
--privacy=dp --dp_epsilon=1 --secure_update_bound=1
  --secure_update_bound=1.0 is only for --privacy=secure_sum
--privacy=dp --dp_epsilon=1 --client_weighting=num_examples
  --client_weighting=num_examples is impossible with --privacy=dp
--privacy=secure_sum --model_aggregator=median
  --privacy=secure_sum gives the server sums
--privacy=dp --dp_epsilon=1 --attack=foe --num_attackers=1
  --privacy=dp gives the server sums
--privacy=dp --dp_epsilon=1 --algorithm=single
  --algorithm=single
--privacy=dp --dp_epsilon=1 --algorithm=scaffold
  scaffold
--privacy=dp --dp_epsilon=1 --algorithm=fednova
  FedNova is impossible
--privacy=dp --dp_epsilon=1 --algorithm=feddyn
  impossible with FedDyn
""")
def test_wrong_flags(arguments, expected, tmp_path, capsys):
  folder = tmp_path / 'run'
  arguments = ['--model=mlp3', *arguments, f'--output_dir={folder}']
  assert train.run(arguments) == 2
  assert expected.lower() in capsys.readouterr().err.lower()
  assert not folder.exists()
