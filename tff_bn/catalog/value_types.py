"""The values that options may have, and the errors for all others."""

import abc
from collections.abc import Callable, Collection, Sequence
import csv
import math
import numbers
import os
import re
import struct
from typing import Any, Optional
import zipfile

from tff_bn.common import spelling

# TensorFlow computes in int32 and float32, which hold no larger numbers.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 3.4e38
# Smaller positive numbers are not normal in float32, so they may become 0.
SMALLEST_FLOAT = 2.0**-126


class ValueType(abc.ABC):
  """A set of values.

  Attributes:
    code_words: What a value for which `names_code` is true does: the predicate
      of a sentence whose subject is the option.
  """

  code_words: str = 'names code that is not part of tff_bn'

  @abc.abstractmethod
  def parse(self, text: Any) -> Any:
    """Returns the value that a text stands for.

    Args:
      text: The text, as one writes it in a command.

    Returns:
      The value.

    Raises:
      ValueError: If there is no such value. The message continues a sentence
        whose subject is the option, such as 'must be at least 1.'
    """

  def check(self, name: str, value: Any, owner: object = None) -> None:
    """Checks an argument of the library.

    Args:
      name: The argument's name.
      value: Its value.
      owner: The object whose argument it is, if the message should name it.

    Raises:
      TypeError: If the value has a wrong type.
      ValueError: If it is not allowed.
    """
    try:
      self.parse(value)
    except ValueError as error:
      raise ValueError(f'{name}={value!r}{_of(owner)} {error}') from error

  def names_code(self, value: Any) -> bool:
    """Whether a value, or its text, names code that is not in this package."""
    del value
    return False

  def load(self, value: Any) -> None:
    """Imports the code that a value names, if it names any.

    Parsing imports nothing, because a value may come from somebody else.

    Args:
      value: The value.

    Raises:
      ValueError: If the code can't be imported, or does not fit. The message
        continues a sentence whose subject is the option.
    """
    del value


def _of(owner: object) -> str:
  return '' if owner is None else f' of {type(owner).__name__}'


class Number(ValueType):
  """Numbers in a range that int32 or float32 can hold.

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

  def allowed(self) -> str:
    """Returns the values in words, such as 'a number, at least 0 and …'."""
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

  def parse(self, text):
    """See the base class."""
    try:
      value = self.number_type(text)
    except (TypeError, ValueError, OverflowError):
      value = math.nan
    problem = self._problem(value)
    if problem:
      raise ValueError(problem)
    return value

  def check(self, name, value, owner=None):
    """See the base class."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
      raise TypeError(
          f'{name}{_of(owner)} must be {self.allowed()}, but is {value!r}.'
      )
    if self.number_type is int and not isinstance(value, numbers.Integral):
      problem: Optional[str] = f'must be {self.allowed()}.'
    else:
      problem = self._problem(float(value))
    if problem:
      raise ValueError(f'{name}={value}{_of(owner)} {problem}')

  def _problem(self, value: float) -> Optional[str]:
    """Returns why a number is not allowed, if it is not."""
    # Written so that not-a-number fails too.
    allowed = (
        math.isfinite(value)
        and (self.minimum is None or value >= self.minimum)
        and (self.maximum is None or value <= self.maximum)
        and (self.above is None or value > self.above)
        and (self.below is None or value < self.below)
    )
    if not allowed:
      return f'must be {self.allowed()}.'
    if self.number_type is int:
      return None
    if 0 < abs(value) < SMALLEST_FLOAT:
      return (
          'is too small for float32; the smallest number is'
          f' {SMALLEST_FLOAT:.2g}, so use a larger one.'
      )
    rounded = struct.unpack('f', struct.pack('f', value))[0]
    if rounded in (self.above, self.below):
      return f'is {rounded:g} in float32; it must be {self.allowed()}.'
    return None


class _OfTexts(ValueType):
  """A set of texts."""

  def allowed(self) -> str:
    """Returns the values in words, such as 'one of none, all'."""
    return 'a text'

  def check(self, name, value, owner=None):
    """See the base class."""
    if not isinstance(value, str):
      raise TypeError(
          f'{name}{_of(owner)} must be {self.allowed()}, but is {value!r}.'
      )
    super().check(name, value, owner)


class Text(_OfTexts):
  """Texts that are not empty.

  A text that begins with two dashes is an error: absl takes the next flag as
  the value of a flag that has none.
  """

  def parse(self, text):
    """See the base class."""
    if not text.strip():
      raise ValueError('must not be empty.')
    if text.startswith('--'):
      raise ValueError('must not begin with --; is the value missing?')
    return text


class CodeName(Text):
  """Functions of the user, as `package.module:function`."""

  def names_code(self, value):
    """See the base class."""
    return True


class RegularExpression(Text):
  """Regular expressions of Python."""

  def parse(self, text):
    """See the base class."""
    super().parse(text)
    try:
      re.compile(text)
    except re.error as error:
      raise ValueError(f'is no regular expression: {error}.') from error
    return text


class KerasFile(Text):
  """Paths of `.keras` files of the user, which can contain code."""

  code_words = 'is a model file, which can contain code'

  def parse(self, text):
    """See the base class."""
    super().parse(text)
    if not text.endswith('.keras'):
      raise ValueError('must be a file that ends in .keras.')
    return text

  def names_code(self, value):
    """See the base class."""
    return True

  def load(self, value):
    """Checks that the file is one of Keras, and runs nothing."""
    path = os.path.expanduser(value)
    if not os.path.exists(path):
      raise ValueError('there is no such file.')
    if not zipfile.is_zipfile(path):
      raise ValueError('it is not a file of Keras 3; save one by model.save.')


class CheckedText(_OfTexts):
  """Texts that pass a check.

  Attributes:
    require: Raises a ValueError that says which texts are allowed.
  """

  def __init__(self, require: Callable[[str], Any]):
    self.require = require

  def parse(self, text):
    """See the base class."""
    self.require(text)
    return text


class Boolean(ValueType):
  """True and false."""

  def parse(self, text):
    """See the base class."""
    values = {
        '1': True,
        'true': True,
        't': True,
        'yes': True,
        '0': False,
        'false': False,
        'f': False,
        'no': False,
    }
    value = values.get(str(text).lower())
    if value is None:
      raise ValueError('must be true or false.')
    return value

  def check(self, name, value, owner=None):
    """See the base class."""
    if not isinstance(value, bool):
      raise TypeError(
          f'{name}{_of(owner)} must be True or False, but is {value!r}.'
      )


class Choice(_OfTexts):
  """One of the given names.

  Attributes:
    known: The names. Entries of a registry, which may be a mapping.
    other: Other allowed values, in words for the error message, or None.
    is_other: Whether a string is one of the other allowed values.
  """

  def __init__(
      self,
      known: Collection[str],
      other: Optional[str] = None,
      is_other: Callable[[str], bool] = lambda text: False,
  ):
    self.known = known
    self.other = other
    self.is_other = is_other

  def allows(self, text: str) -> bool:
    """Whether a text is one of the names."""
    return text in self.known or self.is_other(text)

  def allowed(self):
    """See the base class."""
    other = f' or {self.other}' if self.other else ''
    return f'one of {", ".join(self.known)}{other}'

  def parse(self, text):
    """See the base class."""
    if not self.allows(text):
      raise ValueError(
          f'must be {self.allowed()}.{spelling.suggestion(text, self.known)}'
      )
    return text


class Chain(ValueType):
  """Wrappers and a name, joined by +, such as nnm+median.

  Attributes:
    wrappers: The wrappers.
    wrapped: What can be wrapped.
  """

  def __init__(self, wrappers: Choice, wrapped: Choice):
    self.wrappers = wrappers
    self.wrapped = wrapped

  def parse(self, text):
    """See the base class."""
    for name, allowed in self._parts(text):
      if not allowed.allows(name):
        raise ValueError(
            f'must be {self.wrapped.allowed()}, or behind'
            f' a wrapper of {", ".join(self.wrappers.known)}, as in'
            f' {next(iter(self.wrappers.known))}+{list(self.wrapped.known)[1]}.'
            f'{spelling.suggestion(name, allowed.known)}'
        )
    return text

  def names_code(self, value):
    """See the base class."""
    return any(names.names_code(name) for name, names in self._parts(value))

  def load(self, value):
    """See the base class."""
    for name, names in self._parts(value):
      names.load(name)

  def _parts(self, text: str) -> list[tuple[str, Choice]]:
    """Returns the names, and the choice to which each belongs."""
    *wrappers, last = text.split('+')
    return [(name, self.wrappers) for name in wrappers] + [(last, self.wrapped)]


class List(ValueType):
  """Comma-separated lists of different values.

  A value that contains a comma is written in double quotes.

  Attributes:
    element: The values.
  """

  def __init__(self, element: ValueType):
    self.element = element

  def parse(self, text: str | Sequence[Any]) -> tuple[Any, ...]:
    """See the base class."""
    if not isinstance(text, str):
      return tuple(text)
    values = []
    for part in self._elements(text):
      try:
        value = self.element.parse(part)
      except ValueError as error:
        raise ValueError(f'{part!r}: {error}') from error
      if value in values:
        raise ValueError(f'{value} is in the list twice.')
      values.append(value)
    return tuple(values)

  def names_code(self, value):
    """See the base class."""
    return any(map(self.element.names_code, self._elements(value)))

  def load(self, value):
    """See the base class."""
    for element in self._elements(value):
      self.element.load(element)

  def _elements(self, value: str | Sequence[Any]) -> Sequence[Any]:
    if not isinstance(value, str):
      return value
    try:
      (parts,) = csv.reader([value], skipinitialspace=True, strict=True)
    except csv.Error as error:
      raise ValueError(f'{value}: {error}.') from error
    return [part.strip() for part in parts] or ['']


POSITIVE_INTEGER = Number(int, minimum=1)
COUNT = Number(int, minimum=0)
INTEGER = Number(int)
POSITIVE = Number(float, above=0)
NOT_NEGATIVE = Number(float, minimum=0)
FINITE = Number(float)
SHARE = Number(float, minimum=0, maximum=1)
POSITIVE_SHARE = Number(float, above=0, maximum=1)
PART = Number(float, above=0, below=1)
MOMENTUM = Number(float, minimum=0, below=1)
SEED = Number(int, minimum=0, maximum=2**32 - 1)
TEXT = Text()
REGULAR_EXPRESSION = RegularExpression()
BOOLEAN = Boolean()
