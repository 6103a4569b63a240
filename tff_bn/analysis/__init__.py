"""Measurements on algorithms and on what training sends.

`normalization_error` needs neither TensorFlow nor TensorFlow Federated, so the
parts that do are imported when they are first used.
"""

from typing import Any

from tff_bn import dependencies
from tff_bn import lazy
from tff_bn.analysis import normalization_error

# Name -> the module of this package in which it is defined.
_MEMBERS = {
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

_load, __dir__ = lazy.attach(__name__, _MEMBERS)


def __getattr__(name: str) -> Any:
  if name in _MEMBERS:
    dependencies.require_tff()
  return _load(name)
