"""The form in which a paper shows an experiment, and its printed numbers."""

from collections.abc import Mapping
import dataclasses
from typing import NamedTuple, Optional

# Stands for an axis: the clients of a run, each with its own test data.
CLIENT = 'client'
CURVE_X = ('round', 'exchanges', 'megabytes')


class Form(NamedTuple):
  """The keys of a kind of table or figure.

  Attributes:
    required: The keys that must be given.
    optional: The keys that may be given.
  """

  required: tuple[str, ...]
  optional: tuple[str, ...]


KINDS = {
    'table': Form(('rows', 'value'), ('columns', 'worst_over')),
    'curves': Form(('x', 'y', 'lines'), ('panels',)),
    'lines': Form(('x', 'value'), ('lines', 'panels', 'worst_over')),
    'bars': Form(('x', 'value'), ('lines', 'panels', 'worst_over')),
    'heat_map': Form(('rows', 'columns', 'value'), ('panels', 'worst_over')),
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

  @property
  def shown_dimensions(self) -> tuple[str, ...]:
    """The axes that the form shows."""
    x = () if self.kind == 'curves' else self.x
    return (*self.panels, *self.rows, *self.lines, *self.columns, *x)

  @property
  def dimensions(self) -> tuple[str, ...]:
    """The axes that the form shows, and those whose worst value it shows."""
    return (*self.shown_dimensions, *self.worst_over)


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
