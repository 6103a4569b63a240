"""Federated algorithms, one module each: functions that build a process.

The public names of the modules (their `__all__`) are public names of this
package, so a new algorithm is a new module and nothing else here.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from tff_bn.imports import dependencies

dependencies.require_tff()

from tff_bn.processes.options import Options  # noqa: E402

__all__ = ['Options']

for _info in pkgutil.iter_modules(__path__):
  _module = importlib.import_module(f'{__name__}.{_info.name}')
  globals().update((name, getattr(_module, name)) for name in _module.__all__)
  __all__ += _module.__all__
__all__.sort()

if TYPE_CHECKING:
  # Type checkers do not run the loop.
  def __getattr__(name: str) -> Any:
    ...
