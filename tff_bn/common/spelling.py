"""Lists of names, and suggestions for misspelled ones."""

from collections.abc import Iterable, Sequence
import difflib

_MAX_NAMED = 6


def suggestion(name: str, known: Iterable[str]) -> str:
  """Returns `' Did you mean …?'` for an error message, or `''`.

  Args:
    name: The misspelled name.
    known: The allowed names.
  """
  nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
  return f' Did you mean {nearest[0]}?' if nearest else ''


def name_some(names: Sequence[str]) -> str:
  """Returns names, separated by commas; the middle of a long list is left out.

  Args:
    names: The names.
  """
  if len(names) > _MAX_NAMED:
    names = [*names[: _MAX_NAMED - 2], '…', names[-1]]
  return ', '.join(names)
