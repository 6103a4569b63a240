"""What to run where TensorFlow Federated is missing or broken."""

import importlib

_ADVICE = (
    'Run `pip install --no-deps -r requirements.txt` in a clone of the tff_bn '
    'repository, with Python 3.10 or 3.11: that installs the versions that '
    'work together (a plain `pip install tensorflow-federated` fails, because '
    'it asks for a jaxlib that is no longer published).'
)


def require_tff() -> None:
  """Checks that TensorFlow Federated can be imported.

  Parts of the package that need TensorFlow Federated call this before they
  import it.

  Raises:
    ImportError: If TensorFlow Federated is not installed, or if its import
      fails in any way; the message says what to run, and the original error is
      its cause.
  """
  try:
    importlib.import_module('tensorflow_federated')
  except ModuleNotFoundError as error:
    if error.name != 'tensorflow_federated':
      raise _broken_tff(error) from error
    raise ImportError(
        'This part of tff_bn needs TensorFlow Federated, which is not '
        f'installed. {_ADVICE}'
    ) from error
  # A mismatched dependency fails with whatever it meets first: an
  # AttributeError, a TypeError of protobuf, a ValueError of NumPy.
  except Exception as error:  # pylint: disable=broad-exception-caught
    raise _broken_tff(error) from error


def _broken_tff(error: Exception) -> ImportError:
  reason = ' '.join(str(error).split())
  return ImportError(
      'This part of tff_bn needs TensorFlow Federated, which is installed but '
      f'cannot be imported ({type(error).__name__}: {reason}). {_ADVICE}'
  )
