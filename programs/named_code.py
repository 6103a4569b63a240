"""Refuses code that only the `flags.txt` of a run names.

A run may be somebody else's. Its files are data, but a flag can name a function
that a program imports and calls. Such a flag must be in the command, unless the
user trusts the run.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tff_bn.data import names as data_names
from tff_bn.models import names as model_names
from tff_bn.programs import parsers
from tff_bn.programs import run_flags
from tff_bn.programs import settings as settings_lib
from tff_bn.programs import sweeps
from tff_bn.programs.parsed_flags import ParsedFlags
from tff_bn.programs.parsed_flags import Source

# Flag -> whether its value names code that is not part of this package.
NAMES_CODE: Mapping[str, Callable[[Any], bool]] = {
    'model': model_names.is_other_model,
    'dataset': data_names.is_community_dataset,
    'metrics_hook': lambda name: True,
    # It allows the others.
    run_flags.TRUST_RUN: bool,
}


def check(flags: ParsedFlags, remedy: str) -> None:
  """Checks that no code is named by the `flags.txt` of a run alone.

  Args:
    flags: The flags of a program, or of a run.
    remedy: What a user does who trusts the run, in words.

  Raises:
    ValueError: If a flag names code that is not part of this package, and its
      value comes from the `flags.txt` of a run.
  """
  for name, text in _values_from_runs(flags):
    if name in NAMES_CODE and NAMES_CODE[name](text):
      raise ValueError(
          f'--{name}={parsers.to_text(text)} names code that is not part of'
          ' tff_bn. It is not run, because only the flags.txt of a run names'
          f" it, which may be somebody else's. If you trust it, {remedy}."
      )


def trust(settings: settings_lib.RunSettings) -> str:
  """Returns what the commands that read a run need: ` --trust_run`, or ''."""
  texts = settings.to_flags()
  if any(n in texts and is_code(texts[n]) for n, is_code in NAMES_CODE.items()):
    return f' --{run_flags.TRUST_RUN}'
  return ''


def _values_from_runs(flags: ParsedFlags) -> Iterator[tuple[str, Any]]:
  """Yields flags and swept flags that come from the `flags.txt` of a run."""
  for name in (*NAMES_CODE, sweeps.SWEEP):
    if flags.defines(name) and flags.source(name) is Source.RUN:
      value = getattr(flags, name)
      if name != sweeps.SWEEP:
        yield name, value
        continue
      for axis in value:
        for point in axis.points:
          yield from point.flags.items()
