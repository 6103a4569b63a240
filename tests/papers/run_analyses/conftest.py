"""Finished runs, which are trained once for all tests of analyses."""

import contextlib
from unittest import mock

import pytest
import tiny_runs

from tff_bn.papers import figures
from tff_bn.programs import compare
from tff_bn.programs import train
from tff_bn.programs.results import html_report


@contextlib.contextmanager
def _without_plots():
  """Lets a program write no plots and no page, which take most of the time."""
  with (
      mock.patch.object(figures, 'save'),
      mock.patch.object(html_report, 'write'),
  ):
    yield


def _train(folder, *arguments):
  flags = [*tiny_runs.FLAGS, *arguments, f'--output_dir={folder}']
  with _without_plots():
    assert train.run(flags) == 0
  return folder


@pytest.fixture(scope='session')
def comparison(tmp_path_factory):
  """Runs of two algorithms with two seeds; fedbn's clients have own models."""
  folder = tmp_path_factory.mktemp('runs') / 'cmp'
  arguments = ['--algorithms=fedavg,fedbn', '--seeds=0,1']
  arguments += [*tiny_runs.FLAGS, f'--output_dir={folder}']
  with _without_plots():
    assert compare.run(arguments) == 0
  return folder


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
  return _train(tmp_path_factory.mktemp('runs') / 'encoded', *arguments)


@pytest.fixture(scope='session')
def user_models(tmp_path_factory):
  """Runs of models that are not functional, or have no hidden units."""
  folder = tmp_path_factory.mktemp('runs')
  for name in ('subclassed', 'linear'):
    _train(folder / name, f'--model=unusual_models:{name}')
  return folder


@pytest.fixture(scope='session')
def frozen(tmp_path_factory):
  """A run of a model with a frozen layer."""
  arguments = ['--model=unusual_models:frozen', '--algorithm=fedbn']
  return _train(tmp_path_factory.mktemp('runs') / 'frozen', *arguments)
