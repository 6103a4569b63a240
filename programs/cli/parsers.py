"""Texts of flags: parsing and writing values."""

from collections.abc import Iterable
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
  """Checks that a flag is a line of printable text.

  Args:
    text: The flag with its value, such as the path of a file.

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


def parse_schedule(text: str) -> tuple[tuple[int, float], ...]:
  """Parses `ROUND:FACTOR,...`, e.g. '6000:0.1,8000:0.01'.

  Args:
    text: The schedule as text.

  Returns:
    Pairs (round, factor), rounds increasing.

  Raises:
    ValueError: If the text isn't a schedule.
  """
  schedule = []
  for item in text.split(','):
    try:
      start, factor = item.split(':')
      schedule.append((int(start), float(factor)))
    except ValueError as error:
      raise ValueError(
          'must be a list of ROUND:FACTOR, for example 6000:0.1,8000:0.01.'
      ) from error
  starts = [start for start, _ in schedule]
  if starts[0] < 1 or any(b <= a for a, b in zip(starts, starts[1:])):
    raise ValueError('must give increasing rounds, the first at least 1.')
  if starts[-1] > value_types.LARGEST_INT:
    raise ValueError(f'must give rounds of at most {value_types.LARGEST_INT}.')
  if not all(
      0 <= factor <= value_types.LARGEST_FLOAT for _, factor in schedule
  ):
    raise ValueError(
        f'must give factors from 0 to {value_types.LARGEST_FLOAT}.'
    )
  return tuple(schedule)


def to_text(value: Any) -> str:
  """Writes a flag's value so that its parser reads the same value back."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    return ','.join(to_text(element) for element in value)
  return str(value)


def name_flags(text: str, names: Iterable[str]) -> str:
  """Replaces the parameters in a text of the library by flags.

  Args:
    text: The text, where parameters are followed by `=` or in backquotes.
    names: The names of the flags.

  Returns:
    The text for users of the command line.
  """
  name = f'({"|".join(sorted(names, key=len, reverse=True))})'
  text = re.sub(rf'(?<![^ (]){name}=', r'--\1=', text)
  return re.sub(f'`{name}`', r'--\1', text)
