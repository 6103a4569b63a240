"""Runs experiments with all kinds of parts at the smoke scale."""

from concurrent import futures
import multiprocessing
import shutil
from unittest import mock

import experiment_runs
import pytest

from tff_bn.papers import compare_with_experiments
from tff_bn.papers.experiments import experiment_files
from tff_bn.programs.results import charts
from tff_bn.programs.results import html_report
from tff_bn.programs.runs import run_folder

# TensorFlow does not return all the memory of a model that was trained.
_EXPERIMENTS_IN_A_PROCESS = 8


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """`ExperimentRuns` whose processes end after some experiments."""
  folder = tmp_path_factory.mktemp('smoke')
  with futures.ProcessPoolExecutor(
      max_workers=1,
      mp_context=multiprocessing.get_context('spawn'),
      max_tasks_per_child=_EXPERIMENTS_IN_A_PROCESS,
  ) as processes:
    yield experiment_runs.ExperimentRuns(
        folder,
        experiment_files.SMOKE,
        lambda arguments: processes.submit(_compare, arguments).result(),
    )
  # The models of all runs take gigabytes.
  shutil.rmtree(folder)


def _compare(arguments):
  """Runs the program, but builds each run once, and draws only the experiment.

  The program builds all runs before it trains the first one, too. That finds no
  other mistakes, and building takes longer than two rounds.
  """
  # Imported late, because it imports TensorFlow.
  from tff_bn.programs.runs import jobs

  with (
      mock.patch.object(jobs, 'check'),
      mock.patch.object(charts, 'save'),
      mock.patch.object(html_report, 'write'),
  ):
    return compare_with_experiments.run(arguments)


def _with_all_parts():
  """Returns experiments that have all flags, analyses and kinds of figures.

  Small experiments with many parts come first. The plans of all experiments are
  checked elsewhere.
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
  missing, names = set().union(*parts.values()), []
  while missing:
    names.append(max(parts, key=lambda n: len(parts[n] & missing) / sizes[n]))
    missing -= parts[names[-1]]
  return names


@pytest.mark.slow
@pytest.mark.parametrize('name', _with_all_parts())
def test_experiment_finishes(runs, name):
  folder = runs.run(name)

  assert (folder / run_folder.EXPERIMENT_MARKDOWN).exists()
