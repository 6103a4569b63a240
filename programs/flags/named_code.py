"""Finds code that the flags of a run name.

A run may be somebody else's. Its files are data, but a flag can name a function
that a program imports and calls. Such a flag must be in the command, unless the
user trusts the run.
"""

from collections.abc import Callable, Iterator, Mapping
import os
import sys
from typing import Any, NamedTuple, Optional

from tff_bn.catalog import algorithms
from tff_bn.data import names as data_names
from tff_bn.models import names as model_names
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import run_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.plan import sweeps

# Flag -> whether its value names code that is not part of this package.
NAMES_CODE: Mapping[str, Callable[[Any], bool]] = {
    'model': model_names.is_other_model,
    'dataset': data_names.is_community_dataset,
    'metrics_hook': lambda name: True,
    'algorithm': algorithms.names_code,
    'algorithms': lambda names: any(map(algorithms.names_code, names)),
    # It allows the others.
    run_flags.TRUST_RUN: bool,
}


class Code(NamedTuple):
  """A flag that names code.

  Attributes:
    flag: The name of the flag.
    text: The flag as one writes it. For a swept flag, it is this flag.
  """

  flag: str
  text: str


def find(values: Mapping[str, Any]) -> Optional[Code]:
  """Finds a flag that names code that is not part of this package.

  Args:
    values: The values of flags by name.

  Returns:
    The first one; `None` if there is none.
  """
  for flag, name, value in _with_swept(values):
    if name in NAMES_CODE and NAMES_CODE[name](value):
      return Code(flag, f'--{name}={parsers.to_text(value)}')
  return None


def _with_swept(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
  """Yields flags with the flags, names and values that they set."""
  for flag, value in values.items():
    yield flag, flag, value
    for axis in value if flag == sweeps.SWEEP else ():
      for point in axis.points:
        for name, text in point.flags.items():
          yield flag, name, text


def import_from_working_folder() -> None:
  """Lets modules in the working folder be imported, as `python -m` does."""
  folder = os.getcwd()
  if folder not in sys.path:
    sys.path.insert(0, folder)


def trust(settings: settings_lib.RunSettings) -> str:
  """Returns what the commands that read a run need: ` --trust_run`, or ''."""
  if find(settings.to_flags()) is None:
    return ''
  return f' --{run_flags.TRUST_RUN}'
