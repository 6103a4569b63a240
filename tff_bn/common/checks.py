"""Checks of arguments."""

from typing import Any, Union

import numpy as np


def check_type(
    name: str, value: Any, allowed: Union[type, tuple[type, ...]], expected: str
) -> None:
  """Raises a `TypeError` unless an argument has an allowed type.

  Args:
    name: The argument's name.
    value: Its value.
    allowed: The allowed types.
    expected: What the argument must do or be, for the message.
  """
  if not isinstance(value, allowed):
    raise TypeError(f'{name} must {expected}, but is a {type(value).__name__}.')


def check_whole_number(name: str, value: Any, least: int = 1) -> None:
  """Raises a `ValueError` unless an argument is a whole number from `least`."""
  if not isinstance(value, (int, np.integer)) or value < least:
    raise ValueError(
        f'{name}={value} must be a whole number, at least {least}.'
    )
