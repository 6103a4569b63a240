"""CSV files."""

from collections.abc import Iterable, Sequence
import csv
import io
from typing import Any, Optional


def to_csv(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    digits: Optional[int] = None,
) -> str:
  r"""Returns the text of a CSV file, with lines that end in `\n`.

  Args:
    columns: The names of the columns, for the first line.
    rows: The cells of each row; `None` gives an empty cell.
    digits: The number of significant digits of floats. Default: as many as are
      needed to read the same bits.

  Returns:
    The text.
  """

  def to_cell(value: Any) -> Any:
    if digits is not None and isinstance(value, float):
      return f'{value:.{digits}g}'
    return value

  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(columns)
  writer.writerows([to_cell(value) for value in row] for row in rows)
  return text.getvalue()
