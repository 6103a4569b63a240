"""Tests that only code which the user names is run."""

import pathlib
import sys

from absl import flags as absl_flags
import printed
import pytest
import tiny_runs

from tff_bn.papers import analyze
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import logging_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import finished_run
from tff_bn.programs.runs import run_folder

_CODE = "open('executed', 'a').write('x')\ndef f(*arguments): pass\n"


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'run'
  assert train.run([*tiny_runs.FLAGS, f'--output_dir={folder}']) == 0
  return folder


@pytest.fixture
def received(finished, tmp_path, monkeypatch):
  """A comparison's folder from somebody else, which is the working folder."""
  for place in ('.', 'runs', 'runs/x', 'runs/x/model'):
    (tmp_path / place).mkdir(exist_ok=True)
  (tmp_path / 'runs/x/model').rmdir()
  (tmp_path / 'runs/x').rmdir()
  tiny_runs.with_flags(finished, tmp_path / 'runs/x', model='evil:f')
  for place in ('.', 'runs', 'runs/x', 'runs/x/model'):
    (tmp_path / place / 'evil.py').write_text(_CODE)
  monkeypatch.chdir(tmp_path)
  # As with `python -m`, or PYTHONPATH=. or the folder of the run.
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.syspath_prepend(tmp_path / 'runs/x')
  yield tmp_path
  sys.modules.pop('evil', None)


def _fails(program, arguments, capsys):
  capsys.readouterr()
  assert program.run(arguments) == 2
  return printed.error(capsys.readouterr().err)


@pytest.mark.parametrize(
    ('program', 'arguments', 'run'),
    [
        (evaluate, [], 'runs/x'),
        (evaluate, [], '.'),
        (evaluate, ['--dataset=digits_domains', '--split=iid'], 'runs/x'),
        (evaluate, ['--export_client=client_0'], 'runs/x'),
        (analyze, ['permutation'], 'runs/x'),
        (analyze, ['kept_share'], '.'),
    ],
)
def test_code_of_a_run(program, arguments, run, received, monkeypatch, capsys):
  if run == '.':
    monkeypatch.chdir(received / 'runs/x')
  error = _fails(program, [*arguments, f'--run={run}'], capsys)
  assert f'{run if run != "." else "flags.txt"}' in error
  assert '--model=evil:f names code' in error
  assert 'somebody else' in error
  assert 'add --trust_run' in error
  assert 'evil' not in sys.modules
  assert not list(received.rglob('executed'))


@pytest.mark.parametrize('name', ['os.path:join', 'subprocess:call', 'evil:g'])
def test_functions_of_libraries(name, received, capsys):
  run = received / 'runs/x'
  path = run / 'flags.txt'
  text = path.read_text().replace('evil:f', name)
  # Nobody has trained it: there is no manifest.
  path.write_text(text)
  (run / 'model/manifest.json').unlink()
  error = _fails(evaluate, [f'--run={run}'], capsys)
  assert f'--model={name} names code' in error


def test_a_trusted_run(received, capsys):
  error = _fails(evaluate, ['--run=runs/x', '--trust_run'], capsys)
  # The function was called, but is none that builds a model.
  assert 'model=evil:f: its function, called with' in error
  assert (received / 'executed').read_text() == 'x'
  with pytest.raises(command_line.UsageError, match='names code'):
    finished_run.read_settings(pathlib.Path('runs/x'), is_trusted=False)
  settings = finished_run.read_settings(pathlib.Path('runs/x'), is_trusted=True)
  assert settings.model == 'evil:f'


def test_comparisons_name_the_run(received, capsys):
  (received / 'runs/x').rename(received / 'runs/fedavg-seed0')
  (received / 'flags.txt').write_text('--algorithms=fedavg\n--seeds=0\n')
  error = _fails(analyze, ['matching', '--run=.'], capsys)
  assert 'runs/fedavg-seed0/flags.txt: --model=evil:f names code' in error


class TestFlagfiles:

  @pytest.mark.parametrize(
      ('program', 'line'),
      [
          (train, '--model=evil:f'),
          (train, '--metrics_hook=evil:f'),
          (train, '--model_aggregator=nnm+evil:f'),
          (train, '--dataset=tfds:kaggle:x'),
          (train, '--dataset=domains:a=digits,b=tfds:space:x'),
          (compare, '--sweep=model=mlp3,evil:f'),
          (compare, '--sweep=gamma=0,1\n--sweep=--model = evil:f'),
          (train, '--flagfile=other.flags'),
      ],
  )
  def test_code_that_only_a_run_names(self, program, line, received, capsys):
    path = received / 'runs/x/flags.txt'
    (path.parent / 'model/manifest.json').unlink()
    path.write_text(f'{line}\n')
    (received / 'other.flags').write_text('--model=evil:f\n')
    (received / 'link.flags').symlink_to(path)
    for name in (path, 'link.flags', 'runs/x/../x/flags.txt'):
      error = _fails(program, [f'--flagfile={name}', '--output_dir=o'], capsys)
      assert 'names code' in error
      assert 'give this flag in the command itself' in error
    # A link of this name to a file of another name.
    path.rename(received / 'renamed')
    path.symlink_to(received / 'renamed')
    error = _fails(program, [f'--flagfile={path}', '--output_dir=o'], capsys)
    assert 'names code' in error
    assert 'evil' not in sys.modules
    assert not (received / 'o').exists()

  def test_the_command_may_name_it(self, received):
    path = received / 'runs/x/flags.txt'
    (path.parent / 'model/manifest.json').unlink()

    def source(*arguments):
      return command_line.parse(train.define_flags, arguments).source('model')

    assert source('--model=evil:f', f'--flagfile={path}') == 2
    # So may a flagfile of the user, and the models of this package are no code.
    (received / 'mine.flags').write_text('--model=evil:f\n')
    assert source('--flagfile=mine.flags', f'--flagfile={path}') == 1
    path.write_text('--model=mlp4\n--dataset=tfds:mnist:3.*.*\n')
    assert source(f'--flagfile={path}') == 1


def test_trust_in_a_file_of_a_run(received, capsys):
  (received / 'flags.txt').write_text('--trust_run\n')
  for program, name in ((evaluate, []), (analyze, ['matching'])):
    arguments = [*name, '--flagfile=flags.txt', '--run=runs/x']
    error = _fails(program, arguments, capsys)
    assert '--trust_run=true names code' in error
  assert not list(received.rglob('executed'))


def test_flags_that_name_code_are_known():
  values = absl_flags.FlagValues()
  train.define_flags(values)
  explained = {
      name
      for name in values
      if 'package.module:' in ' '.join(values[name].help.split())
  }
  known = {
      name for name in values if values[name].parser.values.names_code('evil:f')
  }
  # The help of the first two refers to the flag before them; the last one is a
  # file, which can contain code.
  assert known == explained | {
      'statistics_aggregator',
      'exchange_aggregator',
      'initial_model',
  }
  assert {'dataset', 'split', 'model', 'model_aggregator'} <= known
  groups = (settings_lib.RunSettings, logging_flags.LoggingFlags)
  assert known <= {name for group in groups for name in group.specs()}


def test_resuming_needs_no_trust(received):
  """The command of a run names its model itself."""
  texts = run_folder.read_flags(received / 'runs/x')
  arguments = [f'--{name}={text}' for name, text in texts.items()]
  flags = command_line.parse(train.define_flags, arguments)
  assert flags.model == 'evil:f'
  settings = settings_lib.resolve(flags, 'fedavg', 0)
  assert settings_lib.trust_flag(settings) == ' --trust_run'
  flags = flags.replacing({'model': 'mlp3'})
  assert not settings_lib.trust_flag(settings_lib.resolve(flags, 'fedavg', 0))
