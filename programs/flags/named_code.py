"""Finds code that the flags of a run name.

A run may be somebody else's. Its files are data, but a flag can name a function
that a program imports and calls. Such a flag must be in the command, unless the
user trusts the run.
"""

from collections.abc import Iterator, Mapping
import os
import sys
from typing import Any, NamedTuple, Optional

from tff_bn.catalog import value_types
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import run_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.plan import sweeps


class Code(NamedTuple):
  """A flag that names code.

  Attributes:
    flag: The name of the flag.
    text: The flag as one writes it. For a swept flag, it is this flag.
  """

  flag: str
  text: str


def find(
    values: Mapping[str, Any], types: Mapping[str, value_types.ValueType]
) -> Optional[Code]:
  """Finds a flag that names code that is not part of this package.

  Args:
    values: The values of flags by name.
    types: The values that the flags may have, by name.

  Returns:
    The first one; `None` if there is none.
  """
  for flag, name, value in _with_swept(values):
    # This flag allows the others.
    is_trust = name == run_flags.TRUST_RUN and value
    is_code = (
        name in types and value is not None and types[name].names_code(value)
    )
    if is_trust or is_code:
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


def trust(settings: settings_lib.RunSettings) -> str:
  """Returns what the commands that read a run need: ` --trust_run`, or ''."""
  types = {name: option.values for name, option in settings.specs().items()}
  if find(settings.to_flags(), types) is None:
    return ''
  return f' --{run_flags.TRUST_RUN}'


def import_from_working_folder() -> None:
  """Lets modules in the working folder be imported, as `python -m` does."""
  folder = os.getcwd()
  if folder not in sys.path:
    sys.path.insert(0, folder)
