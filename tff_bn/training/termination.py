"""Ending a program on Ctrl-C or SIGTERM in order, not halfway.

A program that is asked to end, by Ctrl-C, `kill`, a batch system or a
container, raises an exception in its main thread. Code that must not stop
halfway runs inside of `deferred`, and the exception comes at its end.
"""

from collections.abc import Iterator
import contextlib
import signal
import threading
from typing import Any, Optional


class Terminated(KeyboardInterrupt):  # pylint: disable=g-bad-exception-name
  """The program got SIGTERM; handled wherever Ctrl-C is."""


class _State:
  num_deferring = 0
  requested: Optional[type[KeyboardInterrupt]] = None


@contextlib.contextmanager
def deferred() -> Iterator[None]:
  """Defers the end to that of a `with` block; blocks may be nested."""
  _State.num_deferring += 1
  try:
    yield
  finally:
    _State.num_deferring -= 1
  check()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
  """Allows the end for a `with` block inside of one that defers it."""
  num_deferring, _State.num_deferring = _State.num_deferring, 0
  try:
    check()
    yield
  finally:
    _State.num_deferring = num_deferring


def check() -> None:
  """Ends the program if it was asked to, and may end here.

  Raises:
    KeyboardInterrupt: After Ctrl-C.
    Terminated: After SIGTERM.
  """
  # The request stays: Python ignores an exception that a signal raises inside
  # of a weak reference's callback or `__del__`, and then the next check ends
  # the program.
  if _State.requested is not None and not _State.num_deferring:
    raise _State.requested


@contextlib.contextmanager
def on_signals() -> Iterator[None]:
  """Handles Ctrl-C and SIGTERM so for a `with` block of the main thread."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def handle(signal_number: int, frame: Any) -> None:
    del frame
    is_repeated = _State.requested is not None
    _State.requested = (
        Terminated if signal_number == signal.SIGTERM else KeyboardInterrupt
    )
    if is_repeated:  # Whoever asks twice does not want to wait.
      _State.num_deferring = 0
    check()

  previous = {
      number: signal.signal(number, handle)
      for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
    _State.requested = None
    _State.num_deferring = 0
