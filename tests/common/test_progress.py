"""Tests for lines on progress."""

import time

from absl import logging
import pytest

from tff_bn.common import progress


@pytest.mark.parametrize(
    ('level', 'is_shown'),
    [
        (logging.ERROR, False),
        (logging.WARNING, True),
        (logging.INFO, True),
        (logging.DEBUG, True),
    ],
)
def test_errors_only_show_no_progress(level, is_shown, capsys):
  logging.set_verbosity(level)
  progress.say('line')
  assert capsys.readouterr() == ('', 'line\n' if is_shown else '')


def test_counting_says_how_far_long_work_is(monkeypatch, capsys):
  now = [5.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  steps = []
  for step in progress.counting(7, 'level 2: round'):
    steps.append(step)
    now[0] += 2
  assert steps == list(range(7))
  assert capsys.readouterr().err == (
      'level 2: round 3 of 7\nlevel 2: round 6 of 7\n'
  )


def test_counting_short_work_says_nothing(capsys):
  assert list(progress.counting(3, 'round')) == [0, 1, 2]
  assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ('seconds', 'end'), [(0.2, ''), (31.2, '… took 31 s\n')]
)
def test_long_work_says_how_long_it_took(seconds, end, monkeypatch, capsys):
  now = [5.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  with progress.saying('Building'):
    assert capsys.readouterr().err == 'Building …\n'
    now[0] += seconds
  assert capsys.readouterr().err == end
