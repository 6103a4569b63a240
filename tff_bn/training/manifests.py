"""Manifests: JSON files that notice when they were changed."""

from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

from tff_bn.common import files

FILE_NAME = 'manifest.json'
_CHECKSUM = 'checksum'


class DamagedError(ValueError):
  """A file is missing, or not as it was written."""


def checksum(value: Any) -> str:
  """Returns a number in hexadecimal digits of what JSON can express."""
  text = json.dumps(value, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()


def write(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Writes the manifest of a folder.

  Args:
    folder: The folder.
    manifest: What it holds, as JSON can express it; `format` is the version of
      the folder's format.

  Raises:
    OSError: If it can't be written.
  """
  text = json.dumps({**manifest, _CHECKSUM: checksum(manifest)}, indent=1)
  files.replace(folder / FILE_NAME, text + '\n')


def read(folder: pathlib.Path, known_format: int) -> dict[str, Any]:
  """Reads and checks the manifest of a folder.

  Args:
    folder: The folder.
    known_format: The format that it should have.

  Returns:
    What `write` got.

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
  # What is wrong with damaged text depends on what is damaged.
  except Exception as error:  # pylint: disable=broad-except
    raise DamagedError(f'{path} is damaged.') from error
  if found_format != known_format:
    raise ValueError(
        f'{folder} has the format {found_format}, but this version of tff_bn'
        f' knows the format {known_format} only.'
    )
  if not is_intact:
    raise DamagedError(f'{path} was changed.')
  return manifest
