"""Reads the settings of a finished run."""

from collections.abc import Collection, Sequence
import pathlib

from tff_bn.programs import cli
from tff_bn.programs import run_folder
from tff_bn.programs import settings as settings_lib
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
  if not (folder / run_folder.FLAGS_FILE).is_file():
    raise ValueError(
        f'--run={folder} holds no run: it has no {run_folder.FLAGS_FILE}.'
    )
  texts = run_folder.read_flags(folder)
  if not is_comparison(texts) and not run_folder.is_finished(folder):
    raise ValueError(
        f'--run={folder} is not finished; the command that started it continues'
        ' it.'
    )
  return texts


def is_comparison(texts: dict[str, str]) -> bool:
  """Whether these are the flags of a comparison, with several runs."""
  return 'seeds' in texts


def read_settings(
    folder: pathlib.Path,
    overruling: Sequence[str] = (),
    without: Collection[str] = (),
) -> settings_lib.RunSettings:
  """Reads the settings of a finished run.

  Args:
    folder: The run's folder.
    overruling: Flags, `--name=value`, that replace flags of the run.
    without: The names of flags of the run that are left out.

  Returns:
    The settings.

  Raises:
    ValueError: If the flags contradict one another.
  """
  run_flags = cli.parse(
      train.define_flags,
      [f'--flagfile={folder / run_folder.FLAGS_FILE}', *overruling],
  )
  run_flags = run_flags.without(without)
  settings_lib.check(run_flags)
  return settings_lib.resolve(run_flags, run_flags.algorithm, run_flags.seed)
