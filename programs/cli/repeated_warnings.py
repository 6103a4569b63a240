"""Shows a warning about flags once, even if many runs have the same flags.

All other warnings are shown, because they concern a single run.
"""

from collections.abc import Iterator
import contextlib
import logging as python_logging
import re

from absl import logging

# The message begins with the flag, or with the library's argument.
_ABOUT_FLAGS = re.compile('(--)?[a-z_]+=')
# How Python's logging begins the line of a warning of absl.
_LINE_START = 'WARNING:absl:'


class WarningsOnce(python_logging.Filter):
  """Hides warnings about flags that were shown before."""

  def __init__(self) -> None:
    super().__init__()
    self._shown: set[str] = set()

  def filter(self, record: python_logging.LogRecord) -> bool:
    """Returns whether to show a message of this process."""
    if record.levelno != python_logging.WARNING:
      return True
    return self._is_new(record.getMessage())

  def shows(self, line: str) -> bool:
    """Returns whether to show a line that another process has printed."""
    if not line.startswith(_LINE_START):
      return True
    return self._is_new(line.removeprefix(_LINE_START).rstrip('\n'))

  def _is_new(self, message: str) -> bool:
    """Returns whether to show a warning, and remembers it."""
    if not _ABOUT_FLAGS.match(message):
      return True
    if message in self._shown:
      return False
    self._shown.add(message)
    return True

  @contextlib.contextmanager
  def installed(self) -> Iterator[None]:
    """Filters the messages of absl in a `with` block."""
    logger = logging.get_absl_logger()
    logger.addFilter(self)
    try:
      yield
    finally:
      logger.removeFilter(self)
