"""What programs print on the standard error stream."""

_PROGRESS = (
    *('Building the model ', 'Checking ', 'Loading '),
    *('… took ', '[', 'round '),
)


def error(text):
  """Returns the last line. The ones before it must be on progress."""
  *progress, last = text.splitlines()
  for line in progress:
    assert line.startswith(_PROGRESS), line
  return last
