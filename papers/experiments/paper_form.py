"""The form in which a paper shows an experiment, and its printed numbers."""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import math
import pathlib
import types
from typing import NamedTuple, Optional

from tff_bn.programs.plan import axes as axes_lib

# Stands for an axis: the clients of a run, each with its own test data.
CLIENT = 'client'
# Stands between the label of a point and what is tried.
_TRY = ': '
CURVE_X = ('round', 'exchanges', 'megabytes')


class Form(NamedTuple):
  """The keys of a kind of table or figure.

  Attributes:
    required: The keys that must be given.
    optional: The keys that may be given.
  """

  required: tuple[str, ...]
  optional: tuple[str, ...]


_COMPARED = 'compared'
_BEST = 'best'
PRINTED = 'printed'
KINDS = {
    'table': Form(
        ('rows', 'value'),
        ('columns', 'worst_over', 'with_mean', _BEST, _COMPARED, PRINTED),
    ),
    'curves': Form(('x', 'y', 'lines'), ('panels', _COMPARED)),
    'lines': Form(
        ('x', 'value'), ('lines', 'panels', 'worst_over', _BEST, _COMPARED)
    ),
    'bars': Form(
        ('x', 'value'),
        ('lines', 'panels', 'worst_over', 'wins_over', _BEST, _COMPARED),
    ),
    'heat_map': Form(
        ('rows', 'columns', 'value'), ('panels', 'worst_over', _BEST, _COMPARED)
    ),
}


@dataclasses.dataclass(frozen=True)
class Show:
  """The form of a table or figure.

  Attributes:
    kind: One of `KINDS`.
    rows: The axes of the rows, of a table or heat map.
    columns: The axes of the columns.
    x: The axis, or for curves the column of metrics.csv, to the right.
    y: The columns of metrics.csv that curves show.
    lines: The axes whose points are lines, or bars beside each other.
    panels: The axes whose points are panels.
    value: The columns of results.csv that are shown.
    worst_over: The axes over whose points the worst value is shown.
    wins_over: The axes whose combinations of points are settings. The share of
      the settings in which a point of `x` has the best value is shown.
    with_mean: The axes with one more point, the mean over the others.
    best: The axes whose points can have several tries, such as `A: 0.1` and `A:
      0.2`. The best of them is shown as `A`.
    compared: The axes whose points the paper compares, if they are not the rows
      of the table.
    printed: Labels by axis for which the paper prints numbers, and the
      experiment has no runs, such as methods that the paper cites.
  """

  kind: str
  rows: tuple[str, ...] = ()
  columns: tuple[str, ...] = ()
  x: tuple[str, ...] = ()
  y: tuple[str, ...] = ()
  lines: tuple[str, ...] = ()
  panels: tuple[str, ...] = ()
  value: tuple[str, ...] = ()
  worst_over: tuple[str, ...] = ()
  wins_over: tuple[str, ...] = ()
  with_mean: tuple[str, ...] = ()
  best: tuple[str, ...] = ()
  compared: tuple[str, ...] = ()
  printed: Mapping[str, tuple[str, ...]] = dataclasses.field(
      default_factory=lambda: types.MappingProxyType({})
  )

  def shown_label(self, axis: str, label: str) -> str:
    """Returns under which label a point of an axis is shown."""
    return label.partition(_TRY)[0] if axis in self.best else label

  def labels(self, axis: axes_lib.Axis) -> tuple[str, ...]:
    """Returns the labels of an axis that are shown."""
    shown = [self.shown_label(axis.name, point.label) for point in axis.points]
    return (*dict.fromkeys(shown), *self.printed.get(axis.name, ()))

  @property
  def shown_dimensions(self) -> tuple[str, ...]:
    """The axes that the form shows."""
    x = () if self.kind == 'curves' else self.x
    return (*self.panels, *self.rows, *self.lines, *self.columns, *x)

  @property
  def dimensions(self) -> tuple[str, ...]:
    """The axes that the form shows, and those over which it takes values."""
    return (*self.shown_dimensions, *self.worst_over, *self.wins_over)


@dataclasses.dataclass(frozen=True)
class PaperNumber:
  """A number that the paper prints.

  Attributes:
    labels: The points' labels by axis.
    column: What it measures, a column of results.csv.
    value: The number, accuracies in %.
    deviation: The printed deviation.
  """

  labels: Mapping[str, str]
  column: str
  value: float
  deviation: Optional[float]


def read_numbers(
    path: pathlib.Path,
    show: Optional[Show],
    axes: Sequence[axes_lib.Axis],
) -> tuple[PaperNumber, ...]:
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
  allowed = {axis.name: show.labels(axis) for axis in axes}
  dimensions = list(show.shown_dimensions)
  if len(values) > 1:
    dimensions.append('column')
    allowed['column'] = values
  numbers: dict[tuple[str, ...], PaperNumber] = {}
  rows = csv.DictReader(io.StringIO(path.read_text(encoding='utf-8')))
  for line, row in enumerate(rows, start=2):
    place = f'{path}: line {line}:'
    _check_row(path, place, row, dimensions, allowed)
    key = tuple(row[name] for name in dimensions)
    if key in numbers:
      raise ValueError(f'{place} {", ".join(key)} is there twice.')
    deviation = row.get('deviation')
    numbers[key] = PaperNumber(
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
