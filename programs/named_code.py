"""Refuses code that only the `flags.txt` of a run names.

A run may be somebody else's. Its files are data, but a flag can name a function
that a program imports and calls. Such a flag must be in the command, unless the
user trusts the run.
"""

from collections.abc import Callable, Mapping

from tff_bn.data import names as data_names
from tff_bn.models import names as model_names
from tff_bn.programs.parsed_flags import ParsedFlags
from tff_bn.programs.parsed_flags import Source


def _sweeps_code(sweep: str) -> bool:
  flag, _, values = sweep.partition('=')
  return flag in _NAMES_CODE and any(map(_NAMES_CODE[flag], values.split(',')))


# Flag -> whether its value names code that is not part of this package.
_NAMES_CODE: Mapping[str, Callable[[str], bool]] = {
    'model': model_names.is_other_model,
    'dataset': data_names.is_community_dataset,
    'metrics_hook': lambda name: True,
    'sweep': _sweeps_code,
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
  for name, names_code in _NAMES_CODE.items():
    if not flags.defines(name) or flags.source(name) is not Source.RUN:
      continue
    value = getattr(flags, name)
    # The value of a flag that may be given several times is a list.
    for text in [value] if isinstance(value, str) else value:
      if names_code(text):
        raise ValueError(
            f'--{name}={text} names code that is not part of tff_bn. It is not'
            ' run, because only the flags.txt of a run names it, which may be'
            f" somebody else's. If you trust it, {remedy}."
        )
