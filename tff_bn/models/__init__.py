"""Model architectures, by name or by a function of the user's.

TensorFlow is imported when a model is first asked for, so that
`tff_bn.models.names` can be read without it.
"""

import importlib
from typing import Any

from tff_bn.models import names
from tff_bn.models.names import MODEL_NAMES
from tff_bn.models.names import NORMALIZATION_NAMES

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'build_digits_cnn': 'digits_cnn',
    'build_mlp3': 'mlp3',
    'build_model_fn': 'building',
    'build_resnet20': 'resnet20',
    'build_small_cnn': 'small_cnn',
}

__all__ = [
    'MODEL_NAMES',
    'NORMALIZATION_NAMES',
    'build_digits_cnn',
    'build_mlp3',
    'build_model_fn',
    'build_resnet20',
    'build_small_cnn',
    'names',
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
