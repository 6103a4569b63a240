"""The numbers that an experiment shows: means over seeds, and the paper's.

Accuracies and other shares are in %, as in the papers.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
import statistics
from typing import NamedTuple, Optional

from tff_bn.catalog import columns as columns_lib
from tff_bn.catalog import tasks
from tff_bn.papers.experiments import paper_form
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.results import tables

# A page has no room for more columns of numbers.
_MOST_COLUMNS = 8
# The label of the mean over an axis.
_MEAN = 'mean'
# Ends the name of a column whose values became shares of settings.
_WINS = '_wins'
# The labels of a cell in the order of `Show.shown_dimensions`, and the column.
_Labels = tuple[str, ...]
Key = tuple[_Labels, str]


class Measurement(NamedTuple):
  """A number that a run has measured.

  Attributes:
    labels: The run's labels by axis, and the client for its own test data.
    seed: The run's seed.
    column: What is measured, a column of results.csv.
    value: The number, shares from 0 to 1.
  """

  labels: Mapping[str, str]
  seed: int
  column: str
  value: float


@dataclasses.dataclass(frozen=True)
class Number:
  """A mean over seeds, or a number that the paper prints.

  Attributes:
    mean: The mean.
    deviation: The sample standard deviation; None: there is only one number,
      or the paper prints none.
    count: The number of seeds.
  """

  mean: float
  deviation: Optional[float] = None
  count: int = 1

  def text(self, column: str) -> str:
    """Returns the number as a table shows it."""
    if math.isnan(self.mean):
      return '–'
    digits = _digits(column)
    text = f'{self.mean:.{digits}f}'
    if self.deviation is not None:
      text += f' ± {self.deviation:.{digits}f}'
    return text


@dataclasses.dataclass(frozen=True)
class Numbers:
  """All numbers of a table or figure.

  Attributes:
    dimensions: The axes that are shown.
    labels: The labels of each of them, in order.
    columns: The columns of results.csv that are shown.
    ours: The measured numbers.
    paper: The numbers that the paper prints.
  """

  dimensions: tuple[str, ...]
  labels: Mapping[str, tuple[str, ...]]
  columns: tuple[str, ...]
  ours: Mapping[Key, Number]
  paper: Mapping[Key, Number]

  def combinations(self, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns all combinations of labels of some axes."""
    return list(itertools.product(*(self.labels[name] for name in names)))

  def key(self, labels: Mapping[str, str], column: str) -> Key:
    """Returns the key of the number with these labels."""
    return tuple(labels[name] for name in self.dimensions), column

  def describe(self, names: Sequence[str], labels: Sequence[str]) -> str:
    """Returns labels of some axes as one text, numbers with their axis."""
    return ', '.join(
        f'{name} = {label}'
        if all(map(_is_number, self.labels[name]))
        else label
        for name, label in zip(names, labels)
    )


def _is_number(label: str) -> bool:
  try:
    float(label)
  except ValueError:
    return False
  return True


def _kind(column: str) -> Optional[columns_lib.Kind]:
  """Returns the kind of a column of a metric, such as `test_accuracy`."""
  for metric in tasks.METRICS.values():
    if metric.kind is not None and column.endswith(f'_{metric.name}'):
      return metric.kind
  return None


def is_share(column: str) -> bool:
  """Whether a column is shown in %."""
  if column.endswith(_WINS):
    return True
  kind = _kind(column)
  return kind is not None and kind.is_share


def _digits(column: str) -> int:
  return 2 if is_share(column) or column == 'megabytes' else 3


def title(column: str) -> str:
  """Returns a column's name for axes and titles."""
  if column.endswith(_WINS):
    measured = column.removesuffix(_WINS).replace('_', ' ')
    return f'Share of settings with the best {measured}, %'
  kind = _kind(column)
  if kind is None:
    return column.replace('_', ' ').capitalize()
  measured = column.removesuffix(kind.name).replace('_', ' ').capitalize()
  return f'{measured}{kind.word}{kind.unit}'


def collect(
    measurements: Sequence[Measurement],
    show: paper_form.Show,
    axes: Sequence[axes_lib.Axis],
    paper: Sequence[paper_form.PaperNumber],
) -> Numbers:
  """Averages over seeds, and takes the best or worst where `show` says so.

  Args:
    measurements: The measured numbers.
    show: What is shown.
    axes: The experiment's axes.
    paper: The numbers that the paper prints.

  Returns:
    The numbers. Those that the paper prints for points that are not among the
    axes' are left out.
  """
  columns = show.value or show.y
  known = {axis.name: show.labels(axis) for axis in axes}
  known[paper_form.CLIENT] = _clients(measurements or paper)
  for name in show.with_mean:
    measurements = [*measurements, *_means_over(name, measurements)]
    known[name] = (*known[name], _MEAN)
  dimensions = show.shown_dimensions
  numbers = Numbers(
      dimensions, {name: known[name] for name in dimensions}, columns, {}, {}
  )
  # By what the worst is taken over, and what is tried: these stay apart until
  # the seeds are averaged.
  groups: dict[Key, dict[_Labels, dict[_Labels, list[float]]]] = {}
  for row in measurements:
    if row.column in columns:
      shown = {
          name: show.shown_label(name, label)
          for name, label in row.labels.items()
      }
      hidden = tuple(
          row.labels[name] for name in (*show.worst_over, *show.wins_over)
      )
      tried = tuple(row.labels[name] for name in show.best)
      by_hidden = groups.setdefault(numbers.key(shown, row.column), {})
      values = by_hidden.setdefault(hidden, {}).setdefault(tried, [])
      values.append((100 if is_share(row.column) else 1) * row.value)
  if show.wins_over:
    return _wins(numbers, groups, paper)
  ours = {}
  for key, by_hidden in groups.items():
    worst, best = min, max
    if key[1].endswith('loss'):
      worst, best = best, worst
    ours[key] = worst(
        (
            best(_finite(map(_mean, by_tried.values())), key=_by_mean)
            for by_tried in by_hidden.values()
        ),
        key=_by_mean,
    )
  printed = {
      numbers.key(number.labels, number.column): Number(
          number.value, number.deviation
      )
      for number in paper
      if all(number.labels[name] in known[name] for name in dimensions)
  }
  return dataclasses.replace(numbers, ours=ours, paper=printed)


def _wins(
    numbers: Numbers,
    groups: Mapping[Key, Mapping[_Labels, Mapping[_Labels, Sequence[float]]]],
    paper: Sequence[paper_form.PaperNumber],
) -> Numbers:
  """Returns in which share of the settings each point is the best."""
  (column,) = numbers.columns
  best = min if column.endswith('loss') else max
  by_setting: dict[_Labels, dict[Key, float]] = {}
  for key, by_hidden in groups.items():
    for setting, by_tried in by_hidden.items():
      (values,) = by_tried.values()
      number = _mean(values)
      if math.isfinite(number.mean):
        by_setting.setdefault(setting, {})[key] = number.mean
  wins: dict[Key, float] = dict.fromkeys(groups, 0.0)
  for means in by_setting.values():
    winners = [key for key in means if means[key] == best(means.values())]
    for key in winners:  # A tie is divided.
      wins[key] += 1 / len(winners)
  shown = column + _WINS
  return dataclasses.replace(
      numbers,
      columns=(shown,),
      ours={
          (labels, shown): Number(100 * won / max(1, len(by_setting)))
          for (labels, _), won in wins.items()
      },
      paper={
          numbers.key(number.labels, shown): Number(number.value)
          for number in paper
      },
  )


def _clients(
    labelled: Sequence[Measurement] | Sequence[paper_form.PaperNumber],
) -> tuple[str, ...]:
  """Returns the clients that occur, in order."""
  clients = [each.labels.get(paper_form.CLIENT) for each in labelled]
  return tuple(dict.fromkeys(client for client in clients if client))


def _means_over(
    name: str, measurements: Sequence[Measurement]
) -> list[Measurement]:
  """Returns the mean over the points of an axis, for each run."""
  groups: dict[tuple, list[Measurement]] = {}
  for each in measurements:
    others = [label for label in each.labels.items() if label[0] != name]
    groups.setdefault((*others, each.seed, each.column), []).append(each)
  return [
      first._replace(
          labels={**first.labels, name: _MEAN},
          value=statistics.fmean([each.value for each in (first, *more)]),
      )
      for first, *more in groups.values()
  ]


def _finite(tries: Iterable[Number]) -> list[Number]:
  """Returns the tries that have a finite number, or all if none has one."""
  tries = list(tries)
  return [each for each in tries if math.isfinite(each.mean)] or tries


def _by_mean(number: Number) -> float:
  return number.mean


def _mean(values: Sequence[float]) -> Number:
  if not all(map(math.isfinite, values)):
    return Number(math.nan, None, len(values))
  return Number(
      statistics.fmean(values),
      statistics.stdev(values) if len(values) > 1 else None,
      len(values),
  )


def to_csv(numbers: Numbers) -> str:
  """Returns the text of experiment.csv.

  Args:
    numbers: The numbers.

  Returns:
    A row for each number that is measured or printed in the paper.
  """
  rows = []
  for column in numbers.columns:
    for labels in numbers.combinations(numbers.dimensions):
      key = labels, column
      ours, paper = numbers.ours.get(key), numbers.paper.get(key)
      if ours is not None or paper is not None:
        rows.append(
            [
                *labels,
                column,
                None if ours is None else ours.mean,
                None if ours is None else ours.deviation,
                None if ours is None else ours.count,
                None if paper is None else paper.mean,
                None if paper is None else paper.deviation,
            ]
        )
  return tables.csv_text(
      [
          *numbers.dimensions,
          'column',
          'mean',
          'deviation',
          'seeds',
          'paper',
          'paper_deviation',
      ],
      rows,
  )


def to_markdown(numbers: Numbers, show: paper_form.Show) -> str:
  """Returns the numbers as a table.

  Args:
    numbers: The numbers.
    show: What is shown. A figure becomes a table, too: its lines, or else its
      axis to the right, are the rows.

  Returns:
    The table, with our number, and the paper's in parentheses. Rows and columns
    without numbers are left out. A table that would be too wide becomes a table
    for each point of the first axis of its columns.
  """
  row_axes, column_axes = rows_and_columns(show)
  num_columns = len(numbers.combinations(column_axes)) * len(numbers.columns)
  if num_columns <= _MOST_COLUMNS or len(column_axes) < 2:
    return _table(numbers, row_axes, column_axes, {})
  first, *others = column_axes
  parts: list[str] = []
  for label in numbers.labels[first]:
    heading = f'**{numbers.describe([first], [label])}**'
    parts += [heading, _table(numbers, row_axes, others, {first: label})]
  return '\n\n'.join(parts)


def _table(
    numbers: Numbers,
    row_axes: Sequence[str],
    column_axes: Sequence[str],
    fixed: Mapping[str, str],
) -> str:
  """Returns a table of the numbers with the `fixed` labels of other axes."""
  keys = {*numbers.ours, *numbers.paper}

  def has_numbers(names: Sequence[str], labels: Sequence[str]) -> bool:
    wanted = {**fixed, **dict(zip(names, labels))}
    return any(
        all(
            label == wanted.get(name, label)
            for name, label in zip(numbers.dimensions, key[0])
        )
        for key in keys
    )

  columns = [
      (labels, column)
      for labels in numbers.combinations(column_axes)
      if has_numbers(column_axes, labels)
      for column in numbers.columns
  ]
  cells = [
      [
          ', '.join(row_axes),
          *(
              _title(
                  numbers.describe(column_axes, labels),
                  column,
                  len(numbers.columns),
              )
              for labels, column in columns
          ),
      ]
  ]
  for row in numbers.combinations(row_axes):
    if not has_numbers(row_axes, row):
      continue
    texts = []
    for labels, column in columns:
      by_name = {
          **fixed,
          **dict(zip(row_axes, row)),
          **dict(zip(column_axes, labels)),
      }
      texts.append(_cell(numbers, numbers.key(by_name, column)))
    cells.append([', '.join(row), *texts])
  return tables.markdown(cells)


def rows_and_columns(
    show: paper_form.Show,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the axes of the rows and of the columns of a table.

  Args:
    show: What is shown.

  Returns:
    The axes of the rows, and the other ones.
  """
  rows = show.rows or show.lines or show.x
  return rows, tuple(n for n in show.shown_dimensions if n not in rows)


def compared_and_others(
    show: paper_form.Show,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the axes whose points the paper compares, and the other ones."""
  compared = show.compared or rows_and_columns(show)[0]
  return compared, tuple(n for n in show.shown_dimensions if n not in compared)


def _title(labels: str, column: str, num_columns: int) -> str:
  if labels and num_columns == 1:
    return labels
  return ', '.join(filter(None, [labels, title(column)]))


def _cell(numbers: Numbers, key: Key) -> str:
  ours, paper = numbers.ours.get(key), numbers.paper.get(key)
  text = '–' if ours is None else ours.text(key[1])
  return text if paper is None else f'{text} ({paper.text(key[1])})'
