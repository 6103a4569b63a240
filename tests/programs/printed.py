"""What programs print on the standard error stream."""

_PROGRESS = (
    *('Building the model ', 'Checking ', 'Loading '),
    *('… took ', '[', 'round ', 'The labels are '),
    # TensorFlow's C++ code, before it reads TF_CPP_MIN_LOG_LEVEL.
    *('WARNING: All log messages before absl::InitializeLog()', 'I0000 '),
)


def error(text):
  """Returns the last line. All other lines must report progress."""
  *progress, last = text.splitlines()
  for line in progress:
    assert line.startswith(_PROGRESS), line
  return last
