"""Keeps two processes from training in the same folder."""

from collections.abc import Iterator
import contextlib
import fcntl
import os
from typing import Union


@contextlib.contextmanager
def hold(folder: Union[str, os.PathLike[str]]) -> Iterator[None]:
  """Holds a folder's lock; the system releases it if the process dies.

  Args:
    folder: The folder of a run.

  Yields:
    Nothing.

  Raises:
    ValueError: If another process holds the lock.
  """
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
          f'{folder} is the folder of a run that is in progress; wait for its'
          ' end, or choose another folder.'
      ) from None
    except OSError:
      pass  # Some network file systems have no locks.
    yield
  finally:
    os.close(descriptor)  # And with it the lock.
