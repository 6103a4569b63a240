"""Lines that say what long work is doing, on the standard error stream."""

from collections.abc import Iterator
import contextlib
import sys
import time

from absl import logging

# Shorter work needs no line at its end.
_NOTEWORTHY_SECONDS = 1.0
# How often steps are counted.
_STEP_SECONDS = 5.0


def is_shown() -> bool:
  """Whether progress is shown: unless absl logs errors only."""
  return logging.get_verbosity() >= logging.WARNING


def say(line: str) -> None:
  """Prints a line on progress."""
  if is_shown():
    print(line, file=sys.stderr, flush=True)


def counting(number: int, work: str) -> Iterator[int]:
  """Yields 0 to `number` - 1 and, if it takes long, says how far the work is.

  `work` names a step, such as `gamma=0.1: round`.
  """
  said = time.monotonic()
  for step in range(number):
    yield step
    now = time.monotonic()
    if now - said >= _STEP_SECONDS and step + 1 < number:
      say(f'{work} {step + 1} of {number}')
      said = now


@contextlib.contextmanager
def saying(work: str) -> Iterator[None]:
  """Says what a `with` block does and, if it takes long, how long it took."""
  say(f'{work} …')
  start = time.monotonic()
  yield
  seconds = time.monotonic() - start
  if seconds >= _NOTEWORTHY_SECONDS:
    say(f'… took {seconds:.0f} s')
