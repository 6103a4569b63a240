"""Waiting that signals can end.

Python runs the handler of a signal, such as that of Ctrl-C, only in the main
thread. If another thread receives the signal while the main thread waits, the
handler runs after the wait. So the functions here wake up every second.
"""

import concurrent.futures
import contextlib
import queue
from typing import TypeVar

_WAKE_UP_SECONDS = 1.0

_Value = TypeVar('_Value')


def result(future: concurrent.futures.Future[_Value]) -> _Value:
  """Waits for a future; returns its result or raises its exception."""
  while True:
    try:
      return future.result(_WAKE_UP_SECONDS)
    except TimeoutError:
      # The work may have ended just now, or with such an error.
      if future.done():
        return future.result()


def next_of(values: 'queue.SimpleQueue[_Value]') -> _Value:
  """Waits for the next value in a queue."""
  while True:
    with contextlib.suppress(queue.Empty):
      return values.get(timeout=_WAKE_UP_SECONDS)
