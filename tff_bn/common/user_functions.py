"""Code of users, which they name as `package.module:NAME`."""

from collections.abc import Callable
import importlib
import re
from typing import Any

from tff_bn.common import spelling

_KERAS_PREFIX = 'Exception encountered when calling'


def import_object(name: str) -> Any:
  """Imports `package.module:NAME`.

  Raises:
    ValueError: If it can't be imported. The message continues a sentence whose
      subject is the name.
  """
  module_name, _, attribute = name.partition(':')
  if not module_name or not attribute:
    raise ValueError('must have the form package.module:NAME.')
  try:
    module = importlib.import_module(module_name)
  # The user's module may raise anything. A script may end the program.
  except (Exception, SystemExit) as error:
    raise ValueError(
        f'the module {module_name!r} can not be imported ({brief(error)}). To'
        ' import your own file, add its folder to the environment variable'
        ' PYTHONPATH.'
    ) from error
  if not hasattr(module, attribute):
    raise ValueError(
        f'the module {module_name!r} has no {attribute!r}.'
        f'{spelling.suggestion(attribute, vars(module))}'
    )
  return getattr(module, attribute)


def import_function(parameter: str, name: str) -> Callable[..., Any]:
  """Imports the function `package.module:NAME`, the value of `parameter`.

  Raises:
    ValueError: If it can't be imported, or is not a function.
  """
  try:
    function = import_object(name)
  except ValueError as error:
    raise ValueError(f'{parameter}={name}: {error}') from error
  if not callable(function):
    raise ValueError(f'{parameter}={name} must be a function.')
  return function


def call(
    subject: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
  """Calls a user's function; raises a `ValueError` if it fails.

  `subject` is the beginning of the message.
  """
  try:
    return function(*args, **kwargs)
  # The user's function may raise anything, or end the program.
  except (Exception, SystemExit) as error:
    raise ValueError(
        f'{subject}: its function failed ({brief(error)}).'
    ) from error


def brief(error: BaseException) -> str:
  """Returns the class of an exception and the first line of its message."""
  lines = re.sub('\x1b\\[[0-9]*m', '', str(error)).split('\n')
  lines = [line.strip() for line in lines if line.strip()] or ['']
  # Keras's first line names only the layer.
  num_lines = 2 if lines[0].startswith(_KERAS_PREFIX) else 1
  return f'{type(error).__name__}: {" ".join(lines[:num_lines])}'
