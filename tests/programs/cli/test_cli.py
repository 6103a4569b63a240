"""Tests for what the programs' command lines have in common."""

import contextlib
import errno
import os
import re
import subprocess
import sys

from absl import flags as absl_flags
from absl import logging
import flag_cases
import pytest

import tff_bn
from tff_bn.catalog import value_types
from tff_bn.papers import analyze
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.flags import run_flags

_PROGRAMS = [train.PROGRAM, compare.PROGRAM, evaluate.PROGRAM]
_IDS = [program.name for program in _PROGRAMS]


def _program(main):
  def define_flags(values):
    absl_flags.DEFINE(
        value_types.Number(int, minimum=1),
        'rounds',
        3,
        'Number of rounds (default: 3).',
        flag_values=values,
    )
    return (
        flag_groups.FlagGroup('First', ('rounds',)),
        run_flags.OutputFlags.define(values, output_dir='out'),
    )

  return command_line.Program(
      'tff-bn-test', 'Does it.', ('tff-bn-test',), define_flags, main
  )


def _run(main, arguments, capsys):
  exit_code = command_line.run(_program(main), arguments)
  captured = capsys.readouterr()
  return exit_code, captured.out, captured.err


def _nothing(flags):
  del flags


def test_success(capsys):
  seen = []
  code, out, err = _run(
      lambda flags: seen.append(flags.rounds), ['--rounds', '5'], capsys
  )
  assert (code, out, err) == (0, '', '')
  assert seen == [5]


_WRONG_FLAGS = """
--rouns=4
    --rouns is not a flag of this program. Did you mean rounds? See --help.
--xyzzy
    --xyzzy is not a flag of this program. See --help.
--rounds=0
    --rounds=0: must be a whole number, at least 1 and at most
--rounds=x
    --rounds=x: must be a whole number, at least 1 and at most
--rounds
    Missing value for flag --rounds
7 --rounds=4
    '7' is not understood
--overwrite=maybe
    --overwrite=maybe: must be true or false.
--output_dir=
    --output_dir=: must not be empty.
--output_dir --rounds=4
    --output_dir=--rounds=4: must not
--flagfile=/nonexistent
    --flagfile=/nonexistent is neither
"""


@flag_cases.parametrize(_WRONG_FLAGS)
def test_wrong_flags(arguments, expected, capsys):
  def main(flags):
    pytest.fail('main ran')

  code, out, err = _run(main, arguments, capsys)
  assert (code, out) == (2, '')
  assert err.startswith(f'tff-bn-test: {expected}')
  assert err.count('\n') == 1


@pytest.mark.parametrize(
    'character',
    ['\n', '\r', '\t', '\x0b', '\x1b', '\x7f', '\x85', '\u2028', '\udcff'],
)
def test_characters_that_are_not_printable(character, tmp_path, capsys):
  def main(flags):
    pytest.fail('main ran')

  path = tmp_path / 'x.flags'
  arguments = [f'--output_dir=a{character}--rounds=5']
  for given in (arguments, ['--output_dir', f'a{character}b']):
    code, out, err = _run(main, given, capsys)
    assert (code, out) == (2, '')
    assert f'must not contain the character {ascii(character)}' in err
    assert character not in err.rstrip('\n')
  assert '--output_dir=a\\' in _run(main, arguments, capsys)[2]
  if character not in '\n\r\udcff':
    path.write_text(f'{arguments[0]}\n', encoding='utf-8')
    code, _, err = _run(main, [f'--flagfile={path}'], capsys)
    assert code == 2
    assert 'must not contain the character' in err


@pytest.mark.parametrize(
    'error',
    [
        ValueError('--x=1 is\n  wrong'),
        FileNotFoundError('--x=1 is wrong'),
        TypeError('--x=1 is wrong'),
        OSError(errno.ENAMETOOLONG, '--x=1 is wrong'),
    ],
)
def test_input_that_main_finds_wrong(error, capsys):
  def main(flags):
    with command_line.checking_input():
      raise error

  code, out, err = _run(main, [], capsys)
  assert (code, out) == (2, '')
  assert err.startswith('tff-bn-test: ')
  assert err.endswith('--x=1 is wrong\n')
  assert err.count('\n') == 1


@pytest.mark.parametrize('checks_input', [False, True])
@pytest.mark.parametrize(
    'error, message',
    [
        (KeyError('x'), "KeyError: 'x'"),
        (RuntimeError(), 'RuntimeError'),
        (RuntimeError('the network is down'), 'the network is down'),
        (RuntimeError('a\n\nb' + 'x' * 10000), 'a b' + 'x' * 1497 + ' …'),
    ],
)
def test_failure(checks_input, error, message, capsys):
  def main(flags):
    with (
        command_line.checking_input()
        if checks_input
        else contextlib.nullcontext()
    ):
      raise error

  code, out, err = _run(main, [], capsys)
  assert (code, out, err) == (1, '', f'tff-bn-test: {message}\n')


@pytest.mark.parametrize('verbosity', [0, 1])
def test_verbosity_shows_the_traceback(verbosity, capsys):
  def main(flags):
    raise ValueError('broken')

  code, _, err = _run(main, [f'--verbosity={verbosity}'], capsys)
  assert code == 1
  traceback, _, last = err.rpartition('tff-bn-test: ')
  assert last == 'broken\n'
  assert traceback.startswith('Traceback (most') == (verbosity == 1)


@pytest.mark.parametrize('verbosity', [-1, 0, 1])
def test_verbosity_reaches_the_libraries(verbosity, monkeypatch, capsys):
  monkeypatch.delenv('TF_CPP_MIN_LOG_LEVEL')
  seen = []

  def main(flags):
    seen.append(
        (logging.get_verbosity(), os.environ.get('TF_CPP_MIN_LOG_LEVEL'))
    )

  _run(main, [f'--verbosity={verbosity}'], capsys)
  assert seen == [(verbosity, None if verbosity == 1 else '3')]


def test_interrupt(capsys):
  def main(flags):
    raise KeyboardInterrupt

  assert _run(main, [], capsys) == (130, '', 'tff-bn-test: interrupted.\n')


def test_exit_passes(capsys):
  def main(flags):
    raise SystemExit(143)

  with pytest.raises(SystemExit) as error:
    _run(main, [], capsys)
  assert error.value.code == 143


def test_sources(tmp_path):
  path = tmp_path / 'flags'
  path.write_text('--rounds=4\n--overwrite\n')
  define_flags = _program(_nothing).define_flags
  for file_arguments in ([f'--flagfile={path}'], ['--flagfile', str(path)]):
    flags = command_line.parse(define_flags, [*file_arguments, '--rounds=5'])
    assert flags.rounds == 5
    assert flags.overwrite
    assert flags.source('rounds') == command_line.Source.COMMAND_LINE
    assert flags.source('overwrite') == command_line.Source.FLAGFILE
    assert flags.source('output_dir') == command_line.Source.DEFAULT
    assert flags.defines('rounds') and not flags.defines('algorithm')


@pytest.mark.parametrize('spelling', ['--help', '-h', '-help', '--helpfull'])
def test_help_goes_before_everything_else(spelling, capsys):
  def main(flags):
    pytest.fail('main ran')

  code, out, err = _run(main, ['--wrong', spelling], capsys)
  assert (code, err) == (0, '')
  assert out.startswith('usage: tff-bn-test ')
  assert 'First:\n  --rounds\n      Number of rounds (default: 3).' in out
  assert '  --[no]overwrite' in out


@pytest.mark.parametrize('program', _PROGRAMS, ids=_IDS)
def test_help_explains_every_flag(program):
  text = command_line.help_text(program)
  assert all(
      len(line) < 80 or ' ' not in line.strip()
      for line in text.split('\n')
      if not line.startswith('  tff-bn')
  )
  values = absl_flags.FlagValues()
  groups = program.define_flags(values)
  assert sorted(name for group in groups for name in group.names) == sorted(
      values
  )
  one_line = ' '.join(text.split())
  for group in groups:
    assert f'\n\n{group.title}:\n' in text
    for name in group.names:
      assert f'--{name} ' in one_line or f'--[no]{name} ' in one_line
      assert ' '.join(values[name].help.split()) in one_line
      assert re.search(r'\(default: .+\)\.?$', values[name].help)
  assert f'  {program.name}' in text.split('Examples:')[1]


@pytest.mark.parametrize('program', _PROGRAMS, ids=_IDS)
def test_examples_are_right(program):
  for example in program.examples:
    name, *arguments = example.split()
    assert name == program.name
    arguments = [a for a in arguments if not a.startswith('--flagfile')]
    command_line.parse(program.define_flags, arguments)


@pytest.mark.parametrize(
    'run', [train.run, compare.run, evaluate.run, analyze.run]
)
def test_version(run, capsys):
  assert run(['--version']) == 0
  assert capsys.readouterr() == (f'tff_bn {tff_bn.__version__}\n', '')


@pytest.mark.parametrize('module', ['train', 'compare', 'evaluate'])
def test_help_and_wrong_flags_need_no_tensorflow(module):
  script = f"""
import sys
from tff_bn.programs import {module}
assert {module}.run(['--help']) == 0
assert {module}.run(['--version']) == 0
assert {module}.run(['--num_clients=0']) == 2
for name in ('numpy', 'tensorflow', 'matplotlib', 'pandas', 'sklearn'):
  assert name not in sys.modules, name
"""
  completed = subprocess.run(
      [sys.executable, '-c', script], capture_output=True, text=True
  )
  assert completed.returncode == 0, completed.stderr
  assert completed.stdout.startswith(f'usage: tff-bn-{module} ')
