"""The memory of this machine."""

import os


def total_bytes() -> int:
  """Returns the size of the machine's memory."""
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def check_fits(description: str, num_bytes: int) -> None:
  """Checks that data is not larger than the memory of this machine.

  Args:
    description: What the data is, as the beginning of a sentence in the plural.
    num_bytes: The size of the data.

  Raises:
    ValueError: If it is larger.
  """
  available = total_bytes()
  if num_bytes > available:
    # Whole numbers, because a size may be too large for a float.
    raise ValueError(
        f'{description} take {num_bytes // 10**9:,} GB of memory, but this'
        f' machine has {available // 10**9:,} GB.'
    )
