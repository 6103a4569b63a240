"""Suggestions for misspelled names."""

from collections.abc import Iterable
import difflib


def suggestion(name: str, known: Iterable[str]) -> str:
  """Returns `' Did you mean …?'` for an error message, or `''`.

  Args:
    name: The misspelled name.
    known: The allowed names.
  """
  nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
  return f' Did you mean {nearest[0]}?' if nearest else ''
