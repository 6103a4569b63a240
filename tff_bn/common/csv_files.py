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

  A cell `None` is empty. Floats have `digits` significant digits, by default as
  many as are needed to read the same bits.
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
