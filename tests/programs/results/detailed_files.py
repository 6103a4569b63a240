"""The files with metrics of each class, label or target, as texts."""

import io

from tff_bn.programs.results import detailed_tables


def texts(task, details):
  """Returns the texts of the files about some models, by the files' names."""
  files = {}
  writer = detailed_tables.Writer(
      task, lambda name: files.setdefault(name, io.StringIO())
  )
  for part in details:
    writer.add(part)
  return {name: file.getvalue() for name, file in files.items()}
