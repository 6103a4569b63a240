"""Hides the messages of TensorFlow's C++ code while TensorFlow is imported.

TensorFlow 2.21 writes some lines of information to the standard error stream,
whatever `TF_CPP_MIN_LOG_LEVEL` is: that oneDNN is on, that there is no GPU.
Only such lines are removed; all others appear at once. A child process filters
them, so that errors appear even if TensorFlow aborts this process.
"""

from collections.abc import Iterator
import contextlib
import importlib.machinery
import os
import subprocess
import sys
from typing import Optional

from tff_bn.imports import import_hooks

# Lines of the severity I, for information; the line before the first one; and
# the second line of one of them.
_PATTERN = (
    '^I[0-9]{4} [0-9:.]+ '
    '|^WARNING: All log messages before absl::InitializeLog\\(\\)'
    '|^To enable the following instructions: '
)
_FILTER = ('grep', '-a', '-v', '-E', '--line-buffered', _PATTERN)
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
  try:
    process = subprocess.Popen(
        _FILTER,
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
  finally:
    _flush()
    os.dup2(unfiltered, 2)
    os.close(unfiltered)
    # grep ends with its input, unless a child process keeps the input open.
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(_END_TIMEOUT_SECONDS)


def _flush() -> None:
  """Flushes Python's buffer of the error stream."""
  if sys.stderr is not None:
    sys.stderr.flush()
