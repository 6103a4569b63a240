"""Reads the settings of a finished run."""

from collections.abc import Collection, Mapping
import pathlib
import types

from absl import flags as absl_flags

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
  """Returns the texts of the flags of a finished run, or of a comparison.

  Raises:
    ValueError: If the folder holds no run, or one that is not finished.
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

  The texts in `overruling` replace flags of the run, and flags in `without` are
  left out. Only a trusted run may name code that is not part of this package.

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
