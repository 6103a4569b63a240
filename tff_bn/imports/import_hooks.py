"""Enters a context manager while a module is imported."""

from collections.abc import Callable
import contextlib
import importlib.abc
import importlib.machinery
import types
from typing import Any, Optional


def find_within(
    name: str, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Optional[importlib.machinery.ModuleSpec]:
  """Returns the spec of a module whose code runs within a context manager.

  Args:
    name: The module's name, without dots.
    context: Creates the context manager.

  Returns:
    The spec that Python's own finder returns, with a loader that enters the
    context, or `None` if there is no such module.
  """
  spec = importlib.machinery.PathFinder.find_spec(name)
  if spec is not None and spec.loader is not None:
    spec.loader = _Loader(spec.loader, context)
  return spec


class _Loader(importlib.abc.Loader):
  """Runs another loader within a context manager."""

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
    # Other code must see an ordinary module with its ordinary loader.
    module.__loader__ = self._loader
    if module.__spec__ is not None:
      module.__spec__.loader = self._loader
    with self._context():
      self._loader.exec_module(module)
