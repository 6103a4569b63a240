"""Whether a run is finished, without importing TensorFlow."""

import hashlib
import pathlib
from typing import Any, Optional

from tff_bn.training import manifests

# The version of the format of `model/`, see `saved_models`.
MODELS_FORMAT = 2
MODELS = 'model'
_METRICS = 'metrics.csv'


def is_finished(run_dir: pathlib.Path) -> bool:
  """Whether a folder holds a finished run that was not changed since.

  Args:
    run_dir: The run's folder.

  Returns:
    Whether `train` has written all metrics and models that are there now.

  Raises:
    OSError: If a file can't be read at present.
  """
  folder = run_dir / MODELS
  try:
    manifest = read_models_manifest(folder)
    for name in manifest['files']:
      check_file(folder, manifest, name)
  except ValueError:
    return False
  return manifest['metrics'] == metrics_checksum(run_dir)


def metrics_checksum(run_dir: pathlib.Path) -> Optional[str]:
  """Returns the checksum of a run's metrics.csv; None if there is none."""
  try:
    text = (run_dir / _METRICS).read_bytes()
  except FileNotFoundError:
    return None
  return hashlib.sha256(text).hexdigest()


def read_models_manifest(folder: pathlib.Path) -> dict[str, Any]:
  """Reads the manifest of the models of a run.

  Args:
    folder: The folder of the models.

  Returns:
    The manifest.

  Raises:
    manifests.DamagedError: If the manifest is damaged or missing.
    ValueError: If the folder has another format.
    OSError: If the manifest can't be read at present.
  """
  try:
    return manifests.read(folder, MODELS_FORMAT)
  except manifests.DamagedError as error:
    if (folder / manifests.FILE_NAME).exists():
      raise
    raise manifests.DamagedError(
        f'{error} Without it, as in runs of earlier versions of tff_bn, the'
        ' models cannot be read.'
    ) from error
  except ValueError as error:
    raise ValueError(
        f'{error} The command of the run writes its models again.'
    ) from error


def check_file(
    folder: pathlib.Path, manifest: dict[str, Any], name: str
) -> pathlib.Path:
  """Checks a file of the models of a run.

  Args:
    folder: The folder of the models.
    manifest: The folder's manifest.
    name: The name of the file.

  Returns:
    The path of the file, whose checksum is right.

  Raises:
    manifests.DamagedError: If the file is damaged or missing.
    OSError: If the file can't be read at present.
  """
  path = folder / name
  try:
    found = file_checksum(path)
  except FileNotFoundError as error:
    raise manifests.DamagedError(f'{path} is missing.') from error
  if found != manifest['files'].get(name):
    raise manifests.DamagedError(f'{path} was changed after the run.')
  return path


def file_checksum(path: pathlib.Path) -> str:
  """Returns the checksum of a file."""
  # In blocks, because a file of many clients may be larger than the memory.
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
