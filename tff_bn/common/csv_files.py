"""CSV files."""

from collections.abc import Iterable, Sequence
import csv
import io
from typing import Any, Optional, TextIO


def to_csv(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    digits: Optional[int] = None,
) -> str:
  r"""Returns the text of a CSV file, with lines that end in `\n`.

  A cell `None` is empty. Floats have `digits` significant digits, by default as
  many as are needed to read the same bits.
  """
  text = io.StringIO()
  Writer(text, columns, digits).add(rows)
  return text.getvalue()


class Writer:
  """Writes a CSV file, as in `to_csv`, row by row."""

  def __init__(
      self, file: TextIO, columns: Sequence[str], digits: Optional[int] = None
  ):
    """Writes the columns into a file that does not change line ends."""
    self._writer = csv.writer(file, lineterminator='\n')
    self._digits = digits
    self._writer.writerow(columns)

  def add(self, rows: Iterable[Sequence[Any]]) -> None:
    """Writes rows."""
    if self._digits is not None:
      rows = ([self._to_cell(value) for value in row] for row in rows)
    self._writer.writerows(rows)

  def _to_cell(self, value: Any) -> Any:
    return f'{value:.{self._digits}g}' if isinstance(value, float) else value
