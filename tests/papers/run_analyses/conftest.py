"""Finished runs, which are trained once for all tests of analyses."""

from unittest import mock

import pytest
import tiny_runs

from tff_bn.programs import compare
from tff_bn.programs import train
from tff_bn.programs.results import charts
from tff_bn.programs.results import html_report
from tff_bn.programs.runs import jobs


def _run(program, folder, *arguments):
  """Runs a program without plots, a page, and a check of all runs."""
  with (
      mock.patch.object(charts, 'save'),
      mock.patch.object(html_report, 'write'),
      mock.patch.object(jobs, 'check'),
  ):
    flags = [*tiny_runs.FLAGS, *arguments, f'--output_dir={folder}']
    assert program.run(flags) == 0
  return folder


@pytest.fixture(scope='session')
def comparison(tmp_path_factory):
  """Runs of two algorithms with two seeds; fedbn's clients have own models."""
  folder = tmp_path_factory.mktemp('runs') / 'cmp'
  return _run(compare, folder, '--algorithms=fedavg,fedbn', '--seeds=0,1')


@pytest.fixture(scope='session')
def fedavg(comparison):
  return comparison / 'runs' / 'fedavg-seed0'


@pytest.fixture(scope='session')
def fedbn(comparison):
  return comparison / 'runs' / 'fedbn-seed0'


@pytest.fixture(scope='session')
def encoded(tmp_path_factory):
  """A run with position encodings."""
  arguments = ['--pan=multiply', '--pan_amplitude=0.3', '--pan_period=3']
  return _run(train, tmp_path_factory.mktemp('runs') / 'encoded', *arguments)


@pytest.fixture(scope='session')
def user_models(tmp_path_factory):
  """Runs of models that are not functional, or have no hidden units."""
  folder = tmp_path_factory.mktemp('runs')
  for name in ('subclassed', 'linear'):
    _run(train, folder / name, f'--model=unusual_models:{name}')
  return folder


@pytest.fixture(scope='session')
def frozen(tmp_path_factory):
  """A run of a model with a frozen layer."""
  arguments = ['--model=unusual_models:frozen', '--algorithm=fedbn']
  return _run(train, tmp_path_factory.mktemp('runs') / 'frozen', *arguments)


@pytest.fixture(scope='session')
def regression(tmp_path_factory):
  """A run that predicts a number."""
  folder = tmp_path_factory.mktemp('runs') / 'regression'
  return _run(train, folder, '--dataset=diabetes', '--split=iid')
