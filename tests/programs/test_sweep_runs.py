"""Tests that run sweeps: what they write, and that they go on."""

import contextlib
import html
import io
import os
import re
import signal
import sys

import csv_rows
import ended_programs
import numpy as np
import pytest

from tff_bn.imports import dependencies
from tff_bn.programs import compare
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings
from tff_bn.programs.results import charts
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_process
from tff_bn.programs.runs import run_timing
from tff_bn.training import termination

_SMALL = (
    '--model=mlp3',
    '--num_clients=3',
    '--batch_size=8',
    '--evaluate_every=1',
    '--split=dirichlet',
)


def _contents(folder):
  """Returns the files whose bits are the same in every repetition."""
  contents = {}
  for path in sorted(folder.rglob('*')):
    if path.name in ('flags.txt', 'metrics.csv', 'results.csv', 'results.md'):
      contents[str(path.relative_to(folder))] = path.read_bytes()
    elif path.name in ('weights.npz', 'clients.npy'):
      arrays = np.load(path)
      values = arrays if path.suffix == '.npz' else {'': arrays}
      contents[str(path.relative_to(folder))] = {
          name: values[name].tobytes() for name in values
      }
  return contents


def _titles(monkeypatch):
  """Returns a mapping that will have the titles of all figures, by name."""
  titles = {}
  save = charts.save

  def keep(folder, drawings):
    titles.update(
        {
            name: ' '.join(drawing['title']['text'])
            for name, drawing in drawings.items()
        }
    )
    save(folder, drawings)

  monkeypatch.setattr(charts, 'save', keep)
  return titles


@pytest.mark.slow
def test_sweep_grows(tmp_path, monkeypatch, capfd):
  folder = tmp_path / 'sweep'
  titles = _titles(monkeypatch)
  arguments = ['--algorithms=fedavg', '--seeds=0', *_SMALL]
  arguments.append(f'--output_dir={folder}')
  assert compare.run([*arguments, '--sweep=local_steps=1', '--rounds=1']) == 0
  before = _contents(folder / 'runs')
  assert len(before) == 3
  capfd.readouterr()

  # One more value, in another process.
  arguments += ['--sweep=local_steps=1,2', '--rounds=1']
  assert compare.run([*arguments, '--list']) == 0
  printed = capfd.readouterr().out
  assert '2 runs: 1 finished, 0 begun, 1 new.' in printed
  assert 'About ' in printed
  assert compare.run([*arguments, '--jobs=2']) == 0
  captured = capfd.readouterr()
  assert '[1/2] fedavg, local_steps=1, seed 0: finished\n' in captured.err
  assert '[2/2] fedavg, local_steps=2, seed 0\n' in captured.err
  assert '[2/2] round 1/1  train_loss' in captured.err
  data = 'digits, 3 clients, --split=dirichlet'
  assert titles['heat_map_algorithm_local_steps'] == (
      'Accuracy in %, global model on the whole test set: value of the last'
      f' round, one seed {data}'
  )
  assert titles['test_loss'] == (
      f'{data} Loss: global model on the whole test set'
  )
  assert {path.name for path in (folder / 'plots').iterdir()} == {
      'heat_map_algorithm_local_steps.png',
      'heat_map_algorithm_local_steps_clients.png',
      'test_accuracy.png',
      'client_test_accuracy.png',
      'client_test_loss.png',
      'train_loss.png',
      'test_loss.png',
      'label_distribution.png',
  }
  after = _contents(folder / 'runs')
  assert before.items() < after.items()
  rows = csv_rows.read(folder / 'results.csv')
  assert list(rows[0])[:3] == ['algorithm', 'local_steps', 'seed']
  assert [row['local_steps'] for row in rows] == ['1', '2']
  assert '--sweep=local_steps=1,2\n' in (folder / 'flags.txt').read_text()

  # The process has computed the same bits as this one does.
  alone = tmp_path / 'alone'
  new = folder / 'runs' / 'fedavg-local_steps=2-seed0'
  flags = [f'--flagfile={new}/flags.txt', f'--output_dir={alone}']
  assert train.run(flags) == 0
  assert _contents(alone) == _contents(new)
  timing = run_timing.read(new)
  assert timing.rounds == 1 and timing.seconds > 0


@pytest.mark.slow
def test_rounds_grow(tmp_path, monkeypatch, capsys):
  arguments = ['--algorithm=fedbn', *_SMALL, '--local_steps=1']
  arguments += ['--evaluate_every=2', '--output_dir']
  grown = tmp_path / 'grown'
  assert train.run([*arguments, str(grown), '--rounds=1']) == 0
  assert train.run([*arguments, str(grown), '--rounds=3']) == 0
  rows = csv_rows.read(grown / 'metrics.csv')
  # Round 1 was evaluated only as the last round.
  assert [row['round'] for row in rows] == ['0', '2', '3']

  # A finished run says so, and builds nothing.
  monkeypatch.setattr(jobs, 'Builder', None)
  monkeypatch.setattr(dependencies, 'require_tff', None)
  capsys.readouterr()
  assert train.run([*arguments, str(grown), '--rounds=3']) == 0
  printed = capsys.readouterr().out
  last = csv_rows.read(grown / 'metrics.csv')[-1]
  described = [
      ', '.join(
          f'{name} {float(last[f"{prefix}_{name}"]):.4f}'
          for name in ('loss', 'accuracy')
      )
      for prefix in ('test', 'client_test')
  ]
  assert printed.splitlines()[:4] == [
      'This run is finished.',
      'After round 3, means over at most 20 clients:',
      "  clients' own models on the whole test set (mean):      "
      f' {described[0]}',
      "  each client's model on its own test data (mean):       "
      f' {described[1]}',
  ]
  page = html.unescape((grown / 'report.html').read_text(encoding='utf-8'))
  own_models = "clients' own models on the whole test set (mean)"
  assert f'<figcaption>Accuracy: {own_models}</figcaption>' in page
  assert f'<li>Accuracy, %: {own_models}.</li>' in page
  assert 'Model:   import keras\n' in printed
  assert f"model = keras.models.load_model('{grown}/model/" in printed
  assert f'tff-bn-evaluate --run={grown}\n' in printed
  monkeypatch.setattr(dependencies, 'require_tff', lambda: None)
  # A run without its page or without a model is not finished.
  for change in ('report.html', 'model/weights.npz'):
    (grown / change).rename(tmp_path / 'backup')
    assert train.run([*arguments, str(grown), '--rounds=3']) == 2
    assert "'NoneType' object is not callable" in capsys.readouterr().err
    (tmp_path / 'backup').rename(grown / change)


@pytest.mark.slow
def test_sweep_that_is_killed_twice_gives_the_same_bits(tmp_path):
  arguments = [
      '--algorithms=fedbn',
      '--seeds=0',
      '--sweep=dirichlet_alpha=0.1,1,10,100',
      '--local_steps=1',
      '--rounds=8',
      '--checkpoint_every=1',
      *_SMALL,
  ]
  one, many = tmp_path / 'one', tmp_path / 'many'
  assert compare.run([*arguments, f'--output_dir={one}']) == 0
  interrupted = [*arguments, f'--output_dir={many}', '--jobs=2']
  errors = tmp_path / 'errors'
  # In the middle of a run, when others are finished.
  code, commands = ended_programs.interrupt(
      compare,
      interrupted,
      errors,
      signal.SIGKILL,
      lambda text: '[3/4] round 2' in text,
  )
  assert commands
  assert code == -signal.SIGKILL
  # A run that was killed while it wrote its last files has a model, too.
  finished = [
      model
      for model in many.glob('runs/*/model')
      if run_folder.is_complete(
          model.parent, run_folder.read_flags(model.parent)
      )
  ]
  assert 1 <= len(finished) < 4
  times = {path: path.stat().st_mtime_ns for path in finished}
  code, commands = ended_programs.interrupt(
      compare,
      interrupted,
      errors,
      signal.SIGTERM,
      # At the kill, one of the two can have been past its last round.
      lambda text: re.search(r'\[[34]/4\] round ', text),
  )
  assert commands
  assert code == 143
  assert 'tff-bn-compare: terminated.' in errors.read_text(encoding='utf-8')
  assert len(list(many.glob('runs/*/model'))) < 4
  assert not (many / 'results.csv').exists()
  # The number of processes does not matter.
  assert compare.run([*arguments, f'--output_dir={many}']) == 0
  assert {path: path.stat().st_mtime_ns for path in finished} == times
  contents = _contents(one)
  assert len(contents) == 3 + 4 * 4
  assert _contents(many) == contents


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(tmp_path):
  arguments = ['--algorithms=fedavg,fedbn', '--seeds=0', '--rounds=500']
  arguments += [*_SMALL, '--local_steps=1', f'--output_dir={tmp_path}/run']
  errors = tmp_path / 'errors'
  code, commands = ended_programs.interrupt(
      compare,
      [*arguments, '--jobs=2'],
      errors,
      signal.SIGINT,
      lambda text: '[1/2] round 3/' in text,
  )
  assert code == 130 and commands
  assert errors.read_text(encoding='utf-8').endswith(
      'tff-bn-compare: interrupted.\n'
  )
  # The last round of each was saved.
  rounds = [
      int(path.name.removeprefix('round_'))
      for path in tmp_path.glob('run/runs/fedavg-seed0/checkpoints/*')
  ]
  assert max(rounds) % 10


def _order(folder, *arguments):
  """Returns the order of a run, and the descriptor of its folder."""
  flags = command_line.parse(train.define_flags, [*_SMALL, *arguments])
  texts = settings.resolve(flags, 'fedavg', 0).to_flags()
  run_folder.begin(folder, 'x', texts, overwrite=False)
  descriptor = os.open(folder, os.O_RDONLY)
  return run_process.Order(str(folder), descriptor).line(), descriptor


def test_process_of_a_run_without_a_usable_model(tmp_path, monkeypatch, capfd):
  """Runs the program of a child process in this process."""
  arguments = ['--rounds=1', '--local_steps=1', '--client_learning_rate=1e23']
  order, descriptor = _order(tmp_path, *arguments)
  monkeypatch.setattr(sys, 'stdin', io.StringIO(order + run_process.END))
  assert run_process.run([]) == 0
  out, err = capfd.readouterr()
  assert 'The final model is not finite' in err
  for text in (out, err):
    assert text.endswith(f'{run_process.MARK}{run_process.NO_MODEL}')
  with pytest.raises(OSError, match='Bad file descriptor'):
    os.fstat(descriptor)


def test_process_ends_after_a_run_that_lost_a_signal(tmp_path, monkeypatch):
  """Otherwise it would wait for an order, and its parent for its end."""
  order, _ = _order(tmp_path, '--rounds=1')
  monkeypatch.setattr(sys, 'stdin', io.StringIO(2 * order + run_process.END))
  trained = []

  def train_next(*arguments):
    trained.append(arguments)
    with contextlib.suppress(termination.Terminated):
      signal.raise_signal(signal.SIGTERM)
    return True

  monkeypatch.setattr(jobs, 'train_next', train_next)
  assert run_process.run([]) == command_line.TERMINATED
  assert len(trained) == 1
