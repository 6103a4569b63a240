"""Tests for the flags that say what a comparison varies."""

import re

import pytest

from tff_bn.programs import compare
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import sweeps


def _flags(*arguments):
  return command_line.parse(compare.define_flags, arguments)


def test_swept_axes():
  axes = sweeps.swept_axes(
      _flags('--sweep=gamma=0, 0.5', '--sweep=--pooled=true,false')
  )
  assert [axis.name for axis in axes] == ['gamma', 'pooled']
  assert [(p.label, p.flags) for p in axes[0].points] == [
      ('0', {'gamma': '0'}),
      ('0.5', {'gamma': '0.5'}),
  ]
  assert [p.flags for p in axes[1].points] == [
      {'pooled': 'true'},
      {'pooled': 'false'},
  ]
  assert sweeps.swept_axes(_flags()) == []


@pytest.mark.parametrize(
    ('sweep', 'words'),
    [
        ('gamma', ['must be FLAG=VALUE,VALUE']),
        ('gama=0', ['gama is not a flag that can be swept', 'mean gamma?']),
        ('rounds=1,x', ["'x': must be a whole number, at least 1"]),
        ('gamma=0.5,0.50', ['0.50 is in the list twice']),
        ('pooled=maybe', ["'maybe'"]),
        ('gamma=', ["''"]),
        ('seed=0,1', ['seed is varied by --seeds']),
        ('algorithm=fbn', ['algorithm is varied by --algorithms']),
        ('average_last=1,2', ['average_last is not a flag that can be swept']),
        ('split=iid,clases', ["'clases'", 'Did you mean classes?']),
    ],
)
def test_sweep_that_is_impossible(sweep, words):
  with pytest.raises(command_line.UsageError) as error:
    _flags(f'--sweep={sweep}')
  for word in (f'--sweep={sweep}: ', *words):
    assert word in str(error.value)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['--sweep=gamma=0', '--sweep=gamma=1'],
            '--sweep=gamma=... is given twice',
        ),
        (
            ['--sweep=gamma=0,1', '--gamma=0.5'],
            '--gamma=0.5 and --sweep=gamma=0,1 exclude each other',
        ),
    ],
)
def test_flags_that_are_swept_and_given(arguments, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    sweeps.swept_axes(_flags(*arguments))


def test_sweep_overrules_a_flagfile_and_not_the_reverse(tmp_path):
  path = tmp_path / 'flags'
  path.write_text('--gamma=0.5\n')
  (axis,) = sweeps.swept_axes(_flags(f'--flagfile={path}', '--sweep=gamma=0,1'))
  assert axis.name == 'gamma'
  path.write_text('--sweep=gamma=0,1\n')
  with pytest.raises(ValueError, match='exclude each other'):
    sweeps.swept_axes(_flags(f'--flagfile={path}', '--gamma=0.5'))


def test_jobs():
  sweeps.check_jobs(_flags('--jobs=2'))
  sweeps.check_jobs(_flags('--runtime=ray'))
  with pytest.raises(ValueError, match='--jobs=2 is impossible .*--runtime=ra'):
    sweeps.check_jobs(_flags('--jobs=2', '--runtime=ray'))
  with pytest.raises(
      command_line.UsageError, match='--jobs=0: must be .*at least 1'
  ):
    _flags('--jobs=0')
