"""Packages that import their parts when they are first used."""

from collections.abc import Callable, Mapping
import importlib
import sys
from typing import Any


def attach(
    package: str, members: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
  """Makes the module functions that load a package's parts on demand.

  Args:
    package: The package's name.
    members: Which submodule each public name is in.

  Returns:
    The package's `__getattr__` and `__dir__`.
  """

  def __getattr__(name: str) -> Any:
    if name not in members:
      raise AttributeError(f'module {package!r} has no attribute {name!r}')
    module = importlib.import_module(f'{package}.{members[name]}')
    value = getattr(module, name)
    # Kept, so that this function is asked once for each name.
    setattr(sys.modules[package], name, value)
    return value

  def __dir__() -> list[str]:
    return sorted({*vars(sys.modules[package]), *members})

  return __getattr__, __dir__
