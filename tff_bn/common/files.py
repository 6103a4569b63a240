"""Writes files and folders in one step, even if the power fails; checksums."""

from collections.abc import Iterator
import contextlib
import hashlib
import os
import pathlib
import shutil
from typing import Optional, Union


@contextlib.contextmanager
def naming(path: Union[str, os.PathLike[str]]) -> Iterator[None]:
  """Adds a path to `OSError`s without one, which a full disk raises.

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


def temporary_path(path: pathlib.Path) -> pathlib.Path:
  """Returns the path under which `replacing` writes a file or folder."""
  return path.with_name(f'.{path.name}.part')


@contextlib.contextmanager
def replacing(
    path: pathlib.Path, temporary: Optional[pathlib.Path] = None
) -> Iterator[pathlib.Path]:
  """Replaces a file, or creates a folder, at the end of a `with` block.

  Args:
    path: The file, or a folder that does not exist. A reader finds the old
      content until the block ends, and then the new content.
    temporary: The path in the same folder at which the block writes the file or
      folder. Default: `temporary_path(path)`.

  Yields:
    The temporary path.

  Raises:
    OSError: If something can't be written. After this and any other error, the
      old file stays.
  """
  if temporary is None:
    temporary = temporary_path(path)
  with naming(path):
    try:
      _remove(temporary)  # A killed program has left it, or it is a link.
      yield temporary
      for entry in (*temporary.rglob('*'), temporary):
        _sync(entry)
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):
        _remove(temporary)
      raise
  _sync(path.parent)


def replace(path: pathlib.Path, content: Union[str, bytes]) -> None:
  """Writes a file. A reader finds either the old or the new content.

  Args:
    path: The file. Its folder must exist.
    content: The new content. Text is written as UTF-8.

  Raises:
    OSError: If the file can't be written. The old file stays.
  """
  if isinstance(content, str):
    content = content.encode()
  with replacing(path) as temporary:
    temporary.write_bytes(content)


def checksum(path: Union[str, os.PathLike[str]]) -> str:
  """Returns the SHA-256 of a file as 64 hexadecimal digits."""
  # In blocks, because a file may be larger than the memory.
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _remove(path: pathlib.Path) -> None:
  """Removes a file, a folder or a link, if there is one."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def _sync(path: pathlib.Path) -> None:
  """Waits until a file, or the list of a folder's entries, is on the disk."""
  with naming(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
