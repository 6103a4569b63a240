"""Tables as CSV and as Markdown."""

from collections.abc import Sequence
import statistics
from typing import Any

import numpy as np
from numpy import typing as npt

from tff_bn.common import csv_files


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """Returns the text of a CSV file, with floats rounded to 8 digits."""
  return csv_files.to_csv(columns, rows, digits=8)


def mean_and_deviation(values: npt.ArrayLike, digits: int = 1) -> str:
  """Returns the mean of several seeds and ± the sample standard deviation.

  A single value has no deviation, and no value is a dash.
  """
  numbers = np.asarray(values, float)
  if not numbers.size:
    return '–'
  mean = f'{statistics.fmean(numbers):.{digits}f}'
  if numbers.size == 1:
    return mean
  # The values of a diverged run may be infinite or NaN.
  with np.errstate(invalid='ignore'):
    return f'{mean} ± {np.std(numbers, ddof=1):.{digits}f}'


def markdown(
    cells: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    num_labels: int = 1,
) -> str:
  """Returns a Markdown table with aligned source, numbers to the right.

  Args:
    cells: The rows; the first row has the columns' titles.
    notes: Sentences for a list below the table.
    num_labels: The number of columns, from the left, that hold no numbers.

  Returns:
    The text.
  """
  # The line below the titles needs at least three characters.
  widths = [max(3, *(len(cell) for cell in column)) for column in zip(*cells)]
  rule = ['-' * width for width in widths[:num_labels]]
  rule += ['-' * (width - 1) + ':' for width in widths[num_labels:]]
  lines = [
      '| '
      + ' | '.join(
          cell.ljust(width) if number < num_labels else cell.rjust(width)
          for number, (cell, width) in enumerate(zip(row, widths))
      )
      + ' |'
      for row in (cells[0], rule, *cells[1:])
  ]
  if notes:
    lines += ['', *(f'- {note}' for note in notes), '']
  return '\n'.join(lines)
