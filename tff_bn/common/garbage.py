"""Python's garbage collector."""

from collections.abc import Iterator
import contextlib
import gc
import threading

# How many new objects start a collection of the youngest objects (Python: 700),
# and how many collections of one generation start one of the next older one
# (Python: 10). Even cyclic garbage then takes only some 10 MB.
_RARE = 100_000, 100, 100

_lock = threading.Lock()
_num_blocks = 0
_usual = gc.get_threshold()


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
  """Makes Python search for unreachable objects rarely, in a `with` block.

  Tracing a deep model makes millions of objects, most of which stay. The
  collector would search all objects of the process again and again, which takes
  a fifth of the time. Several threads may be in such a block. A collector that
  is disabled stays so.
  """
  global _num_blocks, _usual
  with _lock:
    if not _num_blocks:
      _usual = gc.get_threshold()
      gc.set_threshold(*_RARE)
    _num_blocks += 1
  try:
    yield
  finally:
    with _lock:
      _num_blocks -= 1
      if not _num_blocks:
        gc.set_threshold(*_usual)
