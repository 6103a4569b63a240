"""Batch normalization that works in federated learning.

Importing the package imports none of its parts: each is loaded when it is first
used, so that `tff_bn.layers` needs Keras only and a program answers `--help`
without it.
"""

import importlib
import sys
from typing import Any

# Older versions cannot even read some of the modules.
if sys.version_info < (3, 11):  # noqa: UP036
  raise ImportError(
      'tff_bn needs Python 3.11, 3.12 or 3.13, and this is Python '
      f'{sys.version_info[0]}.{sys.version_info[1]}.'
  )

# Installs the import hook for TensorFlow Federated.
importlib.import_module(f'{__name__}.imports.tff_imports')

__version__ = '0.1.0'

# Modules, by where they are.
_SUBMODULES = {
    'aggregators': 'aggregators',
    'algorithms': 'algorithms',
    'analysis': 'analysis',
    'data': 'data',
    'drift_correction': 'clients.drift_correction',
    'evaluation': 'training.evaluation',
    'layers': 'layers',
    'models': 'models',
    'partition': 'keras_model.partition',
    'position_aware': 'position_aware',
    'programs': 'programs',
    'runtime': 'runtime',
    'training': 'training',
}
# Names that live in a module, by their modules.
_MEMBERS = {
    'BatchNormModel': 'keras_model.batch_norm_model',
    'StatefulLearningProcess': 'processes.stateful_process',
    'add_position_encodings': 'position_aware.position_encodings',
    'convert_batch_norm': 'keras_model.convert',
}
# Those whose submodule needs Keras only.
_WITHOUT_TFF = frozenset(['add_position_encodings', 'convert_batch_norm'])

__all__ = (*sorted(_MEMBERS), *_SUBMODULES)


def __getattr__(name: str) -> Any:
  if name in _MEMBERS:
    if name not in _WITHOUT_TFF:
      from tff_bn.imports import dependencies

      dependencies.require_tff()
    module = importlib.import_module(f'{__name__}.{_MEMBERS[name]}')
    value = getattr(module, name)
    # Kept, so that this function is asked once for each name.
    globals()[name] = value
    return value
  if name in _SUBMODULES:
    return importlib.import_module(f'{__name__}.{_SUBMODULES[name]}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
