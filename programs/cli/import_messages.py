"""Hides the messages of TensorFlow's C++ code while TensorFlow is imported.

TensorFlow 2.21 writes some lines of information to the standard error stream,
whatever `TF_CPP_MIN_LOG_LEVEL` is: that oneDNN is on, that there is no GPU.
It reports as errors that CUDA finds no GPU and that parts of CUDA are known
already. Only such lines are removed; all others appear at once. A child process
filters them, so that errors appear even if TensorFlow aborts this process.

If there is no GPU, TensorFlow looks for GPUs at once, while its messages are
filtered. It would report an error at the first operation otherwise.
"""

from collections.abc import Iterator
import contextlib
import glob
import importlib.machinery
import os
import subprocess
import sys
from typing import Optional

from tff_bn.imports import import_hooks

# How a line of the log begins, behind the letter of its severity: the date, the
# time and the thread.
_START = '[0-9]{4} [0-9:.]+ +[0-9]+ '
# Lines of the severity I, for information; the line before the first one; the
# second line of one of them; and what is no error.
_PATTERNS = (
    f'^I{_START}',
    '^WARNING: All log messages before absl::InitializeLog\\(\\)',
    '^To enable the following instructions: ',
    f'^[EW]{_START}.*([Uu]nable to register cu[A-Z]+ factory'
    '|computation placer already registered|Could not find TensorRT)',
)
# Not on a machine with a GPU, where it is an error.
_NO_GPU = f'^[EW]{_START}.*(cuInit|Could not find cuda drivers)'
_GPU_DEVICES = '/dev/nvidia[0-9]*'
_END_TIMEOUT_SECONDS = 5.0


def hide() -> None:
  """Filters the messages of the next import of TensorFlow, the first one."""
  if 'tensorflow' not in sys.modules and not any(
      isinstance(finder, _TensorFlowFinder) for finder in sys.meta_path
  ):
    sys.meta_path.insert(0, _TensorFlowFinder())


class _TensorFlowFinder:
  """A finder, as `sys.meta_path` has them, for TensorFlow only."""

  def find_spec(
      self, name: str, path: object, target: object = None
  ) -> Optional[importlib.machinery.ModuleSpec]:
    """See `importlib.abc.MetaPathFinder`."""
    del path, target
    if name != 'tensorflow':
      return None
    return import_hooks.find_within(name, _filtered_standard_error)


@contextlib.contextmanager
def _filtered_standard_error() -> Iterator[None]:
  """Removes the messages from the standard error stream, for all code."""
  try:
    unfiltered = os.dup(2)
  except OSError:  # It is closed.
    yield
    return
  has_gpu = _has_gpu()
  patterns = _PATTERNS if has_gpu else (*_PATTERNS, _NO_GPU)
  command = ('grep', '-a', '-v', '-E', '--line-buffered', '|'.join(patterns))
  try:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=unfiltered,
        stderr=subprocess.DEVNULL,
        # Ctrl-C must not end it before it has passed on everything.
        start_new_session=True,
    )
  except OSError:  # There is no grep.
    os.close(unfiltered)
    yield
    return
  assert process.stdin is not None  # It is a pipe.
  _flush()
  os.dup2(process.stdin.fileno(), 2)
  process.stdin.close()
  try:
    yield
    if not has_gpu:
      _look_for_gpus()
  finally:
    _flush()
    os.dup2(unfiltered, 2)
    os.close(unfiltered)
    # grep ends with its input, unless a child process keeps the input open.
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(_END_TIMEOUT_SECONDS)


def _has_gpu() -> bool:
  """Whether this machine has an NVIDIA GPU, without importing TensorFlow."""
  return bool(glob.glob(_GPU_DEVICES))


def _look_for_gpus() -> None:
  """Makes TensorFlow, which is imported, look for GPUs."""
  config = getattr(sys.modules['tensorflow'], 'config', None)
  if config is not None:
    config.list_physical_devices('GPU')


def _flush() -> None:
  """Flushes Python's buffer of the error stream."""
  if sys.stderr is not None:
    sys.stderr.flush()
