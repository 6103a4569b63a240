"""How long a run took: `timing.json` in its folder."""

import json
import pathlib
from typing import NamedTuple, Optional

from tff_bn.common import files
from tff_bn.programs import run_folder


class Timing(NamedTuple):
  """The time of the part of a run that a program trained without interruption.

  Attributes:
    seconds: Its duration, with the time for data, models and evaluations.
    rounds: The number of rounds in it.
  """

  seconds: float
  rounds: int


def write(folder: pathlib.Path, seconds: float, rounds: int) -> None:
  """Writes the time of the last part of a run.

  Args:
    folder: The run's folder.
    seconds: The duration.
    rounds: The number of rounds.
  """
  text = json.dumps({'seconds': round(seconds, 3), 'rounds': rounds})
  files.replace(folder / run_folder.TIMING, f'{text}\n')


def read(folder: pathlib.Path) -> Optional[Timing]:
  """Reads the time of a run; None if it is unknown."""
  try:
    values = json.loads((folder / run_folder.TIMING).read_bytes())
    return Timing(float(values['seconds']), int(values['rounds']))
  # Runs from before this file have none. It is only for estimates.
  except (OSError, ValueError, KeyError, TypeError):
    return None
