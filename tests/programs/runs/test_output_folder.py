"""Tests for the folder of a program without `--output_dir`."""

import pathlib
import shutil

import pytest

from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import run_flags
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder

_DEFAULT = pathlib.Path('runs/test')


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def _choose(texts, *arguments):
  flags = command_line.parse(
      lambda values: run_flags.OutputFlags.define(
          values, output_dir=str(_DEFAULT)
      ),
      arguments,
  )
  return output_folder.choose(flags, texts)


def _begin(texts):
  """Begins a run as a program does, and returns its folder."""
  folder = _choose(texts)
  with run_folder.claim(folder):
    run_folder.check(folder, texts, overwrite=False)
    run_folder.begin(folder, 'tff-bn-test', texts, overwrite=False)
  return folder


def test_runs_with_other_flags_get_numbers(capsys):
  assert _begin({'rounds': '3', 'seed': '0'}) == _DEFAULT
  assert capsys.readouterr().err == ''
  assert _begin({'rounds': '3', 'seed': '1'}) == pathlib.Path('runs/test-2')
  assert capsys.readouterr().err == (
      'runs/test holds a run with other flags: --seed (0, now 1). The files of'
      ' this run go to runs/test-2.\n'
  )
  assert _begin({'rounds': '3', 'seed': '2'}) == pathlib.Path('runs/test-3')
  # The message is about the default folder.
  assert capsys.readouterr().err.startswith(
      'runs/test holds a run with other flags: --seed (0, now 2).'
  )


def test_the_same_command_continues(capsys):
  for seed in '012':
    _begin({'rounds': '3', 'seed': seed})
  capsys.readouterr()
  assert _choose({'rounds': '3', 'seed': '0'}) == _DEFAULT
  assert _choose({'rounds': '3', 'seed': '1'}) == pathlib.Path('runs/test-2')
  # More rounds continue a run; fewer are another one.
  assert _choose({'rounds': '9', 'seed': '1'}) == pathlib.Path('runs/test-2')
  assert capsys.readouterr().err == ''
  assert _choose({'rounds': '2', 'seed': '1'}) == pathlib.Path('runs/test-4')


def test_a_run_is_found_behind_a_gap():
  for seed in '012':
    _begin({'seed': seed})
  (_DEFAULT / 'flags.txt').unlink()
  (_DEFAULT.with_name('test-2') / 'flags.txt').unlink()
  assert _choose({'seed': '2'}) == pathlib.Path('runs/test-3')
  assert _choose({'seed': '3'}) == _DEFAULT


def test_folders_with_other_files_are_left_alone(tmp_path):
  (tmp_path / 'runs/test').mkdir(parents=True)
  (tmp_path / 'runs/test/notes.txt').touch()
  (tmp_path / 'runs/test-2').touch()
  (tmp_path / 'runs/test-old').mkdir()
  assert _begin({'seed': '0'}) == pathlib.Path('runs/test-3')


def test_a_damaged_run_is_named(capsys):
  _begin({'seed': '0'})
  (_DEFAULT / 'flags.txt').write_text('--seed=0')
  assert _choose({'seed': '0'}) == pathlib.Path('runs/test-2')
  message = capsys.readouterr().err
  assert 'runs/test holds a run that cannot be continued' in message
  assert 'runs/test/flags.txt is damaged: its end is missing' in message


def test_the_first_of_equal_runs_continues():
  _begin({'seed': '0'})
  shutil.copytree(_DEFAULT, _DEFAULT.with_name('test-2'))
  assert _choose({'seed': '0'}) == _DEFAULT


@pytest.mark.parametrize('name', ['test-old', 'test-01', 'test2'])
def test_folders_with_similar_names_do_not_count(name):
  _DEFAULT.with_name(name).mkdir(parents=True)
  (_DEFAULT.with_name(name) / 'notes.txt').touch()
  assert _choose({'seed': '0'}) == _DEFAULT


def test_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  assert _choose({}, '--output_dir=~/run') == tmp_path / 'home' / 'run'


def test_a_folder_that_is_given_is_used():
  _begin({'seed': '0'})
  given = _choose({'seed': '1'}, f'--output_dir={_DEFAULT}')
  assert given == _DEFAULT
  with pytest.raises(ValueError, match='other flags: --seed .0, now 1.'):
    run_folder.check(given, {'seed': '1'}, overwrite=False)
