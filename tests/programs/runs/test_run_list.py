"""Tests for the list of runs and the estimate of the time."""

import json
import os

import pytest

from tff_bn.programs import compare
from tff_bn.programs.cli import command_line
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_list
from tff_bn.programs.runs import run_timing


def _runs(*arguments):
  flags = command_line.parse(
      compare.define_flags, ['--seeds=0', '--rounds=10', *arguments]
  )
  return compare.plan(flags).trained()


def _begin(run, folder):
  folder.mkdir(parents=True, exist_ok=True)
  run_folder.begin(folder, 'x', run.settings.to_flags(), overwrite=False)


def _checkpoint(folder, round_num):
  (folder / 'checkpoints' / f'round_{round_num}').mkdir(parents=True)


def test_timing(tmp_path):
  assert run_timing.read(tmp_path) is None
  run_timing.write(tmp_path, 12.34567, 5)
  assert run_timing.read(tmp_path) == (12.346, 5)
  content = json.loads((tmp_path / 'timing.json').read_text())
  assert (content['seconds'], content['rounds']) == (12.346, 5)
  for damaged in (
      '',
      '{',
      '[]',
      '{"seconds": 1}',
      '{"seconds": [], "rounds": 1}',
  ):
    (tmp_path / 'timing.json').write_text(damaged)
    assert run_timing.read(tmp_path) is None


def test_saved_round(tmp_path):
  assert run_folder.saved_round(tmp_path) == 0
  for name in ('round_0', 'round_7', 'round_10', '.round_20.part', 'round_x'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  assert run_folder.saved_round(tmp_path) == 10


def test_remaining_rounds(tmp_path):
  (run,) = _runs('--algorithms=fbn')

  def remaining(state, run=run):
    return run_list.look(run, tmp_path, state).remaining_rounds

  _begin(run, tmp_path)
  assert remaining('begun') == 10
  _checkpoint(tmp_path, 7)
  assert remaining('begun') == 3
  assert remaining('new') == 10
  assert remaining('finished') == 0
  _checkpoint(tmp_path, 10)
  # With more rounds, it goes on.
  (longer,) = _runs('--algorithms=fbn', '--rounds=15')
  assert remaining('begun', longer) == 5
  assert run_list.look(run, tmp_path, 'begun').seconds_per_round is None
  run_timing.write(tmp_path, 8.0, 4)
  assert run_list.look(run, tmp_path, 'begun').seconds_per_round == 2.0


def _listed(run, state, rounds, seconds=None):
  return run_list.ListedRun(run, state, rounds, seconds)


def test_estimate():
  fedavg, fbn, single = _runs('--algorithms=fedavg,fbn,single')
  other, _, _ = _runs('--algorithms=fedavg,fbn,single', '--rounds=20')
  runs = [
      _listed(fedavg, 'finished', 10, 2.0),
      _listed(fedavg, 'finished', 10, 4.0),
      _listed(fbn, 'finished', 10, 9.0),
      # Of the same algorithm: 3 seconds a round.
      _listed(other, 'begun', 5),
      # Of a new one: the mean of 2, 4 and 9.
      _listed(single, 'new', 0),
  ]
  assert run_list.remaining_seconds(runs, 1) == 15 * 3 + 10 * 5
  assert run_list.remaining_seconds(runs, 2) == (15 * 3 + 10 * 5) / 2
  assert run_list.remaining_seconds(runs, 9) == (15 * 3 + 10 * 5) / 2
  assert run_list.remaining_seconds(runs[:3], 2) == 0
  assert run_list.remaining_seconds(runs[3:], 1) is None


def test_text():
  fedavg, fbn = _runs('--algorithms=fedavg,fbn', '--sweep=local_steps=3')
  runs = [_listed(fedavg, 'finished', 10, 2.0), _listed(fbn, 'begun', 4)]
  assert run_list.text(runs, 1).splitlines() == [
      'finished  fedavg, local_steps=3, seed 0',
      'begun     fbn, local_steps=3, seed 0  (4 of 10 rounds)',
      '2 runs: 1 finished, 1 begun, 0 new.',
      'About 12 seconds with --jobs=1, estimated from the finished runs.',
  ]
  assert run_list.text(runs[:1], 1).endswith('1 finished, 0 begun, 0 new.')
  assert run_list.text(runs[1:], 1).endswith('until a first run is finished.')


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (119, '119 seconds'),
        (150, '2.5 minutes'),
        (7199, '120.0 minutes'),
        (9000, '2.5 hours'),
        (180000, '2.1 days'),
    ],
)
def test_durations(seconds, text):
  (run,) = _runs('--algorithms=fbn')
  runs = [_listed(run, 'finished', 10, seconds / 10), _listed(run, 'new', 0)]
  assert f'About {text} with' in run_list.text(runs, 1)


def test_list_writes_nothing(tmp_path, capsys):
  arguments = ['--algorithms=fedavg,fbn', '--seeds=0', '--rounds=10']
  arguments += ['--sweep=local_steps=1,2', f'--output_dir={tmp_path}/new']
  assert compare.run([*arguments, '--list']) == 0
  assert not os.listdir(tmp_path)
  printed = capsys.readouterr().out
  assert printed.count('new       f') == 4
  assert '4 runs: 0 finished, 0 begun, 4 new.' in printed
  # A folder of something else is refused, too.
  run, *_ = _runs(*arguments[:-1])
  folder = tmp_path / 'new' / 'runs' / run.folder
  _begin(run, folder)
  _begin(run, tmp_path / 'new')
  before = sorted(tmp_path.rglob('*'))
  assert compare.run([*arguments, '--list']) == 2
  assert 'holds a run with other flags' in capsys.readouterr().err
  assert compare.run([*arguments, '--list', '--overwrite']) == 0
  assert '4 new' in capsys.readouterr().out
  assert sorted(tmp_path.rglob('*')) == before
