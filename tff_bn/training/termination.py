"""Ends a program cleanly on Ctrl-C or SIGTERM.

Ctrl-C, `kill`, a batch system or a container asks a program to end by a signal,
which raises an exception in the main thread. Inside of `deferred`, the
exception is raised only at the end of the block.
"""

from collections.abc import Iterator
import contextlib
import signal
import sys
import threading
from typing import Any, Optional


class Terminated(KeyboardInterrupt):
  """The program got SIGTERM. Code that handles Ctrl-C handles it too."""


class _State:
  num_deferring = 0
  requested: Optional[type[KeyboardInterrupt]] = None
  was_raised = False


@contextlib.contextmanager
def deferred() -> Iterator[None]:
  """Defers the end of the program to the end of the outermost `with` block."""
  _State.num_deferring += 1
  try:
    yield
  finally:
    _State.num_deferring -= 1
  check()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
  """Allows the end of the program in a `with` block inside of `deferred`."""
  num_deferring, _State.num_deferring = _State.num_deferring, 0
  try:
    check()
    with _raised_again():
      yield
  finally:
    _State.num_deferring = num_deferring


@contextlib.contextmanager
def _raised_again() -> Iterator[None]:
  """Raises a signal's exception if other code has replaced it by an error.

  TensorFlow's C++ code does that where it calls a Python function.
  """
  try:
    yield
  except Exception:
    if _State.was_raised:
      check()
    raise


def check() -> None:
  """Raises an exception if a signal came, unless the end is deferred.

  Raises:
    KeyboardInterrupt: After Ctrl-C.
    Terminated: After SIGTERM.
  """
  # The request is not cleared, so that the next check raises again: Python
  # ignores exceptions inside of a weak reference's callback or `__del__`, and a
  # library's bare `except:` does, too.
  if _State.requested is not None and not _State.num_deferring:
    _State.was_raised = True
    raise _State.requested


@contextlib.contextmanager
def on_signals() -> Iterator[None]:
  """Handles Ctrl-C and SIGTERM in a `with` block of the main thread."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def handle(signal_number: int, frame: Any) -> None:
    del frame
    is_repeated = _State.requested is not None
    _State.requested = (
        Terminated if signal_number == signal.SIGTERM else KeyboardInterrupt
    )
    if is_repeated:  # The second request does not wait.
      _State.num_deferring = 0
    check()

  def hide_request(unraisable: Any) -> None:
    # Python would print a traceback, although a later check raises again.
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
      previous_hook(unraisable)

  previous_hook, sys.unraisablehook = sys.unraisablehook, hide_request
  previous = {
      number: signal.signal(number, handle)
      for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    with _raised_again():
      yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
    sys.unraisablehook = previous_hook
    _State.requested = None
    _State.was_raised = False
    _State.num_deferring = 0
