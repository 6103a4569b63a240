"""Parsers of flag values, whose errors say which values are allowed."""

from collections.abc import Callable, Collection, Iterable, Sequence
import math
import re
from typing import Any, Optional

from absl import flags
import numpy as np

from tff_bn.common import spelling

# TensorFlow computes in int32 and float32, which hold no larger numbers.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 3.4e38
# Smaller positive numbers are not normal in float32, so they may become 0.
SMALLEST_FLOAT = 1.2e-38
# Control characters, bytes of a path that are not UTF-8, and ends of lines.
_REFUSED = re.compile('[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]')
# Larger images, if they fit into memory at all, fill it in the first layer.
_LARGEST_SIDE = 10**4


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


class NumberParser(flags.ArgumentParser):
  """Parses a number in a range.

  Numbers that int32 or float32 cannot hold are errors, unless the range says
  otherwise.

  Attributes:
    number_type: `int` or `float`.
    minimum: The smallest value allowed, or None.
    maximum: The largest value allowed, or None.
    above: The value must be greater than this, unless None.
    below: The value must be less than this, unless None.
  """

  def __init__(
      self,
      number_type: type[int] | type[float],
      *,
      minimum: Optional[float] = None,
      maximum: Optional[float] = None,
      above: Optional[float] = None,
      below: Optional[float] = None,
  ):
    super().__init__()
    largest = LARGEST_INT if number_type is int else LARGEST_FLOAT
    if maximum is None and below is None:
      maximum = largest
    if minimum is None and above is None:
      minimum = -largest
    self.number_type = number_type
    self.minimum = minimum
    self.maximum = maximum
    self.above = above
    self.below = below

  def _allowed(self) -> str:
    noun = 'a whole number' if self.number_type is int else 'a number'
    bounds = [
        f'{words} {bound}'
        for words, bound in (
            ('at least', self.minimum),
            ('greater than', self.above),
            ('at most', self.maximum),
            ('less than', self.below),
        )
        if bound is not None
    ]
    return f'{noun}, {" and ".join(bounds)}'

  def parse(self, argument: Any) -> int | float:
    """Returns the number; raises a ValueError if it isn't allowed."""
    try:
      value = self.number_type(argument)
    except (TypeError, ValueError, OverflowError):
      value = math.nan
    # Written so that not-a-number fails too.
    allowed = (
        math.isfinite(value)
        and (self.minimum is None or value >= self.minimum)
        and (self.maximum is None or value <= self.maximum)
        and (self.above is None or value > self.above)
        and (self.below is None or value < self.below)
    )
    if not allowed:
      raise ValueError(f'must be {self._allowed()}.')
    if self.number_type is float:
      self._check_float32(value)
    return value

  def _check_float32(self, value: float) -> None:
    """Checks that float32 does not round a number out of the range."""
    if 0 < abs(value) < SMALLEST_FLOAT:
      raise ValueError(
          f'is too small for float32; the smallest number is {SMALLEST_FLOAT}.'
      )
    rounded = float(np.float32(value))
    if rounded in (self.above, self.below):
      raise ValueError(
          f'is {rounded:g} in float32; it must be {self._allowed()}.'
      )


class TextParser(flags.ArgumentParser):
  """Parses a text that is not empty.

  A text that begins with two dashes is an error: absl takes the next flag as
  the value of a flag that has none.
  """

  def parse(self, argument: str) -> str:
    """Returns the text; raises a ValueError if it isn't allowed."""
    if not argument.strip():
      raise ValueError('must not be empty.')
    if argument.startswith('--'):
      raise ValueError('must not begin with --; is the value missing?')
    return argument


class BooleanParser(flags.BooleanParser):
  """Parses a flag that is on or off."""

  def parse(self, argument: str | bool | int) -> bool:
    """Returns the value; raises a ValueError if it isn't allowed."""
    try:
      return super().parse(argument)
    except (TypeError, ValueError) as error:
      raise ValueError('must be true or false.') from error


class ChoiceParser(flags.ArgumentParser):
  """Parses one of the given names.

  Attributes:
    known: The names; entries of a registry that are added later are known too.
    other: Other allowed values, in words for the error message, or None.
    is_other: Whether a string is one of the other allowed values.
  """

  def __init__(
      self,
      known: Collection[str],
      other: Optional[str] = None,
      is_other: Callable[[str], bool] = lambda argument: False,
  ):
    super().__init__()
    self.known = known
    self.other = other
    self.is_other = is_other

  def parse(self, argument: str) -> str:
    """Returns the name; raises a ValueError if it isn't allowed."""
    if argument not in self.known and not self.is_other(argument):
      other = f' or {self.other}' if self.other else ''
      raise ValueError(
          f'must be one of {", ".join(self.known)}{other}.'
          f'{spelling.suggestion(argument, self.known)}'
      )
    return argument


class ChainParser(flags.ArgumentParser):
  """Parses wrappers and a name, joined by +, such as nnm+median.

  Attributes:
    wrappers: The names of the wrappers.
    known: The names that can be wrapped.
  """

  def __init__(self, wrappers: Collection[str], known: Collection[str]):
    super().__init__()
    self.wrappers = wrappers
    self.known = known

  def parse(self, argument: str) -> str:
    """Returns the text; raises a ValueError if it isn't allowed."""
    *wrappers, last = argument.split('+')
    for name, allowed in [
        *((wrapper, self.wrappers) for wrapper in wrappers),
        (last, self.known),
    ]:
      if name not in allowed:
        raise ValueError(
            f'must be one of {", ".join(self.known)}, or behind a wrapper of'
            f' {", ".join(self.wrappers)}, as in'
            f' {next(iter(self.wrappers))}+{list(self.known)[1]}.'
            f'{spelling.suggestion(name, allowed)}'
        )
    return argument


class TupleParser(flags.ArgumentParser):
  """Parses a comma-separated list of different values.

  Attributes:
    element: The parser of one value.
  """

  def __init__(self, element: flags.ArgumentParser):
    super().__init__()
    self.element = element

  def parse(self, argument: str | Sequence[Any]) -> tuple[Any, ...]:
    """Returns the values; raises a ValueError if one isn't allowed."""
    if not isinstance(argument, str):
      return tuple(argument)
    values = []
    for text in argument.split(','):
      try:
        value = self.element.parse(text.strip())
      except ValueError as error:
        raise ValueError(f'{text.strip()!r}: {error}') from error
      if value in values:
        raise ValueError(f'{value} is in the list twice.')
      values.append(value)
    return tuple(values)


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
  if starts[-1] > LARGEST_INT:
    raise ValueError(f'must give rounds of at most {LARGEST_INT}.')
  if not all(0 <= factor <= LARGEST_FLOAT for _, factor in schedule):
    raise ValueError(f'must give factors from 0 to {LARGEST_FLOAT}.')
  return tuple(schedule)


def parse_image_size(text: str) -> tuple[int, int]:
  """Parses `HEIGHTxWIDTH`, e.g. '32x32'."""
  match = re.fullmatch('([0-9]+)x([0-9]+)', text.lower())
  height, width = map(int, match.groups()) if match else (0, 0)
  if height < 1 or width < 1:
    raise ValueError('must be HEIGHTxWIDTH in pixels, for example 32x32.')
  if max(height, width) > _LARGEST_SIDE:
    raise ValueError(
        f'must have a height and a width of at most {_LARGEST_SIDE} pixels.'
    )
  return height, width


class CheckedTextParser(flags.ArgumentParser):
  """Accepts a text that passes a check.

  Attributes:
    check: Raises a ValueError that says which texts are allowed.
  """

  def __init__(self, check: Callable[[str], Any]):
    super().__init__()
    self.check = check

  def parse(self, argument: str) -> str:
    """Returns the text; raises a ValueError if it isn't allowed."""
    self.check(argument)
    return argument


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
