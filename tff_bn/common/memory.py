"""The memory of this machine."""

import os


def total_bytes() -> int:
  """Returns the size of the machine's memory."""
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def check_fits(description: str, num_bytes: int) -> None:
  """Raises a `ValueError` if data is larger than this machine's memory.

  `description` is what the data is, in the plural, such as '10 images'.
  """
  available = total_bytes()
  if num_bytes > available:
    # Whole numbers, because a size may be too large for a float.
    raise ValueError(
        f'{description} take {num_bytes // 10**9:,} GB of memory, but this'
        f' machine has {available // 10**9:,} GB.'
    )
