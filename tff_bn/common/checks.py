"""Checks of arguments."""

from typing import Any, Union

import numpy as np


def check_type(
    name: str, value: Any, allowed: Union[type, tuple[type, ...]], expected: str
) -> None:
  """Raises a `TypeError` unless an argument has an allowed type.

  The message says that it must `expected`, such as 'be a list'.
  """
  if not isinstance(value, allowed):
    raise TypeError(f'{name} must {expected}, but is a {type(value).__name__}.')


def is_utf8(text: str) -> bool:
  """Whether a text, such as the name of a file, can be encoded as UTF-8."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def check_integer(name: str, value: Any) -> None:
  """Raises a `TypeError` unless an argument is an integer of 64 bits."""
  if (
      isinstance(value, bool)
      or not isinstance(value, (int, np.integer))
      or not -(2**63) <= value < 2**63
  ):
    raise TypeError(f'{name} must be an integer of 64 bits, but is {value!r}.')


def check_function(name: str, value: Any, expected: str) -> None:
  """Raises a `TypeError` unless an argument is a function.

  The message says that the function `expected`, such as 'returns a list'.
  """
  if not callable(value):
    raise TypeError(
        f'{name} must be a function that {expected}, but is {value!r}.'
    )
