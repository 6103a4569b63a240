"""Checks of the arguments of rules and attacks."""

import math
import numbers
from typing import Any


def check_count(owner: Any, name: str, value: Any, least: int) -> None:
  """Checks that an argument is an integer.

  Args:
    owner: The object whose argument it is.
    name: The argument's name.
    value: Its value.
    least: The least value allowed.

  Raises:
    ValueError: If it is not an integer, or less.
  """
  if (
      isinstance(value, bool)
      or not isinstance(value, numbers.Integral)
      or value < least
  ):
    raise ValueError(
        f'{name}={value!r} of {type(owner).__name__} must be an integer of at'
        f' least {least}.'
    )


def check_positive(owner: Any, name: str, value: Any) -> None:
  """Checks that an argument is a positive number.

  Args:
    owner: The object whose argument it is.
    name: The argument's name.
    value: Its value.

  Raises:
    ValueError: If it is not positive and finite.
  """
  if (
      isinstance(value, bool)
      or not isinstance(value, numbers.Real)
      or not 0 < value < math.inf
  ):
    raise ValueError(
        f'{name}={value!r} of {type(owner).__name__} must be a positive number.'
    )
