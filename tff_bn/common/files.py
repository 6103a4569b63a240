"""Atomic and durable writing of files."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
from typing import IO, Any, Union


@contextlib.contextmanager
def naming(path: Union[str, os.PathLike[str]]) -> Iterator[None]:
  """Adds a path to `OSError`s without one, such as those of a full disk.

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
    if error.errno is None:  # h5py raises such errors.
      raise OSError(f'{os.fspath(path)}: {error}') from error
    raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def replace(path: pathlib.Path, content: Union[str, bytes]) -> None:
  """Replaces a file atomically: readers find the old or the new content.

  Args:
    path: The file; its folder must exist.
    content: The new content; text is written as UTF-8.

  Raises:
    OSError: If the file cannot be written; the old file then stays.
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


def sync(file: IO[Any]) -> None:
  """Waits until the content of an open file is on the disk."""
  file.flush()
  os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path) -> None:
  """Waits until the entries of a folder are on the disk."""
  with naming(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
