"""Functions of users, which they name as `package.module:function`."""

from collections.abc import Callable
import importlib
import re
from typing import Any

_KERAS_PREFIX = 'Exception encountered when calling'


def import_function(parameter: str, name: str) -> Callable[..., Any]:
  """Imports `package.module:function`.

  Args:
    parameter: The parameter whose value it is, for messages.
    name: The name.

  Returns:
    The function.

  Raises:
    ValueError: If it can't be imported.
  """
  module_name, _, function_name = name.partition(':')
  if not module_name or not function_name:
    raise ValueError(
        f'{parameter}={name} must have the form package.module:function.'
    )
  try:
    module = importlib.import_module(module_name)
  # The user's module may raise anything. A script may end the program.
  except (Exception, SystemExit) as error:
    raise ValueError(
        f'{parameter}={name}: the module {module_name!r} can not be imported'
        f' ({brief(error)}). To import your own file, add its folder to the'
        ' environment variable PYTHONPATH.'
    ) from error
  function = getattr(module, function_name, None)
  if not callable(function):
    raise ValueError(
        f'{parameter}={name}: the module {module_name!r} has no function'
        f' {function_name!r}.'
    )
  return function


def brief(error: BaseException) -> str:
  """Returns the class of an exception and the first line of its message."""
  lines = re.sub('\x1b\\[[0-9]*m', '', str(error)).split('\n')
  lines = [line.strip() for line in lines if line.strip()] or ['']
  # Keras's first line names only the layer.
  num_lines = 2 if lines[0].startswith(_KERAS_PREFIX) else 1
  return f'{type(error).__name__}: {" ".join(lines[:num_lines])}'
