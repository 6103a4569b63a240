"""Tests for `tff-bn-analyze`: the help, and the behavior of all analyses."""

import re
import subprocess
import sys

from absl import flags as absl_flags
import pytest

from tff_bn.papers import analyze
from tff_bn.programs.cli import command_line


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'the first argument must name an analysis'),
        (['--seed=1', 'normalization_error'], 'the first argument must'),
        (
            ['normalisation_error'],
            "'normalisation_error' is not an analysis; there is"
            f' {", ".join(analyze.ANALYSES)}. Did you mean'
            ' normalization_error?',
        ),
    ],
)
def test_the_analysis_must_be_named(arguments, message, capsys):
  assert analyze.run(arguments) == 2
  captured = capsys.readouterr()
  assert not captured.out
  assert captured.err.startswith('tff-bn-analyze: ')
  assert message in captured.err
  assert captured.err.count('\n') == 1


@pytest.mark.parametrize('spelling', ['--help', '-h'])
def test_help_lists_the_analyses(spelling, capsys):
  assert analyze.run([spelling]) == 0
  out = capsys.readouterr().out
  assert out.startswith('usage: tff-bn-analyze ANALYSIS ')
  one_line = ' '.join(out.split())
  for name, program in analyze.ANALYSES.items():
    assert f'\n  {name}\n' in out
    assert program.description in one_line
    for example in program.examples:
      assert f'\n  {example}\n' in out


@pytest.mark.parametrize('name', analyze.ANALYSES)
def test_help_of_an_analysis(name, capsys):
  program = analyze.ANALYSES[name]
  assert program.name == f'tff-bn-analyze {name}'
  assert analyze.run([name, '--help']) == 0
  out = capsys.readouterr().out
  assert out == command_line.help_text(program)
  values = absl_flags.FlagValues()
  groups = program.define_flags(values)
  assert sorted(flag for group in groups for flag in group.names) == sorted(
      values
  )
  for flag in values:
    assert re.search(r'\(default: .+\)\.?$', values[flag].help)


@pytest.mark.parametrize('name', analyze.ANALYSES)
def test_examples_are_parsed(name):
  program = analyze.ANALYSES[name]
  for example in program.examples:
    command, analysis, *arguments = example.split()
    assert (command, analysis) == ('tff-bn-analyze', name)
    command_line.parse(program.define_flags, arguments)


def test_wrong_flags_are_found_without_tensorflow(tmp_path):
  script = f"""
import sys
from tff_bn.papers import analyze
for name in analyze.ANALYSES:
  assert analyze.run([name, '--help']) == 0
  assert analyze.run([name, '--seed=x']) == 2
  if name in analyze.analysis_programs.PROGRAMS:
    assert analyze.run([name, '--run={tmp_path / 'none'}']) == 2
for name in ('tensorflow', 'tensorflow_federated', 'matplotlib'):
  assert name not in sys.modules, name
arguments = ['normalization_error', '--rounds=2']
assert analyze.run([*arguments, '--output_dir={tmp_path / 'out'}']) == 0
assert 'tensorflow' not in sys.modules
"""
  completed = subprocess.run(
      [sys.executable, '-c', script], capture_output=True, text=True
  )
  assert completed.returncode == 0, completed.stderr
