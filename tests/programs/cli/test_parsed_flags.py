"""Tests for the values of flags that are replaced."""

import pytest

from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli.parsed_flags import Source


def _flags(*arguments):
  return command_line.parse(train.define_flags, arguments)


def test_replaced_values():
  flags = _flags('--rounds=3', '--gamma=0.5')
  other = flags.replacing({'rounds': '7', 'pooled': 'false', 'split': 'iid'})
  assert (other.rounds, other.pooled, other.split) == (7, False, 'iid')
  assert other.gamma == 0.5
  assert other.source('pooled') == Source.COMMAND_LINE
  assert other.text('rounds') == '--rounds=7'
  assert (flags.rounds, flags.pooled) == (3, True)
  assert not flags.is_given('pooled')
  again = other.replacing({'rounds': '8'}, Source.FLAGFILE)
  assert (again.rounds, again.split) == (8, 'iid')
  assert again.source('rounds') == Source.FLAGFILE
  # A flag that is ignored has its default.
  assert other.without(['rounds']).rounds == flags.without(['rounds']).rounds
  assert other.without(['rounds']).split == 'iid'


def test_values_that_are_not_allowed():
  flags = _flags()
  with pytest.raises(
      ValueError, match='^--rounds=0: must be .* at least 1 and at most'
  ):
    flags.replacing({'rounds': '0'})
  with pytest.raises(ValueError, match='^--round is not a flag'):
    flags.replacing({'round': '1'})


def test_refusals_are_collected():
  flags = _flags('--gamma=0.5', '--split=iid')
  with pytest.raises(ValueError, match='^--gamma=0.5 is odd.$'):
    flags.refuse_unless_overruled('gamma', 'split', 'is odd')
  flags.refusals = {}
  copy = flags.without(['rounds'])
  for reason in ('is odd', 'is even'):
    copy.refuse_unless_overruled('gamma', 'split', reason)
  copy.refuse_unless_overruled('rounds', 'split', 'is not given')
  assert flags.refusals == {'gamma': '--gamma=0.5 is odd.'}
  assert flags.replacing({}).refusals is None
