"""Texts of flags: parsing and writing values."""

from collections.abc import Iterable
import csv
import io
import re
from typing import Any

from absl import flags

from tff_bn.catalog import value_types

# Control characters, bytes of a path that are not UTF-8, and ends of lines.
_REFUSED = re.compile('[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]')


class Parser(flags.ArgumentParser):
  """Parses the values of an option for absl.

  Attributes:
    values: The values that are allowed.
  """

  def __init__(self, values: value_types.ValueType):
    super().__init__()
    self.values = values

  def parse(self, argument: Any) -> Any:
    """Returns the value; raises a ValueError if it isn't allowed."""
    return self.values.parse(argument)


def check_characters(text: str) -> None:
  """Checks that a flag with its value is a line of printable text.

  Raises:
    ValueError: If it has a newline, another control character, or a byte that
      is not UTF-8.
  """
  found = _REFUSED.search(text)
  if found:
    # The text itself would break the message.
    raise ValueError(
        f'{ascii(text)[1:-1]}: must not contain the character'
        f' {ascii(found[0])}; rename the file, or use another value.'
    )


def to_text(value: Any) -> str:
  """Writes a flag's value so that its parser reads the same value back."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    text = io.StringIO()
    csv.writer(text, lineterminator='').writerow(map(to_text, value))
    return text.getvalue()
  return str(value)


def name_flags(text: str, names: Iterable[str]) -> str:
  """Replaces the parameters in a text of the library by flags.

  Args:
    text: The text, where parameters are followed by `=` or in backquotes.
    names: The names of the flags.
  """
  name = f'({"|".join(sorted(names, key=len, reverse=True))})'
  text = re.sub(rf'(?<![^ (]){name}=', r'--\1=', text)
  return re.sub(f'`{name}`', r'--\1', text)
