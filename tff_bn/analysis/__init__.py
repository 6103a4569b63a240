"""Measurements of the traffic of training and of normalization errors.

Members that need TensorFlow Federated are imported when they are first used.
"""

from typing import Any

from tff_bn.analysis import normalization_error
from tff_bn.imports import dependencies
from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_WITH_TFF = {
    'Direction': 'communication',
    'Message': 'communication',
    'ProcessTraffic': 'communication',
    'Traffic': 'communication',
    'computation_traffic': 'communication',
    'messages': 'communication',
}

__all__ = [
    'Direction',
    'Message',
    'ProcessTraffic',
    'Traffic',
    'computation_traffic',
    'messages',
    'normalization_error',
]

_load, __dir__ = lazy.attach(__name__, _WITH_TFF)


def __getattr__(name: str) -> Any:
  if name in _WITH_TFF:
    dependencies.require_tff()
  return _load(name)
