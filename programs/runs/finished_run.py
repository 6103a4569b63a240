"""Reads the settings of a finished run."""

from collections.abc import Collection, Mapping, Sequence
import pathlib

from tff_bn.catalog import algorithms
from tff_bn.common import spelling
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import run_flags
from tff_bn.programs.runs import run_folder
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs import train


def check(folder: pathlib.Path) -> dict[str, str]:
  """Checks that a folder holds a finished run, or a comparison.

  Args:
    folder: The folder that `--run` names.

  Returns:
    The texts of its flags by name.

  Raises:
    ValueError: If it holds no run, or one that is not finished.
  """
  run_folder.check_entries(folder)
  if not (folder / run_folder.FLAGS_FILE).exists():
    raise ValueError(
        f'--run={folder} holds no run: it has no {run_folder.FLAGS_FILE}.'
    )
  texts = run_folder.read_flags(folder)
  if is_comparison(texts):
    return texts
  if (folder / run_folder.RUNS).exists():
    raise ValueError(
        f'{folder / run_folder.FLAGS_FILE} is damaged: it has no --seeds, but'
        f' the folder has the {run_folder.RUNS}/ of a comparison.'
    )
  if not run_folder.is_finished(folder):
    raise ValueError(
        f'--run={folder} is not finished: it has no models of the rounds that'
        f' its {run_folder.FLAGS_FILE} asks for. The command that started it'
        ' continues it.'
    )
  return texts


def is_comparison(texts: dict[str, str]) -> bool:
  """Whether these are the flags of a comparison, with several runs."""
  return 'seeds' in texts


def read_settings(
    folder: pathlib.Path,
    overruling: Sequence[str] = (),
    without: Collection[str] = (),
    *,
    is_trusted: bool = False,
) -> settings_lib.RunSettings:
  """Reads the settings of a finished run.

  Args:
    folder: The run's folder.
    overruling: Flags, `--name=value`, that replace flags of the run.
    without: The names of flags of the run that are left out.
    is_trusted: Whether the run may name code that is not part of this package.

  Returns:
    The settings.

  Raises:
    ValueError: If the flags were changed, contradict one another, or name code
      although the run is not trusted.
  """
  path = folder / run_folder.FLAGS_FILE
  known = settings_lib.RunSettings.specs()
  for name in run_folder.read_flags(folder):
    if name not in known:
      raise ValueError(
          f'{path}: --{name} is not a flag of a run.'
          f'{spelling.suggestion(name, list(known))}'
      )
  flags = command_line.parse(
      train.define_flags,
      [f'--flagfile={path}', *overruling],
      remedy=None if is_trusted else f'add --{run_flags.TRUST_RUN}',
  )
  try:
    flags = flags.without(without)
    settings_lib.check(flags)
    return settings_lib.resolve(flags, flags.algorithm, flags.seed)
  except ValueError as error:
    if overruling:
      text = f'{error} Flags that the command does not give are from {path}.'
    else:
      text = f'{path}: {error}'
    raise ValueError(text) from error


def runs_of(
    folder: pathlib.Path, texts: Mapping[str, str]
) -> dict[pathlib.Path, str]:
  """Returns the runs of a comparison without sweeps.

  Args:
    folder: The comparison's folder.
    texts: The texts of its flags by name.

  Returns:
    The algorithm of each run by the run's folder.

  Raises:
    ValueError: If a run is not finished, or these are not all runs that the
      folder holds.
  """
  path = folder / run_folder.FLAGS_FILE
  if 'algorithms' not in texts:
    raise ValueError(
        f'{path} has no --algorithms, so the runs of the comparison are not'
        f' known; choose one of the runs in {folder / run_folder.RUNS}.'
    )
  labels = algorithms.labels(texts['algorithms'].split(','))
  runs = {
      folder / run_folder.RUNS / f'{label}-seed{seed}': algorithm
      for algorithm, label in labels.items()
      for seed in texts['seeds'].split(',')
  }
  for run in runs:
    try:
      check(run)
    except ValueError as error:
      raise ValueError(f'{error} {path} names this run.') from error
  # A file that was changed would give the mean over other runs.
  for run in sorted((folder / run_folder.RUNS).iterdir()):
    if run not in runs and (run / run_folder.FLAGS_FILE).exists():
      raise ValueError(
          f'{path} does not name the run {run}; the command of the comparison'
          ' names all of them. Or choose single runs.'
      )
  return runs
