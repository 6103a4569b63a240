"""Reads the settings of a finished run."""

from collections.abc import Collection, Mapping
import pathlib
import types

from absl import flags as absl_flags

from tff_bn.catalog import algorithms
from tff_bn.common import spelling
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import named_code
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.cli.parsed_flags import Source
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_folder
from tff_bn.training import finished


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
  # A changed file is not found here: its reader raises an error that names it.
  if not (
      (folder / run_folder.METRICS).exists()
      and (folder / run_folder.MODEL).exists()
      and finished.saved_settings(folder) in (None, texts)
  ):
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
    overruling: Mapping[str, str] = types.MappingProxyType({}),
    without: Collection[str] = (),
    *,
    is_trusted: bool = False,
) -> settings_lib.RunSettings:
  """Reads the settings of a finished run.

  Args:
    folder: The run's folder.
    overruling: The texts of flags that replace flags of the run, by name.
    without: The names of flags of the run that are left out.
    is_trusted: Whether the run may name code that is not part of this package.

  Raises:
    ValueError: If the flags were changed, or contradict one another.
    UsageError: If they name code although the run is not trusted.
  """
  path = folder / run_folder.FLAGS_FILE
  texts = {
      name: text
      for name, text in run_folder.read_flags(folder).items()
      if name not in {*overruling, *without}
  }
  values = absl_flags.FlagValues()
  algorithm_flags.AlgorithmFlags.define(values)
  settings_lib.define_shared_flags(values)
  run_flags.RunFlags.define(values)
  values.mark_as_parsed()
  flags = ParsedFlags(values, dict.fromkeys(values, Source.DEFAULT))
  try:
    for name in texts:
      if not flags.defines(name):
        raise ValueError(
            f'--{name} is not a flag of a run.'
            f'{spelling.suggestion(name, list(values))}'
        )
    flags = flags.replacing(texts, Source.FLAGFILE).replacing(overruling)
    if not is_trusted:
      command_line.refuse_code(
          {name: getattr(flags, name) for name in texts},
          values,
          lambda flag: f'{path}: ',
          f'add --{named_code.TRUST_RUN}',
      )
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
  # With a changed file, means would be over other runs.
  for run in sorted((folder / run_folder.RUNS).iterdir()):
    if run not in runs and (run / run_folder.FLAGS_FILE).exists():
      raise ValueError(
          f'{path} does not name the run {run}; the command of the comparison'
          ' names all of them. Or choose single runs.'
      )
  return runs
