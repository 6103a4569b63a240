"""Finds code that the flags of a run name.

A run may be somebody else's. Its files are data, but a flag can name a function
that a program imports and calls. Such a flag must be in the command, unless the
user trusts the run.
"""

from collections.abc import Mapping
from typing import Any, Optional

from tff_bn.catalog import value_types
from tff_bn.programs.cli import parsers

# The flag by which the user trusts a run, and its explanation.
TRUST_RUN = 'trust_run'
EXPLANATION_OF_TRUST = (
    'Runs code that the flags of the run name, such as'
    " --model=my_models:build_model. The run may be somebody else's, so without"
    ' this flag only code of this package is run'
)


def find(
    values: Mapping[str, Any], types: Mapping[str, value_types.ValueType]
) -> Optional[tuple[str, str]]:
  """Finds a flag that names code that is not part of this package.

  Args:
    values: The values of flags by name; a list for a flag that may be repeated.
    types: The values that the flags may have, by name.

  Returns:
    The name of the first such flag, and the flag as one writes it; None if
    there is none.
  """
  for name, given in values.items():
    for value in given if isinstance(given, list) else [given]:
      # `--trust_run` allows the others.
      is_trust = name == TRUST_RUN and value
      is_code = (
          name in types and value is not None and types[name].names_code(value)
      )
      if is_trust or is_code:
        return name, f'--{name}={parsers.to_text(value)}'
  return None
