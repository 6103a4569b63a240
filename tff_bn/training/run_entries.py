"""The files and folders of a run: their names, and that none is a link."""

from collections.abc import Callable, Iterable, Mapping
import os
import pathlib
import stat

from tff_bn.common import files

METRICS = 'metrics.csv'
CLIENT_METRICS = 'client_metrics.csv'
CLIENT_SECONDS = 'client_seconds.csv'
METRICS_HOOK = 'metrics_hook.json'
CLIENT_STATES = 'client_states.sqlite'
LOGDIR = 'logdir'
CHECKPOINTS = 'checkpoints'
# Holds the final model, and the personal models of clients.
MODEL = 'model'
# In the folder of models: those of the best round.
BEST = 'best'

FILES = (
    METRICS,
    CLIENT_METRICS,
    CLIENT_SECONDS,
    METRICS_HOOK,
    CLIENT_STATES,
    # SQLite writes these during a change.
    *(f'{CLIENT_STATES}-{suffix}' for suffix in ('journal', 'shm', 'wal')),
)
FOLDERS = (LOGDIR, CHECKPOINTS, MODEL)

# Name -> which clients' own models are saved as Keras files.
SAVE_CLIENT_MODELS: Mapping[str, str] = {
    'none': 'no client; the arrays of all sampled clients are in clients.npy',
    'sampled': 'each client that was sampled for a round',
    'all': (
        'each client; one that was never sampled has the global model, with its'
        ' own personal phases'
    ),
}
RAW = 'raw'
TRAINING = 'training'
# Name -> which inputs the Keras files of a run take.
EXPORT: Mapping[str, str] = {
    RAW: (
        'samples as they were before the run changed them, such as pixels from'
        ' 0 to 255: the file resizes and scales them as the run did'
    ),
    TRAINING: 'samples that are resized and scaled already',
}


def check(
    run_dir: pathlib.Path,
    file_names: Iterable[str] = FILES,
    folder_names: Iterable[str] = FOLDERS,
) -> None:
  """Checks that the entries of a run are files and folders.

  Writing through a link would change files elsewhere. The run's folder itself
  may be a link, or need not exist, and other files in it are not checked. The
  run's folders are checked with all that they contain.

  Raises:
    ValueError: If an entry is a link, or anything else than it should be.
  """
  for name in file_names:
    for path in (run_dir / name, files.temporary_path(run_dir / name)):
      _check_kind(path, stat.S_ISREG, 'a file')
  for name in folder_names:
    for path in (run_dir / name, files.temporary_path(run_dir / name)):
      check_folder(path)
      for parent, subfolders, names in os.walk(path):
        for inside in (*subfolders, *names):
          _check_kind(pathlib.Path(parent, inside), _is_plain, 'a file')
  _check_names(run_dir / CLIENT_STATES)


def check_folder(path: pathlib.Path) -> None:
  """Raises a `ValueError` if a path is a link or no folder."""
  _check_kind(path, stat.S_ISDIR, 'a folder')


def check_is_no_link(path: pathlib.Path) -> None:
  """Raises a `ValueError` if a path is a link."""
  _check_kind(path, lambda mode: True, '')


def _is_plain(mode: int) -> bool:
  return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _check_kind(
    path: pathlib.Path, is_right: Callable[[int], bool], kind: str
) -> None:
  try:
    mode = path.lstat().st_mode
  except (FileNotFoundError, NotADirectoryError):
    return
  if stat.S_ISLNK(mode):
    raise ValueError(
        f'{path} is a symbolic link to {os.readlink(path)}, but the files and'
        ' folders of a run must not be links. Nothing was changed. Replace the'
        ' link by a copy, or use another folder.'
    )
  if not is_right(mode):
    raise ValueError(
        f'{path} is not {kind}, as it must be in the folder of a run. Nothing'
        ' was changed. Remove it, or use another folder.'
    )


def _check_names(path: pathlib.Path) -> None:
  """Checks that a file that is changed in place has no other name."""
  if path.exists() and path.stat().st_nlink > 1:
    raise ValueError(
        f'{path} is a hard link: it has another name, under which it would'
        ' change, too. Nothing was changed. Replace it by a copy.'
    )
