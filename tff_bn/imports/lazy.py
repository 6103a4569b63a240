"""Packages that import their parts on first use (PEP 562)."""

from collections.abc import Callable, Mapping
import importlib
import sys
from typing import Any


def attach(
    package: str, members: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
  """Returns the `__getattr__` and `__dir__` of a lazily imported package.

  Args:
    package: The package's name.
    members: The submodule of each public name.
  """

  def __getattr__(name: str) -> Any:
    if name not in members:
      raise AttributeError(f'module {package!r} has no attribute {name!r}')
    module = importlib.import_module(f'{package}.{members[name]}')
    value = getattr(module, name)
    # Python calls `__getattr__` only for names that the module lacks.
    setattr(sys.modules[package], name, value)
    return value

  def __dir__() -> list[str]:
    return sorted({*vars(sys.modules[package]), *members})

  return __getattr__, __dir__
