"""Measurements: traffic and normalization errors.

Members that need TensorFlow Federated are imported when they are first used.
"""

from tff_bn.analysis import normalization_error
from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_WITH_TFF = {
    'Direction': 'communication',
    'Message': 'communication',
    'ProcessTraffic': 'communication',
    'Traffic': 'communication',
    'computation_traffic': 'communication',
    'kinds_of_rounds': 'communication',
    'messages': 'communication',
    'sent_variables': 'sent_variables',
}

__all__ = ['normalization_error', *_WITH_TFF]

__getattr__, __dir__ = lazy.attach(__name__, _WITH_TFF, needs_tff=_WITH_TFF)
