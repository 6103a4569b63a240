"""What somebody who misspelled a name may have meant."""

from collections.abc import Iterable
import difflib


def suggestion(name: str, known: Iterable[str]) -> str:
  """Finds the known name that is nearest to a misspelled one.

  Args:
    name: The name that was given.
    known: The names that are allowed.

  Returns:
    `' Did you mean …?'`, to be appended to an error message, or `''`.
  """
  nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
  return f' Did you mean {nearest[0]}?' if nearest else ''
