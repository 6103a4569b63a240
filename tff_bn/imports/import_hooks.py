"""Runs the code of a module within a context manager, when it is imported."""

from collections.abc import Callable
import contextlib
import importlib.abc
import importlib.machinery
import types
from typing import Any, Optional


def find_within(
    name: str, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Optional[importlib.machinery.ModuleSpec]:
  """Finds a module; importing it enters a context and leaves it afterwards.

  Args:
    name: The module's name, without dots.
    context: Makes the context manager.

  Returns:
    What Python's own finder returns, with another loader; `None` if there is no
    such module.
  """
  spec = importlib.machinery.PathFinder.find_spec(name)
  if spec is not None and spec.loader is not None:
    spec.loader = _Loader(spec.loader, context)
  return spec


class _Loader(importlib.abc.Loader):
  """Loads a module with its own loader, but within a context manager."""

  def __init__(
      self,
      loader: importlib.abc.Loader,
      context: Callable[[], contextlib.AbstractContextManager[Any]],
  ):
    self._loader = loader
    self._context = context

  def create_module(
      self, spec: importlib.machinery.ModuleSpec
  ) -> Optional[types.ModuleType]:
    """See the base class."""
    return self._loader.create_module(spec)

  def exec_module(self, module: types.ModuleType) -> None:
    """See the base class."""
    # What others find is a module like any other.
    module.__spec__.loader = module.__loader__ = self._loader
    with self._context():
      self._loader.exec_module(module)
