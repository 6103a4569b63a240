"""Datasets, and how they are split over clients.

`load_dataset` loads a dataset by name, `split_dataset` splits it over clients.
The parts that need TensorFlow are imported when they are first used, so that
`tff_bn.data.names` can be read without it.
"""

import importlib
from typing import Any

from tff_bn.data import names
from tff_bn.data.names import DATASET_NAMES
from tff_bn.data.names import SPLIT_NAMES

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'Dataset': 'dataset',
    'FederatedData': 'federated',
    'load_dataset': 'loading',
    'split_dataset': 'federated',
}

__all__ = [
    'DATASET_NAMES',
    'SPLIT_NAMES',
    'Dataset',
    'FederatedData',
    'load_dataset',
    'names',
    'split_dataset',
]


def __getattr__(name: str) -> Any:
  if name not in _MEMBERS:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_MEMBERS[name]}')
  value = getattr(module, name)
  # Kept, so that this function is asked once for each name.
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
