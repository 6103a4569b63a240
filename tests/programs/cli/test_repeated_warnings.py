"""Tests for warnings that are shown once."""

from absl import logging
import pytest

from tff_bn.programs.cli import repeated_warnings


@pytest.fixture
def once():
  warnings = repeated_warnings.WarningsOnce()
  with warnings.installed():
    yield warnings


def test_messages_of_this_process(once, caplog):
  for _ in range(2):
    logging.warning('--batch_size=%d is large.', 9)
    logging.warning('Round %d changed nothing.', 3)
    logging.error('--batch_size=%d is large.', 9)
  logging.warning('--batch_size=%d is large.', 10)
  assert caplog.messages == [
      '--batch_size=9 is large.',
      'Round 3 changed nothing.',
      '--batch_size=9 is large.',
      'Round 3 changed nothing.',
      '--batch_size=9 is large.',
      '--batch_size=10 is large.',
  ]


def test_lines_of_other_processes(once):
  logging.warning('dataset=x has one class.')
  assert not once.shows('WARNING:absl:dataset=x has one class.\n')
  assert once.shows('WARNING:absl:--rounds=3 is small.\n')
  assert not once.shows('WARNING:absl:--rounds=3 is small.\n')
  for line in ('WARNING:absl:Round 3 changed nothing.\n', '--rounds=3\n', '\n'):
    assert once.shows(line)
    assert once.shows(line)


def test_only_in_the_block(caplog):
  warnings = repeated_warnings.WarningsOnce()
  with warnings.installed():
    logging.warning('--rounds=3 is small.')
  logging.warning('--rounds=3 is small.')
  assert len(caplog.messages) == 2
