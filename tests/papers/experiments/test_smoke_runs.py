"""Runs experiments with all kinds of parts at the smoke scale."""

from concurrent import futures
import contextlib
import functools
import multiprocessing
import shutil
from unittest import mock

import experiment_runs
import pytest

from tff_bn.papers import compare_with_experiments
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_smoke
from tff_bn.programs.results import charts
from tff_bn.programs.results import html_report
from tff_bn.programs.runs import run_folder

# TensorFlow does not return all the memory of a model that was trained.
_EXPERIMENTS_IN_A_PROCESS = 8


class _Processes:
  """Calls functions in a process that another one replaces after some calls.

  Not `max_tasks_per_child`, with which Python 3.11 can wait forever (CPython's
  issue 115634).
  """

  def __init__(self):
    self._calls = 0
    self._process = None

  def call(self, function, *args):
    if self._calls % _EXPERIMENTS_IN_A_PROCESS == 0:
      self.close()
      self._process = futures.ProcessPoolExecutor(
          1, multiprocessing.get_context('spawn')
      )
    self._calls += 1
    return self._process.submit(function, *args).result()

  def close(self):
    if self._process is not None:
      self._process.shutdown()


@pytest.fixture(scope='module')
def processes():
  """Processes that end after some experiments."""
  with contextlib.closing(_Processes()) as created:
    yield created


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """The runs of the experiments so far."""
  folder = tmp_path_factory.mktemp('smoke')
  yield experiment_runs.ExperimentRuns(folder, experiment_files.SMOKE)
  # The models of all runs take gigabytes.
  shutil.rmtree(folder)


def _compare(flags, arguments):
  """Runs the program, but builds each run once, and draws only the experiment.

  The program builds all runs before it trains the first one, too. That finds no
  other mistakes, and building takes longer than two rounds.

  Args:
    flags: See `_few_runs`.
    arguments: The program's arguments.

  Returns:
    The exit code.
  """
  # Imported late, because it imports TensorFlow.
  from tff_bn.programs.runs import jobs

  with (
      _few_runs(flags),
      mock.patch.object(jobs, 'check'),
      mock.patch.object(charts, 'save'),
      mock.patch.object(html_report, 'write'),
  ):
    return compare_with_experiments.run(arguments)


def _few_runs(flags):
  """Leaves out runs of experiments: two, and runs with `flags`, are enough."""

  def covering(axes):
    kept, missing = [], set(flags)
    for cell in all_cells(axes):
      if len(kept) < 2 or missing.intersection(cell.flags):
        kept.append(cell)
        missing -= cell.flags.keys()
    return kept

  all_cells = experiment_smoke.covering
  return mock.patch.object(experiment_smoke, 'covering', covering)


def _with_all_parts():
  """Returns experiments that have all flags, analyses and kinds of figures.

  Small experiments with many parts come first. The plans of all experiments are
  checked elsewhere.

  Returns:
    The name of each experiment, and what none before it has.
  """
  parts, sizes = {}, {}
  for name in experiment_files.names():
    experiment = experiment_files.load(name)
    points = [point for axis in experiment.axes for point in axis.points]
    parts[name] = {
        experiment.shown and experiment.shown.kind,
        *(analysis.name for analysis in experiment.analyses),
        *experiment.flags,
        *(flag for point in points for flag in point.flags),
    }
    # Starting an experiment takes about as long as one of its runs.
    sizes[name] = 1 + len(points)
  missing, chosen = set().union(*parts.values()), {}
  while missing:
    name = max(parts, key=lambda n: len(parts[n] & missing) / sizes[n])
    chosen[name] = parts[name] & missing
    missing -= parts[name]
  return chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'parts'),
    [pytest.param(*item, id=item[0]) for item in _with_all_parts().items()],
)
def test_experiment_finishes(processes, runs, name, parts):
  runs.compare = functools.partial(processes.call, _compare, parts)
  with _few_runs(parts):
    folder = runs.run(name)

  assert (folder / run_folder.EXPERIMENT_MARKDOWN).exists()
