"""How plain Keras loads a model file. Imports neither Keras nor TensorFlow."""

from collections.abc import Iterator
import json
import os
import pathlib
from typing import Any, NamedTuple
import zipfile

_CONFIG = 'config.json'
_LAMBDA = '__lambda__'
_FUNCTION = 'function'
# The packages whose objects Keras finds itself.
_KERAS = ('keras', 'builtins')


class _Custom(NamedTuple):
  """An object in a model that is not Keras's own.

  Attributes:
    module: The module that defines it; empty if the file does not say so.
    name: Its name there.
    is_registered: Whether Keras finds it when the module is imported.
  """

  module: str
  name: str
  is_registered: bool


def loading_code(path: pathlib.Path) -> list[str]:
  """Returns the lines of Python that load a model.

  Args:
    path: The `.keras` file.

  Returns:
    The imports that are needed besides Keras, if any, and the call of
    `keras.models.load_model`.
  """
  with zipfile.ZipFile(path) as archive:
    values = list(_objects(json.loads(archive.read(_CONFIG))))
  custom = sorted({found for value in values if (found := _custom(value))})
  arguments = [repr(os.fspath(path))]
  unregistered = [found for found in custom if not found.is_registered]
  if unregistered:
    entries = (
        f'{c.name!r}: {c.module and f"{c.module}."}{c.name}'
        for c in unregistered
    )
    arguments.append(f'custom_objects={{{", ".join(entries)}}}')
  if any(value.get('class_name') == _LAMBDA for value in values):
    arguments.append('safe_mode=False')
  imports = dict.fromkeys(f'import {c.module}' for c in custom if c.module)
  return [*imports, f'keras.models.load_model({", ".join(arguments)})']


def _objects(value: Any) -> Iterator[dict[str, Any]]:
  """Yields all dictionaries in a JSON value."""
  if isinstance(value, dict):
    yield value
    value = list(value.values())
  if isinstance(value, list):
    for element in value:
      yield from _objects(element)


def _custom(value: dict[str, Any]) -> _Custom | None:
  """Returns the object that a dictionary in a config stands for."""
  module, registered = value.get('module'), value.get('registered_name')
  # Keras's own functions are texts.
  if module == 'builtins' and registered == _FUNCTION:
    return _Custom('', value['config'], False)
  if not module or not registered or module.split('.')[0] in _KERAS:
    return None
  return _Custom(module, value['class_name'], '>' in registered)
