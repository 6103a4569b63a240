"""Tests for files of flags."""

import pytest

from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flagfiles


def _texts(*arguments):
  return [argument.text for argument in flagfiles.expand(arguments)]


def test_a_file_is_replaced_by_its_lines(tmp_path):
  (tmp_path / 'a').write_text(
      f'# comment\n// too\n\n--x=1\n--flagfile={tmp_path}/b\n  --y=2  \n'
  )
  (tmp_path / 'b').write_text('--z=é\n', encoding='utf-8')
  for form in ([f'--flagfile={tmp_path}/a'], ['-flagfile', f'{tmp_path}/a']):
    arguments = ['--first', *form, '--last=3']
    expanded = ['--first', '--x=1', '--z=é', '--y=2', '--last=3']
    found = flagfiles.expand(arguments)
    assert [argument.text for argument in found] == expanded
    assert [argument.path and argument.path.name for argument in found] == [
        *(None, 'a', 'b', 'a', None)
    ]
  # The same file twice is no circle.
  twice = [f'--flagfile={tmp_path}/b'] * 2
  assert _texts(*twice) == ['--z=é'] * 2


def test_a_file_from_windows(tmp_path):
  path = tmp_path / 'x.flags'
  path.write_bytes(b'\xef\xbb\xbf--rounds=3\r\n--seed=1\r\n')
  assert _texts(f'--flagfile={path}') == ['--rounds=3', '--seed=1']


def test_presets_are_found_by_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert '--dataset=digits_domains' in _texts('--flagfile=digits_domains')
  flags = command_line.parse(train.define_flags, ['--flagfile=digits_domains'])
  assert flags.split == 'domains'
  assert flags.source('split') == command_line.Source.FLAGFILE
  # A file in the working folder is preferred.
  (tmp_path / 'digits_domains').write_text('--x\n')
  assert _texts('--flagfile=digits_domains') == ['--x']


def test_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'a').write_text('--x=1\n')
  assert _texts('--flagfile=~/a') == ['--x=1']


def test_what_is_no_file(tmp_path):
  (tmp_path / 'binary').write_bytes(b'\xff\xfe')
  (tmp_path / 'a').write_text(f'--flagfile={tmp_path}/b')
  (tmp_path / 'b').write_text(f'--flagfile={tmp_path}/a')
  for name, words in (
      ('', ['neither a file nor a preset', 'presets are digits_domains, dig']),
      ('digit_domains', ['Did you mean digits_domains?']),
      (f'{tmp_path}/binary', ['binary is not a text file']),
      (f'{tmp_path}', ['cannot be read: Is a directory']),
      (f'{tmp_path}/a', [f'includes itself: {tmp_path}/a → {tmp_path}/b → ']),
  ):
    for arguments in ([f'--flagfile={name}'], ['--flagfile', name]):
      with pytest.raises(command_line.UsageError) as error:
        command_line.parse(train.define_flags, arguments)
      for word in ('--flagfile=', name, *words):
        assert word in str(error.value)
  with pytest.raises(ValueError, match='--flagfile= is neither'):
    flagfiles.expand(['--flagfile'])
