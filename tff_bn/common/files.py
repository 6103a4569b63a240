"""Files that are never there in part, and survive a loss of power."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
from typing import Union


@contextlib.contextmanager
def naming(path: Union[str, os.PathLike[str]]) -> Iterator[None]:
  """Adds a path to `OSError`s without one, as a full disk raises them.

  Args:
    path: The file or folder that is being read or written.

  Yields:
    Nothing.
  """
  try:
    yield
  except OSError as error:
    if error.filename is not None:
      raise
    if error.errno is None:  # As h5py raises them.
      raise OSError(f'{os.fspath(path)}: {error}') from error
    raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def replace(path: pathlib.Path, content: Union[str, bytes]) -> None:
  """Writes a file; whoever reads it finds the old content or the new one.

  Args:
    path: The file; its folder must exist.
    content: The new content; text is written as UTF-8.

  Raises:
    OSError: If it can't be written; the old file stays then.
  """
  if isinstance(content, str):
    content = content.encode()
  temporary = path.with_name(f'.{path.name}.part')
  with naming(path):
    try:
      with open(temporary, 'wb') as file:
        file.write(content)
        sync(file)
      os.replace(temporary, path)
    except OSError:
      temporary.unlink(missing_ok=True)
      raise
    sync_folder(path.parent)


def sync(file) -> None:
  """Waits until an open file is on the disk."""
  file.flush()
  os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path) -> None:
  """Waits until the names in a folder are on the disk."""
  with naming(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
