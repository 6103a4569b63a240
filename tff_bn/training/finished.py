"""Whether a run is finished, without importing TensorFlow."""

from collections.abc import Iterable, Mapping
import pathlib
from typing import Any, Optional

from tff_bn.common import files
from tff_bn.training import manifests
from tff_bn.training import run_entries

# The version of the format of `model/`, see `saved_models`.
MODELS_FORMAT = 3
# The results of which the manifest of the models has the checksums.
_RESULTS = (run_entries.METRICS, run_entries.CLIENT_METRICS)


def is_finished(run_dir: pathlib.Path) -> bool:
  """Whether a folder holds a finished run that was not changed since.

  Args:
    run_dir: The run's folder.

  Returns:
    Whether `train` has written all results and models that are there now.

  Raises:
    OSError: If a file can't be read at present.
  """
  folder = run_dir / run_entries.MODEL
  try:
    manifest = read_models_manifest(folder)
    for name in manifest['files']:
      check_file(folder, manifest, name)
    check_results(run_dir, manifest)
  except ValueError:
    return False
  return True


def saved_settings(run_dir: pathlib.Path) -> Optional[dict[str, str]]:
  """Reads the argument `settings` of `train` with which a run was trained.

  Returns:
    The settings; `None` if the folder has no models, or their manifest is
    damaged or of another version.
  """
  try:
    manifest = read_models_manifest(run_dir / run_entries.MODEL)
  except ValueError:
    return None
  return manifest.get('settings')


def results_checksums(
    run_dir: pathlib.Path, names: Iterable[str] = _RESULTS
) -> dict[str, Optional[str]]:
  """Returns the checksums of a run's results by the files' names.

  The checksum of a file that is not there is `None`.
  """
  found: dict[str, Optional[str]] = {}
  for name in names:
    try:
      found[name] = files.checksum(run_dir / name)
    except FileNotFoundError:
      found[name] = None
  return found


def add_result(run_dir: pathlib.Path, *names: str) -> None:
  """Adds files that were written after the models to a run's results."""
  folder = run_dir / run_entries.MODEL
  manifest = read_models_manifest(folder)
  manifest['results'].update(results_checksums(run_dir, names))
  manifests.write(folder, manifest)


def has_result(run_dir: pathlib.Path, name: str) -> bool:
  """Whether a file is one of the results of a run, see `add_result`."""
  try:
    return name in read_models_manifest(run_dir / run_entries.MODEL)['results']
  except ValueError:
    return False


def check_results(run_dir: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Raises a `DamagedError` if a result of a run was changed or is missing.

  `manifest` is the manifest of the run's models.
  """
  expected = manifest.get('results', {})
  for name, found in results_checksums(run_dir, expected).items():
    if found != expected[name]:
      how = 'is missing' if found is None else 'was changed after the run'
      raise manifests.DamagedError(
          f'{run_dir / name} {how}. The command of the run writes it again.'
      )


def read_models_manifest(folder: pathlib.Path) -> dict[str, Any]:
  """Reads the manifest of the models of a run, in the models' folder.

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
  """Returns the path of a file in the folder of a run's models.

  Raises:
    manifests.DamagedError: If the file is missing, or does not have the
      checksum in the folder's manifest.
    OSError: If the file can't be read at present.
  """
  path = folder / name
  try:
    found = files.checksum(path)
  except FileNotFoundError as error:
    raise manifests.DamagedError(f'{path} is missing.') from error
  if found != manifest['files'].get(name):
    raise manifests.DamagedError(f'{path} was changed after the run.')
  return path
