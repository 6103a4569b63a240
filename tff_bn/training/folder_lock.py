"""Locks that keep two programs from writing into the same folder."""

from collections.abc import Iterator
import contextlib
import contextvars
import dataclasses
import fcntl
import os
from typing import Optional, Union

_Folder = Union[str, os.PathLike[str]]


@dataclasses.dataclass(eq=False)
class _Claim:
  """A locked folder, which `hold` may use.

  Attributes:
    path: The folder.
    descriptor: The open folder, which holds the lock.
    is_used: Whether `hold` uses it at present.
  """

  path: str
  descriptor: int
  is_used: bool = False


_claims: contextvars.ContextVar[tuple[_Claim, ...]] = contextvars.ContextVar(
    'claims', default=()
)


@contextlib.contextmanager
def claim(folder: _Folder) -> Iterator[None]:
  """Locks a run's folder, so that only code in the `with` block can `hold` it.

  The system releases the lock if the process dies. An already locked folder
  raises a `ValueError`.
  """
  with _locked(folder, fcntl.LOCK_EX) as descriptor:
    new = _Claim(os.path.realpath(folder), descriptor)
    token = _claims.set((*_claims.get(), new))
    try:
      yield
    finally:
      _claims.reset(token)


@contextlib.contextmanager
def inherit(folder: _Folder, descriptor: int) -> Iterator[None]:
  """Lets a `with` block `hold` a folder that the parent process claims.

  `descriptor` is the result of `descriptor` in the parent process, which this
  process has inherited. It is closed at the end.
  """
  token = _claims.set(
      (*_claims.get(), _Claim(os.path.realpath(folder), descriptor))
  )
  try:
    yield
  finally:
    _claims.reset(token)
    os.close(descriptor)  # The parent process still holds the lock.


def descriptor(folder: _Folder) -> int:
  """Returns the open file that holds the lock of a claimed folder.

  A child process that inherits this descriptor can `inherit` the lock. Outside
  of `claim` for the folder, a `ValueError` is raised.
  """
  claimed = _claim_of(folder)
  if claimed is None:
    raise ValueError(f'{folder} is not claimed.')
  return claimed.descriptor


def is_claimed(folder: _Folder) -> bool:
  """Whether the caller is inside of `claim` for a folder."""
  return _claim_of(folder) is not None


def let_others_read(folder: _Folder) -> None:
  """Lets other programs lock a claimed folder for reading.

  The caller will write nothing more into it.
  """
  claimed = _claim_of(folder)
  if claimed is not None:
    with contextlib.suppress(OSError):  # Some file systems have no locks.
      fcntl.flock(claimed.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextlib.contextmanager
def hold(folder: _Folder, *, shared: bool = False) -> Iterator[None]:
  """Locks a run's folder for the `with` block, or uses a claimed folder.

  With `shared`, which is used for reading, others may hold the folder at the
  same time if they set `shared` too. A folder that is already locked, or
  claimed and in use, raises a `ValueError`.
  """
  claimed = _claim_of(folder)
  if claimed is None:
    with _locked(folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
      yield
    return
  if claimed.is_used:
    raise _in_progress(folder)
  claimed.is_used = True
  try:
    yield
  finally:
    claimed.is_used = False


def _claim_of(folder: _Folder) -> Optional[_Claim]:
  path = os.path.realpath(folder)
  return next((c for c in _claims.get() if c.path == path), None)


@contextlib.contextmanager
def _locked(folder: _Folder, operation: int) -> Iterator[int]:
  descriptor = _lock(folder, operation)
  try:
    yield descriptor
  finally:
    os.close(descriptor)  # Releases the lock.


def _lock(folder: _Folder, operation: int) -> int:
  """Locks a folder and returns a descriptor that holds the lock."""
  while True:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
      fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
      # Another program may have replaced the folder meanwhile.
      if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
        return descriptor
    except BlockingIOError:
      os.close(descriptor)
      raise _in_progress(folder) from None
    except FileNotFoundError:
      os.close(descriptor)
      raise
    except OSError:
      return descriptor  # Some network file systems have no locks.
    os.close(descriptor)


def _in_progress(folder: _Folder) -> ValueError:
  return ValueError(
      f'{folder} is the folder of a run that is in progress, or is being read;'
      ' wait for its end, or choose another folder.'
  )
