"""Tests that a run's entries are files and folders, and never links."""

import dataclasses
import os
import shutil
import socket

import pytest
import training_fakes

from tff_bn.training import run_entries

_CONFIG = dataclasses.replace(
    training_fakes.CONFIG, rounds=2, checkpoint_every=1
)
_LONGER = dataclasses.replace(_CONFIG, rounds=3)


@pytest.fixture(scope='module')
def finished(model, tmp_path_factory):
  run_dir = tmp_path_factory.mktemp('finished')
  training_fakes.train(model, run_dir, _CONFIG, stateful=True)
  return run_dir


@pytest.fixture
def run(finished, tmp_path):
  return shutil.copytree(finished, tmp_path / 'run')


def _entries(run):
  """Returns what a link may replace: names that are, or could be there."""
  return (
      *run_entries.FILES,
      *run_entries.FOLDERS,
      '.metrics.csv.part',
      '.model.part',
      'checkpoints/round_2',
      'checkpoints/.round_3.part',
      'checkpoints/round_1/state.npz',
      f'logdir/{os.listdir(run / "logdir")[0]}',
      'model/weights.npz',
  )


@pytest.mark.parametrize('is_dangling', [False, True])
def test_links_are_refused(model, run, tmp_path, is_dangling):
  elsewhere = tmp_path / 'elsewhere'
  for name in _entries(run):
    copy = shutil.copytree(run, tmp_path / 'copy')
    path, target = copy / name, elsewhere / name
    target.parent.mkdir(parents=True)
    if path.exists():
      path.rename(target)
    elif not is_dangling:
      target.mkdir()
    if is_dangling:
      shutil.rmtree(elsewhere)
    path.symlink_to(target)
    before = training_fakes.files(tmp_path)
    with pytest.raises(
        ValueError, match=f'{path} is a symbolic link to {target}'
    ):
      training_fakes.train(model, copy, _LONGER, True)
    assert training_fakes.files(tmp_path) == before
    assert path.is_symlink()
    shutil.rmtree(copy)
    shutil.rmtree(elsewhere, ignore_errors=True)


def test_wrong_kinds_are_refused(model, run, monkeypatch):
  for name, kind in (
      *((name, 'a file') for name in run_entries.FILES),
      *((name, 'a folder') for name in run_entries.FOLDERS),
  ):
    path, kept = run / name, run / 'kept'
    if path.exists():
      path.rename(kept)
    if kind == 'a file':
      path.mkdir()
    else:
      path.write_text('')
    with pytest.raises(ValueError, match=f'{path} is not {kind}'):
      training_fakes.train(model, run, _CONFIG, True)
    if kind == 'a file':
      path.rmdir()
      os.mkfifo(path)  # Reading it would wait for ever.
      with pytest.raises(ValueError, match=f'{path} is not {kind}'):
        run_entries.check(run)
    path.unlink()
    if kept.exists():
      kept.rename(path)
  with socket.socket(socket.AF_UNIX) as server:
    monkeypatch.chdir(run / 'logdir')  # Such a path must be short.
    server.bind('socket')
    with pytest.raises(ValueError, match='logdir/socket is not a file'):
      run_entries.check(run)
    (run / 'logdir' / 'socket').unlink()
  run_entries.check(run)


def test_store_with_another_name(model, run, tmp_path):
  os.link(run / 'client_states.sqlite', tmp_path / 'copy')
  before = training_fakes.files(tmp_path)
  with pytest.raises(ValueError, match='client_states.sqlite is a hard link'):
    training_fakes.train(model, run, _CONFIG, True)
  assert training_fakes.files(tmp_path) == before


def test_other_files_and_the_folder_may_be_links(model, run, tmp_path):
  (run / 'notes').symlink_to(tmp_path / 'anywhere')
  (tmp_path / 'link').symlink_to(run)
  result = training_fakes.train(model, tmp_path / 'link', _LONGER, True)
  assert result.resumed_from == 2
  assert not (tmp_path / 'anywhere').exists()
