"""Tests that programs write through no links in the folder of a run."""

import os
import re
import shutil

import printed
import pytest

from tff_bn.common import files
from tff_bn.papers import analyze
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.runs import run_folder

_FLAGS = ('--algorithm=fedavg', '--model=mlp3', '--rounds=1')
_COMPARE = ('--algorithms=fedavg,fbn', '--seeds=0', '--rounds=1')
# Entries of runs and of comparisons.
_NAMES = (
    'flags.txt',
    'metrics.csv',
    'client_states.sqlite-wal',
    'logdir',
    'checkpoints',
    'model',
    'plots',
    'plots/accuracy.png',
    'report.html',
    '.report.html.part',
    'results.csv',
    'results.md',
    'held_out.csv',
    'timing.json',
    'evaluation.csv',
    'class_metrics.csv',
    'evaluation_confusion.csv',
    'exported_clients',
    'adapted_clients',
    'analyses',
    'permutation.csv',
)


def _begin(folder, texts):
  folder.mkdir(parents=True)
  run_folder.begin(folder, 'x', texts, overwrite=False)
  (folder / 'model').mkdir()
  (folder / 'metrics.csv').write_text('')


@pytest.fixture
def folder(tmp_path):
  """A folder with the flags of a run."""
  _begin(tmp_path / 'run', dict(algorithm='fedavg', rounds='1'))
  return tmp_path / 'run'


def _link(path, target, is_dangling):
  target.parent.mkdir(parents=True)
  if os.path.lexists(path):
    path.rename(target)
  elif not is_dangling:
    target.write_text('mine')
  if is_dangling:
    shutil.rmtree(target.parent)
  path.parent.mkdir(exist_ok=True)
  path.symlink_to(target)


def _files(folder):
  return {path: path.lstat().st_mtime_ns for path in folder.rglob('*')}


def _fails(program, arguments, capsys):
  capsys.readouterr()
  assert program.run(arguments) == 2
  return printed.error(capsys.readouterr().err)


@pytest.mark.parametrize('is_dangling', [False, True])
@pytest.mark.parametrize('name', _NAMES)
def test_links_in_a_run(name, is_dangling, folder, tmp_path):
  path, target = folder / name, tmp_path / 'elsewhere' / 'x'
  _link(path, target, is_dangling)
  before = _files(tmp_path)
  message = f'{path} is a symbolic link to {target}'
  with pytest.raises(ValueError, match=re.escape(message)):
    run_folder.check_entries(folder)
  assert _files(tmp_path) == before


@pytest.mark.parametrize('name', ['flags.txt', 'checkpoints'])
def test_every_program_checks_the_entries(name, folder, tmp_path, capsys):
  path, target = folder / name, tmp_path / 'elsewhere' / 'x'
  _link(path, target, False)
  before = _files(tmp_path)
  for program, arguments in (
      (train, [*_FLAGS, f'--output_dir={folder}']),
      (compare, [*_COMPARE, f'--output_dir={folder}']),
      (compare, [*_COMPARE, f'--output_dir={folder}', '--list']),
      (evaluate, [f'--run={folder}']),
      (analyze, ['permutation', f'--run={folder}']),
      (analyze, ['kept_share', f'--output_dir={folder}']),
      (analyze, ['fedbn_toy', f'--output_dir={folder}']),
      (analyze, ['normalization_error', f'--output_dir={folder}']),
  ):
    error = _fails(program, arguments, capsys)
    assert f'{path} is a symbolic link to {target}' in error
  assert _files(tmp_path) == before


def test_links_where_an_evaluation_is_written(folder, tmp_path, capsys):
  target = tmp_path / 'output'
  target.mkdir()
  (target / 'exported_clients').symlink_to(tmp_path)
  error = _fails(
      evaluate, [f'--run={folder}', f'--output_dir={target}'], capsys
  )
  assert f'{target}/exported_clients is a symbolic link' in error


@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize('name', ['runs', 'runs/fedavg-seed0', 'runs/other'])
def test_links_to_the_runs_of_a_comparison(
    name, overwrite, folder, tmp_path, capsys
):
  _begin(folder / 'runs/fedavg-seed0', dict(algorithm='fedavg'))
  path, target = folder / name, tmp_path / 'elsewhere' / 'x'
  _link(path, target, False)
  before = _files(tmp_path)
  arguments = [*_COMPARE, f'--output_dir={folder}']
  arguments += ['--overwrite'] * overwrite
  error = _fails(compare, arguments, capsys)
  assert f'{path} is a symbolic link to {target}' in error
  assert _files(tmp_path) == before


def test_links_in_the_runs_of_a_comparison(folder, tmp_path, capsys):
  run = folder / 'runs/fbn-seed0'
  _begin(run, dict(algorithm='fbn'))
  shutil.rmtree(folder / 'model')
  (run / 'checkpoints').symlink_to(tmp_path)
  arguments = [*_COMPARE, f'--output_dir={folder}']
  # The comparison itself is the same.
  comparison = compare.plan(
      compare.command_line.parse(compare.define_flags, arguments)
  )
  flags = compare.command_line.parse(compare.define_flags, arguments)
  (folder / 'flags.txt').unlink()
  (folder / 'metrics.csv').unlink()
  texts = compare.comparison_flags(flags, comparison)
  shutil.move(folder / 'runs', tmp_path / 'kept')
  run_folder.begin(folder, 'x', texts, overwrite=False)
  shutil.move(tmp_path / 'kept', folder / 'runs')
  error = _fails(compare, arguments, capsys)
  assert f'{run}/checkpoints is a symbolic link' in error


def test_the_folder_itself_may_be_a_link(folder, tmp_path):
  link = tmp_path / 'link'
  link.symlink_to(folder)
  with run_folder.claim(link):
    run_folder.check(link, run_folder.read_flags(link), overwrite=False)
  (folder / 'notes').symlink_to(tmp_path / 'anywhere')
  run_folder.check_entries(link)


def test_temporary_files_are_written_through_no_link(tmp_path):
  target = tmp_path / 'mine'
  for is_folder in (False, True):
    if is_folder:
      target.unlink()
      target.mkdir()
    else:
      target.write_text('kept')
    files.temporary_path(tmp_path / 'x').symlink_to(target)
    files.replace(tmp_path / 'x', 'new')
    assert (tmp_path / 'x').read_text() == 'new'
    assert target.is_dir() or target.read_text() == 'kept'
    assert not files.temporary_path(tmp_path / 'x').exists()
