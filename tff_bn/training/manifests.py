"""Manifests: JSON files with a checksum that reveals changes."""

from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

from tff_bn.common import files

FILE_NAME = 'manifest.json'
_CHECKSUM = 'checksum'


class DamagedError(ValueError):
  """A file is missing or was changed."""


def checksum(value: Any) -> str:
  """Returns a hexadecimal checksum of a value that JSON can express."""
  text = json.dumps(value, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()


def to_text(content: Mapping[str, Any]) -> str:
  """Returns the text of a JSON file with a checksum, for `from_text`."""
  return json.dumps({**content, _CHECKSUM: checksum(content)}, indent=1) + '\n'


def from_text(path: pathlib.Path, text: bytes) -> dict[str, Any]:
  """Returns the content of a JSON file with a checksum.

  Args:
    path: The file, for errors.
    text: Its content.

  Returns:
    The content that was given to `to_text`.

  Raises:
    DamagedError: If the file was changed.
  """
  content, is_intact = _parse(path, text)
  if not is_intact:
    raise DamagedError(f'{path} was changed.')
  return content


def _parse(path: pathlib.Path, text: bytes) -> tuple[dict[str, Any], bool]:
  """Returns the content of a file, and whether its checksum is right."""
  try:
    content = json.loads(text)
    return content, content.pop(_CHECKSUM) == checksum(content)
  # The class of the error depends on the damage.
  except Exception as error:
    raise DamagedError(f'{path} is damaged.') from error


def write(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Writes the manifest of a folder, in one step.

  Args:
    folder: The folder.
    manifest: The content, as JSON can express it. `format` is the version of
      the folder's format.

  Raises:
    OSError: If it can't be written.
  """
  files.replace(folder / FILE_NAME, to_text(manifest))


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
  manifest, is_intact = _parse(path, text)
  if 'format' not in manifest:
    raise DamagedError(f'{path} is damaged.')
  found_format = manifest['format']
  if found_format != known_format:
    raise ValueError(
        f'{folder} has the format {found_format}, but this version of tff_bn'
        f' reads only the format {known_format}.'
    )
  if not is_intact:
    raise DamagedError(f'{path} was changed.')
  return manifest
