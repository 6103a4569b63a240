"""The files with the numbers that papers print."""

from collections.abc import Mapping, Sequence
import csv
import io
import math
import pathlib
from typing import Optional

from tff_bn.papers.experiments import paper_form
from tff_bn.programs.plan import axes as axes_lib


def read(
    path: pathlib.Path,
    show: Optional[paper_form.Show],
    axes: Sequence[axes_lib.Axis],
) -> tuple[paper_form.PaperNumber, ...]:
  """Reads the numbers that a paper prints.

  Args:
    path: The file; it need not exist.
    show: The form of the table or figure.
    axes: The axes of the experiment.

  Returns:
    The numbers; none if there is no file.

  Raises:
    ValueError: If the file does not fit the form and the axes.
  """
  if not path.exists():
    return ()
  if show is None:
    raise ValueError(f'{path}: has no effect, the experiment has no [show].')
  values = show.value or show.y
  allowed = {axis.name: [p.label for p in axis.points] for axis in axes}
  dimensions = list(show.shown_dimensions)
  if len(values) > 1:
    dimensions.append('column')
    allowed['column'] = list(values)
  numbers: dict[tuple[str, ...], paper_form.PaperNumber] = {}
  rows = csv.DictReader(io.StringIO(path.read_text(encoding='utf-8')))
  for line, row in enumerate(rows, start=2):
    place = f'{path}: line {line}:'
    _check_row(path, place, row, dimensions, allowed)
    key = tuple(row[name] for name in dimensions)
    if key in numbers:
      raise ValueError(f'{place} {", ".join(key)} is there twice.')
    deviation = row.get('deviation')
    numbers[key] = paper_form.PaperNumber(
        {name: row[name] for name in show.shown_dimensions},
        row.get('column', values[0]),
        _number(place, row['value']),
        _number(place, deviation) if deviation else None,
    )
  if not numbers:
    raise ValueError(f'{path}: has no numbers.')
  return tuple(numbers.values())


def _check_row(
    path: pathlib.Path,
    place: str,
    row: Mapping[str, str],
    dimensions: Sequence[str],
    allowed: Mapping[str, Sequence[str]],
) -> None:
  """Checks the columns and the labels of a row."""
  columns = {name for name in row if name != 'deviation'}
  if columns != {*dimensions, 'value'}:
    raise ValueError(
        f'{path}: has the columns {", ".join(map(str, row))}, but must have'
        f' {", ".join([*dimensions, "value"])}, and may have deviation.'
    )
  for name in dimensions:
    if name in allowed and row[name] not in allowed[name]:
      raise ValueError(
          f'{place} {name} is {row[name]!r}, but must be one of'
          f' {", ".join(allowed[name])}.'
      )


def _number(place: str, text: str) -> float:
  try:
    value = float(text)
  except (TypeError, ValueError):
    value = math.nan
  if not math.isfinite(value):
    raise ValueError(f'{place} {text!r} is no number.')
  return value
