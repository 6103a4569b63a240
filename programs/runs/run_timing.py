"""How long a run took: `timing.json` in its folder."""

import pathlib
from typing import Any, NamedTuple, Optional

from absl import logging

from tff_bn.common import files
from tff_bn.programs.runs import run_folder
from tff_bn.training import manifests

# The checksum of the run's flags in the file.
_RUN = 'run'


class Timing(NamedTuple):
  """The time of the last part of a run that was trained without interruption.

  It includes the time for data, models and evaluations.
  """

  seconds: float
  rounds: int


def write(folder: pathlib.Path, seconds: float, rounds: int) -> None:
  """Writes the time of the last part of a run."""
  content: dict[str, Any] = {'seconds': round(seconds, 3), 'rounds': rounds}
  content[_RUN] = _identify(folder)
  files.replace(folder / run_folder.TIMING, manifests.to_text(content))


def _identify(folder: pathlib.Path) -> str:
  """Returns a checksum of the run's flags, without those that may grow."""
  flags = {}
  if (folder / run_folder.FLAGS_FILE).exists():
    flags = run_folder.read_flags(folder)
    flags.pop('rounds', None)
  return manifests.checksum(flags)


def read(folder: pathlib.Path) -> Optional[Timing]:
  """Reads the time of a run; None if it is unknown.

  It is only for estimates, so a file that is damaged, or was not written for
  this run, is no error: a warning names it.
  """
  path = folder / run_folder.TIMING
  try:
    content = manifests.from_text(path, path.read_bytes())
    if content[_RUN] != _identify(folder):
      raise manifests.DamagedError(f'{path} belongs to another run.')
    return Timing(content['seconds'], content['rounds'])
  except FileNotFoundError:
    return None
  except ValueError as error:
    logging.warning('%s The time of the rounds is unknown.', error)
    return None
