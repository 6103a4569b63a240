"""Tests of the option that leaves out slow tests on slow processors."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

_TESTS = pathlib.Path(__file__).parents[1]
_FILE = """
import pytest

@pytest.fixture
def costly():
  print('The fixture was set up.')

@pytest.mark.slow
def test_slow(costly):
  pass

def test_quick():
  pass
"""


@pytest.mark.parametrize(
    'minutes, counts, is_set_up',
    [('0', '1 passed, 1 skipped', False), ('100', '2 passed', True)],
)
def test_slow_tests_begin_in_time(minutes, counts, is_set_up, tmp_path):
  shutil.copy(_TESTS / 'conftest.py', tmp_path)
  (tmp_path / 'test_both.py').write_text(_FILE)
  # Not the options of this run.
  environment = {k: v for k, v in os.environ.items() if 'PYTEST' not in k}
  options = ['-rA', '-p', 'no:cacheprovider', '-W', 'ignore']
  result = subprocess.run(
      [sys.executable, '-m', 'pytest', *options]
      + ['--slow', f'--slow_minutes={minutes}'],
      cwd=tmp_path,
      env={**environment, 'PYTHONPATH': str(_TESTS)},
      capture_output=True,
      text=True,
      check=False,
  )
  assert result.returncode == 0, result.stdout
  assert counts in result.stdout
  assert ('The fixture was set up.' in result.stdout) == is_set_up
  assert ('slow, and 0 minutes were over' in result.stdout) != is_set_up
