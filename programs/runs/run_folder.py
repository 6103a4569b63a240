"""The folder of a run: its files, its flags, and how far the run is.

A folder with a `flags.txt` holds a run. This file is written first and removed
last, so the flags are known for every part of a run. The training writes
`model/` last: it has the checksums of the results, and the flags. The programs
write `report.html` after everything else.

`check` answers whether a run is new, begun or finished, and raises an error if
a folder holds another run.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import enum
import os
import pathlib
import re
import resource
import shutil

from tff_bn.common import files
from tff_bn.training import finished
from tff_bn.training import folder_lock
from tff_bn.training import run_entries

FLAGS_FILE = 'flags.txt'
METRICS = run_entries.METRICS
CLIENT_METRICS = run_entries.CLIENT_METRICS
CLIENT_SECONDS = run_entries.CLIENT_SECONDS
MODEL = run_entries.MODEL
MODEL_FILE = 'model.keras'
LAST = 'last'
# The rounds whose models a run keeps.
KEPT_ROUNDS = {
    run_entries.BEST: 'the round that --keep_best chose',
    LAST: 'the last one',
}
# Which of the clients' models a run has saved: their arrays, and Keras files.
CLIENTS_ARRAYS = 'clients.npy'
CLIENTS = 'clients'
# Holds the Keras files of clients that were exported after the run.
EXPORTED = 'exported_clients'
# Holds the Keras files of clients to which the model was adapted.
ADAPTED = 'adapted_clients'
PLOTS = 'plots'
# Holds one folder for each run of a comparison.
RUNS = 'runs'
RESULTS_CSV = 'results.csv'
RESULTS_MARKDOWN = 'results.md'
REPORT = 'report.html'
TIMING = 'timing.json'
# The result of an experiment, and the folder of its analyses' folders.
EXPERIMENT_CSV = 'experiment.csv'
EXPERIMENT_MARKDOWN = 'experiment.md'
ANALYSES = 'analyses'
EVALUATION = 'evaluation.csv'
# Metrics of each class, label or target of a run's final models.
CLASS_METRICS = 'class_metrics.csv'
TARGET_METRICS = 'target_metrics.csv'
CONFUSION = 'confusion.csv'
CALIBRATION = 'calibration.csv'
DETAILS = (CLASS_METRICS, TARGET_METRICS, CONFUSION, CALIBRATION)
# Before the names of DETAILS: the same of the last evaluation.
EVALUATED = 'evaluation_'
# Each client's model on each source, of the last evaluation.
SOURCES_CSV = f'{EVALUATED}sources.csv'
SOURCES_MARKDOWN = f'{EVALUATED}sources.md'
PREDICTIONS = 'predictions.csv'
# The tests on clients that took no part in training.
HELD_OUT_CSV = 'held_out.csv'
HELD_OUT_MARKDOWN = 'held_out.md'
NORMALIZATION_ERROR_CSV = 'normalization_error.csv'
NORMALIZATION_ERROR_BY_ROUND_CSV = 'normalization_error_by_round.csv'
NORMALIZATION_ERROR_MARKDOWN = 'normalization_error.md'
# Analyses of runs, each with a NAME.csv and a NAME.md, often in a run's folder,
# and the names of their plots.
RUN_ANALYSES = {
    'permutation': ('permutation',),
    'shuffle_test': ('shuffle_test', 'shuffled_accuracy'),
    'kept_share': ('kept_share',),
    'weight_divergence': ('weight_divergence',),
    'matching': ('matching', 'matching_units'),
    'preference': ('preference', 'preference_units'),
    'fusion': ('fusion',),
    'sources': ('sources',),
}
# How many flags an error names, and how much of their values.
_MAX_NAMED_FLAGS = 4
_MAX_VALUE_LENGTH = 40
# Takes the flags of the run in a folder and the new flags; returns the names of
# flags that may differ if the run is continued.
Grown = Callable[[Mapping[str, str], Mapping[str, str]], Collection[str]]
# Removed by the next program that writes into the folder.
_TEMPORARY = '.temporary'
# The number of files that a program opens besides the claimed folders.
_NUM_OTHER_FILES = 1000
_CHECKPOINT_NAME = re.compile('round_([0-9]+)')
# All files besides flags.txt that the programs write, and their folders.
# Nothing else is ever removed.
_FILES = (
    *run_entries.FILES,
    *(TIMING, HELD_OUT_CSV, HELD_OUT_MARKDOWN, REPORT, EVALUATION),
    *DETAILS,
    *(f'{EVALUATED}{name}' for name in DETAILS),
    *(SOURCES_CSV, SOURCES_MARKDOWN, PREDICTIONS),
    *(RESULTS_CSV, RESULTS_MARKDOWN, EXPERIMENT_CSV, EXPERIMENT_MARKDOWN),
    *(NORMALIZATION_ERROR_CSV, NORMALIZATION_ERROR_BY_ROUND_CSV),
    *(NORMALIZATION_ERROR_MARKDOWN, 'fedbn_toy.csv', 'fedbn_toy.md'),
    *('messages.csv', 'messages.md', 'leakage.csv', 'leakage.md'),
    *('pixel_values.csv', 'pixel_values.md'),
    *(f'{name}.{ending}' for name in RUN_ANALYSES for ending in ('csv', 'md')),
)
_FOLDERS = (*run_entries.FOLDERS, PLOTS, ANALYSES, EXPORTED, ADAPTED)
_ENTRIES = (*_FILES, *_FOLDERS)


class State(enum.StrEnum):
  """How far a run is."""

  NEW = 'new'
  BEGUN = 'begun'
  FINISHED = 'finished'


def read_flags(folder: pathlib.Path) -> dict[str, str]:
  """Reads the flags of the run that a folder holds.

  Returns:
    The flags' texts by name. The text of a flag that is given several times has
    a line for each.

  Raises:
    ValueError: If the folder holds no run, its flags can't be read, or they are
      not the flags with which its models were trained.
  """
  flags = _parse_flags(folder)
  trained = finished.saved_settings(folder)
  if trained is not None:
    differences = describe_differences(trained, flags)
    if differences:
      raise ValueError(
          f'{folder / FLAGS_FILE} was changed after the run: {differences}. Put'
          ' the file back, or replace the run by its command with --overwrite.'
      )
  return flags


def models_folder(
    folder: pathlib.Path, which: str | None = None
) -> pathlib.Path:
  """Returns the folder of a round's models in the folder of a run.

  Args:
    folder: The run's folder.
    which: A key of `KEPT_ROUNDS`. Default: the round of which the results of
      the run are, the best one if it is kept.

  Raises:
    ValueError: If the best round is asked for, but is not kept.
  """
  best = folder / MODEL / run_entries.BEST
  if which == run_entries.BEST and not best.exists():
    raise ValueError(
        f'--kept_round={which} is impossible: the run in {folder} keeps no best'
        ' round, because it was trained without --keep_best.'
    )
  return best if which != LAST and best.exists() else folder / MODEL


def check_flags(folder: pathlib.Path) -> None:
  """Checks that the flags of a run were not changed, if it has models.

  Raises:
    ValueError: See `read_flags`.
  """
  if finished.saved_settings(folder) is not None:
    read_flags(folder)


def _parse_flags(folder: pathlib.Path) -> dict[str, str]:
  path = folder / FLAGS_FILE
  try:
    content = path.read_text(encoding='utf-8')
  except (FileNotFoundError, NotADirectoryError) as error:
    raise ValueError(
        f'{folder} holds no run: it has no {FLAGS_FILE}.'
    ) from error
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is damaged: it is not a text file.') from error
  if not content.endswith('\n'):
    raise ValueError(f'{path} is damaged: its end is missing.')
  flags: dict[str, str] = {}
  for line in content.split('\n'):
    if not line or line.startswith('#'):
      continue
    name, equals, text = line.partition('=')
    if not name.startswith('--') or not equals:
      raise ValueError(f'{path} is damaged: {line!r} is not a flag.')
    name = name.removeprefix('--')
    flags[name] = f'{flags[name]}\n{text}' if name in flags else text
  return flags


def saved_round(folder: pathlib.Path) -> int:
  """Returns the round of the last checkpoint; 0 if there is none."""
  try:
    names = os.listdir(folder / run_entries.CHECKPOINTS)
  except OSError:
    return 0
  matches = filter(None, map(_CHECKPOINT_NAME.fullmatch, names))
  return max((int(match[1]) for match in matches), default=0)


def allow_claims(number: int) -> None:
  """Raises the limit of open files: each locked folder needs one."""
  limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
  needed = number + _NUM_OTHER_FILES
  if limit < needed <= highest:
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, highest))


def is_complete(folder: pathlib.Path, flags: Mapping[str, str]) -> bool:
  """Whether a folder holds a finished run that was not changed since.

  The run must have these flags, all its metrics and models must be there, also
  the metrics of each class or target, and the clients that it holds out must be
  tested. An OSError says that a file can't be read at present.
  """
  return (
      (folder / FLAGS_FILE).exists()
      and read_flags(folder) == flags == finished.saved_settings(folder)
      and finished.is_finished(folder)
      and any(
          finished.has_result(folder, name)
          for name in (CLASS_METRICS, TARGET_METRICS)
      )
      and (
          'held_out_clients' not in flags
          or finished.has_result(folder, HELD_OUT_CSV)
      )
  )


@contextlib.contextmanager
def created(folder: pathlib.Path) -> Iterator[None]:
  """Creates the folder that `--output_dir` names, for a `with` block.

  If the new folder is empty at the end, it is removed.

  Raises:
    ValueError: If the folder can't be created or written.
  """
  missing = []
  existing = folder.absolute()
  while not os.path.lexists(existing):
    missing.append(existing)
    existing = existing.parent
  if not existing.is_dir():
    raise ValueError(
        f'--output_dir={folder} is impossible: {existing} is not a folder.'
    )
  if not os.access(existing, os.W_OK | os.X_OK):
    raise ValueError(
        f'--output_dir={folder} is impossible: {existing} is not writable.'
    )
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
        f'--output_dir={folder} cannot be created: {error.strerror}.'
    ) from error
  try:
    yield
  finally:
    for path in missing:
      with contextlib.suppress(OSError):  # It is not empty, or gone.
        path.rmdir()


@contextlib.contextmanager
def claim(folder: pathlib.Path) -> Iterator[None]:
  """Creates a folder as `created` does, and holds its lock for the block.

  Raises:
    ValueError: If the folder can't be created or written, or a run is in
      progress there.
  """
  with created(folder), folder_lock.claim(folder):
    yield


@contextlib.contextmanager
def temporary_files_in(folder: pathlib.Path) -> Iterator[None]:
  """Keeps this process's temporary files in a claimed folder for a block.

  TensorFlow writes some, which would stay in the system's folder if the program
  is killed. In a run's folder, the next program that writes there removes them.
  """
  import tempfile  # Imported late: programs import this module for --help.

  path = folder / _TEMPORARY
  _remove_entry(path)
  path.mkdir()
  # Child processes read the variable.
  before = tempfile.tempdir, os.environ.get('TMPDIR')
  tempfile.tempdir = os.environ['TMPDIR'] = os.fspath(path.absolute())
  try:
    yield
  finally:
    tempfile.tempdir = before[0]
    if before[1] is None:
      del os.environ['TMPDIR']
    else:
      os.environ['TMPDIR'] = before[1]
    shutil.rmtree(path, ignore_errors=True)


def grown_rounds(
    previous: Mapping[str, str], flags: Mapping[str, str]
) -> Collection[str]:
  """Returns `rounds` if a run is to be continued for more rounds."""
  before, after = previous.get('rounds', ''), flags.get('rounds', '')
  if before.isdecimal() and after.isdecimal() and int(before) <= int(after):
    return ('rounds',)
  return ()


def check(
    folder: pathlib.Path,
    flags: Mapping[str, str],
    *,
    overwrite: bool,
    grown: Grown = grown_rounds,
) -> State:
  """Checks that a run with these flags may be written into a folder.

  Writes nothing. If the caller writes into the folder, it has claimed it.

  Returns:
    How far the run is. With `overwrite`, it is new.

  Raises:
    ValueError: If the folder holds files with the programs' names but no run,
      or a run with other flags that may not be removed.
    OSError: If a file can't be read at present.
  """
  if overwrite:  # Other links are removed, and what they point to is kept.
    _check_runs(folder)
  else:
    check_entries(folder)
  if not os.path.lexists(folder / FLAGS_FILE):
    strangers = [
        name for name in (*_ENTRIES, RUNS) if os.path.lexists(folder / name)
    ]
    if strangers:
      raise ValueError(
          f'--output_dir={folder} holds {", ".join(strangers)} but no'
          f' {FLAGS_FILE}, so it is not the folder of a run and nothing in it'
          ' is touched. Choose another folder.'
      )
    return State.NEW
  if overwrite:
    return State.NEW
  previous = read_flags(folder)
  differences = describe_differences(previous, flags, grown)
  if differences:
    raise ValueError(
        f'--output_dir={folder} holds a run with other flags: {differences}.'
        ' Choose another --output_dir, or replace that run with --overwrite.'
    )
  return State.FINISHED if is_complete(folder, flags) else State.BEGUN


def check_entries(folder: pathlib.Path) -> None:
  """Raises a `ValueError` if an entry of a run, or a comparison, is a link.

  The folder itself may be a link, and need not exist.
  """
  run_entries.check(folder, (FLAGS_FILE, *_FILES), _FOLDERS)
  _check_runs(folder)


def _check_runs(folder: pathlib.Path) -> None:
  """Raises a `ValueError` if a run of a comparison is a link."""
  run_entries.check_folder(folder / RUNS)
  if (folder / RUNS).is_dir():
    for run in (folder / RUNS).iterdir():
      run_entries.check_is_no_link(run)


def describe_differences(
    previous: Mapping[str, str],
    flags: Mapping[str, str],
    grown: Grown = grown_rounds,
) -> str:
  """Describes the flags that keep a run from being continued.

  Returns some of the flags with both values; empty if the run can be continued.
  """
  may_differ = grown(previous, flags)
  names = [
      name
      for name in dict.fromkeys((*flags, *previous))
      if previous.get(name) != flags.get(name) and name not in may_differ
  ]
  # Flags with other values come first: missing flags often follow from them.
  names.sort(key=lambda name: not (name in previous and name in flags))
  shown = [
      f'--{name} ({_was(previous.get(name))}, now {_was(flags.get(name))})'
      for name in names[:_MAX_NAMED_FLAGS]
  ]
  if len(names) > _MAX_NAMED_FLAGS:
    shown.append(f'and {len(names) - _MAX_NAMED_FLAGS} more')
  return ', '.join(shown)


def _was(text: str | None) -> str:
  if text is None:
    return 'not set'
  # A quote tells FLAG=VALUE apart from a flag of the program.
  value = ' '.join(
      f"'{line}'" if '=' in line else line for line in text.split('\n')
  )
  if len(value) > _MAX_VALUE_LENGTH:
    return f'{value[:_MAX_VALUE_LENGTH]}…'
  return value


def begin(
    folder: pathlib.Path,
    program: str,
    flags: Mapping[str, str],
    *,
    overwrite: bool,
) -> None:
  """Writes the flags of a run into its claimed folder, after `check`.

  The first line names the program. With `overwrite`, a run that the folder
  holds is removed. If the run has grown, it is no longer finished; the training
  removes its models when the next round begins.
  """
  if overwrite:
    remove(folder)
  path = folder / FLAGS_FILE
  text = f'# {program} --flagfile={FLAGS_FILE} --output_dir=...\n' + ''.join(
      f'--{name}={line}\n'
      for name, lines in flags.items()
      for line in lines.split('\n')
  )
  if path.exists():
    if read_flags(folder) == flags:
      return
    if finished.saved_settings(folder) is None:
      _remove_entry(folder / MODEL)  # Its rounds are not known.
  files.replace(path, text)


def undo_growth(folder: pathlib.Path) -> None:
  """Marks a run as finished again if it could not get more rounds.

  If its models are there, no later round has begun.
  """
  trained = finished.saved_settings(folder)
  if trained is None:
    return
  flags = _parse_flags(folder)
  if trained != flags:
    path = folder / FLAGS_FILE
    line = '--rounds={}\n'
    text = path.read_text(encoding='utf-8')
    files.replace(
        path,
        text.replace(
            line.format(flags['rounds']), line.format(trained['rounds'])
        ),
    )


def remove(folder: pathlib.Path) -> None:
  """Removes the run that a claimed folder holds, and nothing else.

  Raises:
    ValueError: If a run of the comparison is in progress; then nothing is
      removed.
  """
  if not (folder / FLAGS_FILE).exists():
    return
  runs = folder / RUNS
  if runs.is_dir():
    subfolders = [run for run in runs.iterdir() if run.is_dir()]
    with contextlib.ExitStack() as stack:
      others = [run for run in subfolders if not folder_lock.is_claimed(run)]
      for run in others:
        stack.enter_context(folder_lock.hold(run))
      for run in subfolders:
        remove(run)
      for run in others:
        _remove_if_empty(run)
    _remove_if_empty(runs)
  for name in _ENTRIES:
    _remove_entry(folder / name)
    # The temporary file of a killed program.
    _remove_entry(files.temporary_path(folder / name))
  (folder / FLAGS_FILE).unlink()


def _remove_entry(path: pathlib.Path) -> None:
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def _remove_if_empty(folder: pathlib.Path) -> None:
  if folder.is_dir() and not any(folder.iterdir()):
    folder.rmdir()
