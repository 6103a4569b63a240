"""Python's garbage collector."""

from collections.abc import Iterator
import contextlib
import gc
import threading

_lock = threading.Lock()
_num_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
  """Pauses the search for unreachable objects in a `with` block or function.

  Tracing a deep model makes millions of objects, most of which stay. The
  collector would search all objects of the process again and again, which takes
  a fifth of the time. Threads may pause it at the same time.
  """
  global _num_pauses, _was_enabled
  with _lock:
    if not _num_pauses:
      _was_enabled = gc.isenabled()
      gc.disable()
    _num_pauses += 1
  try:
    yield
  finally:
    with _lock:
      _num_pauses -= 1
      if not _num_pauses and _was_enabled:
        gc.enable()
