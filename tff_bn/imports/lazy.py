"""Packages that import their parts on first use (PEP 562), and lazy modules."""

from collections.abc import Callable, Collection, Mapping
import importlib
import sys
from typing import Any


class Module:
  """A module that is imported when one of its attributes is first read.

  For type checkers, import the module itself under `TYPE_CHECKING`.
  """

  def __init__(self, name: str):
    self._name = name

  def __getattr__(self, attribute: str) -> Any:
    return getattr(importlib.import_module(self._name), attribute)


def attach(
    package: str, members: Mapping[str, str], needs_tff: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
  """Returns the `__getattr__` and `__dir__` of a lazily imported package.

  Args:
    package: The package's name.
    members: The submodule of each public name. A name that ends its submodule's
      path stands for the submodule.
    needs_tff: The names that raise a helpful `ImportError` if TensorFlow
      Federated is missing.
  """

  def __getattr__(name: str) -> Any:
    if name not in members:
      raise AttributeError(f'module {package!r} has no attribute {name!r}')
    if name in needs_tff:
      from tff_bn.imports import dependencies

      dependencies.require_tff()
    module = importlib.import_module(f'{package}.{members[name]}')
    is_module = members[name].split('.')[-1] == name
    value = module if is_module else getattr(module, name)
    # Python calls `__getattr__` only for names that the module lacks.
    setattr(sys.modules[package], name, value)
    return value

  def __dir__() -> list[str]:
    return sorted({*vars(sys.modules[package]), *members})

  return __getattr__, __dir__
