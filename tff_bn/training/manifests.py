"""Manifests: JSON files with a checksum that reveals changes."""

from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

FILE_NAME = 'manifest.json'
_CHECKSUM = 'checksum'


class DamagedError(ValueError):
  """A file is missing or was changed."""


def checksum(value: Any) -> str:
  """Returns a hexadecimal checksum of a value that JSON can express."""
  text = json.dumps(value, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()


def write(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Writes the manifest of a folder.

  Args:
    folder: The folder.
    manifest: The content, as JSON can express it. `format` is the version of
      the folder's format.

  Raises:
    OSError: If it can't be written.
  """
  text = json.dumps({**manifest, _CHECKSUM: checksum(manifest)}, indent=1)
  (folder / FILE_NAME).write_text(text + '\n', encoding='utf-8')


def read(folder: pathlib.Path, known_format: int) -> dict[str, Any]:
  """Reads and checks the manifest of a folder.

  Args:
    folder: The folder.
    known_format: The expected version of the folder's format.

  Returns:
    The content that was given to `write`.

  Raises:
    DamagedError: If the manifest is damaged or missing.
    ValueError: If the folder has another format.
    OSError: If the manifest can't be read at present.
  """
  path = folder / FILE_NAME
  try:
    text = path.read_bytes()
  except (FileNotFoundError, NotADirectoryError) as error:
    raise DamagedError(f'{path} is missing.') from error
  try:
    manifest = json.loads(text)
    is_intact = manifest.pop(_CHECKSUM) == checksum(manifest)
    found_format = manifest['format']
  # The class of the error depends on the damage.
  except Exception as error:
    raise DamagedError(f'{path} is damaged.') from error
  if found_format != known_format:
    raise ValueError(
        f'{folder} has the format {found_format}, but this version of tff_bn'
        f' reads only the format {known_format}.'
    )
  if not is_intact:
    raise DamagedError(f'{path} was changed.')
  return manifest
