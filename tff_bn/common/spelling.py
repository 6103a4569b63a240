"""Lists of names, and suggestions for misspelled ones."""

from collections.abc import Iterable, Sequence
import difflib

_MAX_NAMED = 6
# How similar a name must be, from 0 to 1. Names that somebody gave to clients,
# such as Paris and Madrid, are similar by chance.
_CUTOFF = 0.5
_CUTOFF_OF_GIVEN_NAMES = 0.8


def suggestion(
    name: str, known: Iterable[str], *, are_given: bool = False
) -> str:
  """Returns `' Did you mean …?'` for an error message, or `''`.

  If users chose the known names (`are_given`), as for clients, only a very
  similar one is suggested.
  """
  cutoff = _CUTOFF_OF_GIVEN_NAMES if are_given else _CUTOFF
  by_lower = {text.lower(): text for text in known}
  nearest = difflib.get_close_matches(name.lower(), by_lower, 1, cutoff)
  return f' Did you mean {by_lower[nearest[0]]}?' if nearest else ''


def name_some(names: Sequence[str]) -> str:
  """Returns names with commas between them, without a long list's middle."""
  if len(names) > _MAX_NAMED:
    names = [*names[: _MAX_NAMED - 2], '…', names[-1]]
  return ', '.join(names)
