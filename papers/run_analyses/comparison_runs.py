"""Finds the runs of a comparison that is analyzed."""

from collections.abc import Mapping
import pathlib

from tff_bn.catalog import algorithms
from tff_bn.programs.runs import finished_run
from tff_bn.programs.runs import run_folder


def runs_of(
    folder: pathlib.Path, texts: Mapping[str, str]
) -> dict[pathlib.Path, str]:
  """Returns the algorithm of each run of a comparison without sweeps.

  Args:
    folder: The comparison's folder.
    texts: The texts of its flags by name.

  Returns:
    The algorithms by the runs' folders.

  Raises:
    ValueError: If a run is not finished, or these are not all runs that the
      folder holds.
  """
  path = folder / run_folder.FLAGS_FILE
  if 'experiment' in texts:
    raise ValueError(
        f'{folder} is an experiment, whose runs can only be analyzed one by'
        f' one; choose one of those in {folder / run_folder.RUNS}.'
    )
  if 'algorithms' in texts:
    names = texts['algorithms'].split(',')
  else:
    names = list(algorithms.COMPARED)  # The first look.
  labels = algorithms.labels(names)
  runs = {
      folder / run_folder.RUNS / f'{label}-seed{seed}': algorithm
      for algorithm, label in labels.items()
      for seed in texts['seeds'].split(',')
  }
  for run in runs:
    try:
      finished_run.check(run)
    except ValueError as error:
      raise ValueError(f'{error} {path} asks for this run.') from error
  # With a changed file, means would be over other runs.
  for run in sorted((folder / run_folder.RUNS).iterdir()):
    if run not in runs and (run / run_folder.FLAGS_FILE).exists():
      raise ValueError(
          f'{path} does not name the run {run}; the command of the comparison'
          ' names all of them. Or choose single runs.'
      )
  return runs
