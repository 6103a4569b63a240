"""Tables as CSV and as Markdown."""

from collections.abc import Sequence
from typing import Any

from tff_bn.common import csv_files


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """Returns the text of a CSV file, with floats rounded to 8 digits."""
  return csv_files.to_csv(columns, rows, digits=8)


def markdown(cells: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
  """Returns a Markdown table with aligned source, numbers to the right.

  Args:
    cells: The rows; the first row has the columns' titles.
    notes: Sentences for a list below the table.

  Returns:
    The text.
  """
  # The line below the titles needs at least three characters.
  widths = [max(3, *(len(cell) for cell in column)) for column in zip(*cells)]
  rule = ['-' * widths[0]] + ['-' * (width - 1) + ':' for width in widths[1:]]
  lines = [
      '| '
      + ' | '.join(
          [row[0].ljust(widths[0])]
          + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
      )
      + ' |'
      for row in (cells[0], rule, *cells[1:])
  ]
  if notes:
    lines += ['', *(f'- {note}' for note in notes), '']
  return '\n'.join(lines)
