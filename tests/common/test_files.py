"""Tests for `tff_bn.common.files`."""

import errno
import os

import pytest

from tff_bn.common import files


def test_failed_writing_keeps_the_old_file(tmp_path):
  path = tmp_path / 'file'
  files.replace(path, 'old')

  def fail():
    with files.replacing(path) as temporary:
      temporary.write_text('new')
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with pytest.raises(OSError, match='No space left') as raised:
    fail()
  assert raised.value.filename == str(path)
  assert path.read_text() == 'old'
  assert os.listdir(tmp_path) == ['file']


def test_content_is_on_the_disk_before_it_appears(tmp_path, monkeypatch):
  events = []
  replace = os.replace

  def fsync(descriptor):
    path = os.readlink(f'/proc/self/fd/{descriptor}')
    events.append(os.path.relpath(path, tmp_path))

  def record_and_replace(source, target):
    events.append('replace')
    replace(source, target)

  monkeypatch.setattr(os, 'fsync', fsync)
  monkeypatch.setattr(os, 'replace', record_and_replace)
  files.replace(tmp_path / 'file', 'new')
  assert events == ['.file.part', 'replace', '.']
  events.clear()
  with files.replacing(tmp_path / 'folder') as temporary:
    (temporary / 'sub').mkdir(parents=True)
    (temporary / 'sub/file').touch()
  assert sorted(events[:3]) == [
      f'.folder.part{end}' for end in ('', '/sub', '/sub/file')
  ]
  assert events[3:] == ['replace', '.']


def test_errors_name_the_file():
  with (
      pytest.raises(OSError, match='^file: unable to write$'),
      files.naming('file'),
  ):
    raise OSError('unable to write')  # As h5py does.


def test_folder_appears_when_it_is_complete(tmp_path):
  path = tmp_path / 'folder'
  files.temporary_path(path).mkdir()  # Left by a program that was killed.
  (files.temporary_path(path) / 'old').touch()
  with files.replacing(path) as temporary:
    (temporary / 'sub').mkdir(parents=True)
    (temporary / 'sub/file').write_text('new')
    assert not path.exists()
  assert os.listdir(tmp_path) == ['folder']
  assert (path / 'sub/file').read_text() == 'new'
  assert not (path / 'old').exists()
