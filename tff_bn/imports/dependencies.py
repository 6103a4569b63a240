"""Checks that the requirements of the federated parts are installed."""

import importlib
import importlib.util
import os
import sys
from typing import Optional

# The versions that work together, as in setup.py. Another package or a later
# `pip install` may have replaced the versions that setup.py asked for.
TENSORFLOW_VERSIONS = ((2, 19), (2, 21))
OLDEST_KERAS_VERSION = (3, 10)
_TFF_VERSION = (0, 87)

# These need `pip install --no-deps`: their metadata pins dependencies to
# versions of 2023.
PINNED_PACKAGES = (
    'tensorflow-federated==0.87.0',
    'tensorflow-privacy==0.9.0',
    'tensorflow-model-optimization==0.8.0',
    'dp-accounting==0.6.0',
)
_NEEDED = 'The federated parts of tff_bn need'
_ADVICE = (
    "Run `pip install '.[federated]'` in a clone of the tff_bn repository, and "
    'then `pip install --no-deps --ignore-requires-python '
    f'{" ".join(PINNED_PACKAGES)}`.'
)
# The values that TensorFlow reads as true.
_TRUE = ('1', 'true', 'True')


def require_tff() -> None:
  """Imports TensorFlow Federated after checking its requirements.

  Modules that need TensorFlow Federated call this before they import it.

  Raises:
    ImportError: If TensorFlow Federated is not installed or can't be imported,
      if the version of TensorFlow, Keras or TensorFlow Federated is
      unsupported, or if Keras's backend is not TensorFlow. The message says
      what was found and how to fix it.
  """
  if not _is_installed('tensorflow_federated'):
    raise ImportError(
        f'{_NEEDED} TensorFlow Federated, which is not installed. {_ADVICE}'
    )
  _check_variables()
  _check_versions()
  # Mismatched dependencies raise errors of many types: AttributeError,
  # protobuf's TypeError, NumPy's ValueError.
  try:
    importlib.import_module('tensorflow_federated')
  except Exception as error:
    reason = ' '.join(str(error).split())
    raise ImportError(
        f'{_NEEDED} TensorFlow Federated, which is installed but cannot be '
        f'imported ({type(error).__name__}: {reason}). {_ADVICE}'
    ) from error
  _check_backend()


def missing_module(name: str) -> ImportError:
  """Returns an error that says how to install a missing module.

  Args:
    name: The name of the module that was not found.
  """
  return ImportError(f'{name} is not installed. {_ADVICE}')


def _is_installed(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:
    return False


def _check_variables() -> None:
  """Checks Keras's environment variables before Keras reads them."""
  legacy = os.environ.get('TF_USE_LEGACY_KERAS')
  if legacy in _TRUE:
    raise ImportError(
        f'{_NEEDED} Keras 3, but TF_USE_LEGACY_KERAS={legacy} asks for Keras 2.'
        ' Unset this environment variable.'
    )
  backend = os.environ.get('KERAS_BACKEND')
  # After Keras is imported, the variable has no effect.
  if 'keras' not in sys.modules and backend not in (None, '', 'tensorflow'):
    raise ImportError(
        f"{_NEEDED} Keras's TensorFlow backend, but KERAS_BACKEND={backend}."
        ' Set this environment variable to tensorflow, or unset it.'
    )


def _check_backend() -> None:
  """Checks the backend of the imported Keras."""
  backend = importlib.import_module('keras').backend.backend()
  if backend != 'tensorflow':
    raise ImportError(
        f"{_NEEDED} Keras's TensorFlow backend, but Keras was imported with"
        f' the backend {backend}. Set the environment variable'
        ' KERAS_BACKEND=tensorflow before Keras is imported. (Without this'
        ' variable, the file ~/.keras/keras.json names the backend.)'
    )


def _check_versions() -> None:
  found = _version('tensorflow', 'tensorflow', 'tensorflow-cpu')
  oldest, newest = TENSORFLOW_VERSIONS
  if found and not oldest <= _minor(found) <= newest:
    _refuse('TensorFlow', f'{_dotted(oldest)} to {_dotted(newest)}', found)
  found = _version('keras', 'keras')
  if found and _minor(found) < OLDEST_KERAS_VERSION:
    _refuse('Keras', f'{_dotted(OLDEST_KERAS_VERSION)} or newer', found)
  found = _version('tensorflow_federated', 'tensorflow-federated')
  if found and _minor(found) != _TFF_VERSION:
    _refuse('TensorFlow Federated', _dotted(_TFF_VERSION), found)


def _version(module: str, *distributions: str) -> Optional[str]:
  """Returns the imported version, else the installed one, else `None`."""
  if version := getattr(sys.modules.get(module), '__version__', None):
    return version
  # Imported late: programs import this module to parse their flags.
  import importlib.metadata

  for distribution in distributions:
    try:
      return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
      pass
  # Installed without metadata, or missing: then the import itself fails.
  return None


def _minor(version: str) -> tuple[int, ...]:
  return tuple(int(number) for number in version.split('.')[:2])


def _dotted(version: tuple[int, ...]) -> str:
  return '.'.join(map(str, version))


def _refuse(package: str, needed: str, found: str) -> None:
  raise ImportError(
      f'{_NEEDED} {package} {needed}, but version {found} is installed.'
      f' {_ADVICE}'
  )
