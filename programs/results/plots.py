"""The charts of a run or a comparison that become PNG files."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from tff_bn.catalog import columns
from tff_bn.catalog import datasets
from tff_bn.catalog import tasks
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.results import charts
from tff_bn.programs.results import curve_points
from tff_bn.programs.results import report
from tff_bn.training import measures

if TYPE_CHECKING:
  from tff_bn.data import federated

_ATTACK = 'attack'
# Pixels of a panel of curves, of small ones, and of a cell of the labels.
_PANEL_WIDTH = 400
_SMALL_PANEL = dict(width=240, height=170)
_CELL_WIDTH = 36
# Longer labels of columns are tilted.
_LABEL_LENGTH = 6
# More panels can't be read.
_MAX_PANELS = 100
_MAX_CELLS_WITH_NUMBERS = 300


def label_distribution(
    data: 'federated.FederatedData', title: str
) -> dict[str, charts.Spec]:
  """Draws the counts of each client's labels."""
  num_clients, num_columns = data.label_distribution().shape
  chart = charts.labels(
      num_clients,
      len(charts.column_names(data)),
      tasks.TASKS[data.task],
      has_numbers=num_clients * num_columns <= _MAX_CELLS_WITH_NUMBERS,
  )
  hidden = ''
  if num_clients > charts.MAX_CLIENTS:
    hidden = f'the first {charts.MAX_CLIENTS} of {num_clients} clients'
  width = min(1200, max(300, _CELL_WIDTH * num_columns))
  values = charts.label_values(data)
  return {
      'label_distribution': charts.titled(
          dict(chart, width=width, data=dict(values=values)),
          width,
          title,
          hidden,
      )
  }


def of_algorithms(
    runs: Sequence[report.Run], title: str
) -> dict[str, charts.Spec]:
  """Draws the curves of a run, or of a comparison of algorithms.

  Curves against communication are for comparisons only: a single algorithm
  sends the same amount in every round, unless it has phases.

  Returns:
    The charts by name, such as `loss` and `accuracy_by_megabytes`, each with a
    panel for every column that a run has.
  """
  groups = curve_points.by_name(runs)
  axes = [charts.ROUND]
  if len(groups) > 1:
    axes += [a for a in charts.COSTS if curve_points.totals(runs, a.name)]
  by_kind: dict[columns.Kind, list[columns.Column]] = {}
  for column in curve_points.columns_of(runs):
    by_kind.setdefault(column.kind, []).append(column)
  values, styles = curve_points.values(groups), charts.styles(groups)
  main = report.main_kind(report.columns_of(runs))
  drawn = {}
  for kind, axis in itertools.product(by_kind, axes):
    if axis == charts.ROUND:
      name = kind.name
    elif kind == main:
      name = f'{kind.name}_by_{axis.name}'
    else:
      continue
    drawn[name] = _side_by_side(
        runs, values, styles, by_kind[kind], axis, title
    )
  return drawn


def _side_by_side(
    runs: Sequence[report.Run],
    values: Sequence[Mapping[str, Any]],
    styles: charts.Styles,
    shown: Sequence[columns.Column],
    axis: charts.Axis,
    title: str,
) -> charts.Spec:
  """Draws columns of one kind against an axis."""
  panels = [
      charts.titled(
          dict(
              charts.curves(runs, column, axis, styles),
              width=_PANEL_WIDTH,
          ),
          _PANEL_WIDTH,
          curve_points.title(column, runs),
      )
      for column in shown
  ]
  chart = dict(
      data=dict(values=values),
      hconcat=panels,
      resolve=dict(scale=dict(x='shared', y='shared')),
  )
  notes = [curve_points.band_note(runs)]
  num_sending = len(curve_points.totals(runs, axis.name))
  if axis != charts.ROUND and num_sending < len(runs):
    notes.append('horizontal line: sends nothing')
  return charts.titled(chart, _PANEL_WIDTH * len(shown), title, *notes)


def of_sweep(
    runs: Sequence[report.Run],
    results: pd.DataFrame,
    average_last: int,
    axes: Sequence[axes_lib.Axis],
    title: str,
) -> dict[str, charts.Spec]:
  """Draws heat maps and curves of a comparison with sweeps.

  Args:
    runs: The runs.
    results: What `report.results` returned for them.
    average_last: The number of evaluated rounds over which it averages.
    axes: What they differ in, besides the seed.
    title: The title.

  Returns:
    The charts by name: `heat_map_ROWS_COLUMNS`, and a panel of curves for each
    combination of swept values under the column's name.
  """
  return {
      **dict(_heat_maps(runs, results, average_last, axes, title)),
      **_curve_panels(runs, axes, title),
  }


def _heat_maps(
    runs: Sequence[report.Run],
    results: pd.DataFrame,
    average_last: int,
    axes: Sequence[axes_lib.Axis],
    title: str,
) -> Iterator[tuple[str, charts.Spec]]:
  """Yields the name and the heat map of each pair of swept axes and column.

  The columns have the main metric, on the whole test set and on the clients'
  own test data.
  """
  shown_columns = report.columns_of(runs)
  main = report.main_kind(shown_columns)
  ends = {
      f'{measures.TEST}{main.name}': '',
      f'{measures.CLIENT_TEST}{main.name}': '_clients',
  }
  for (rows, by, worst_of), column in itertools.product(
      _pairs(axes), columns.averaged(shown_columns)
  ):
    others = [a for a in axes if a not in (rows, by, *worst_of)]
    if (
        column.name not in ends
        or not main.has_direction
        or _num_cells(others) > _MAX_PANELS
        or (results[column.name] == '').all()
    ):
      continue
    measured = measures.name(column.name, report.have_client_models(runs))
    shown = (
        f'{main.heading}{" in %" if main.is_share else ""}, {measured}:'
        f' {report.over_rounds(average_last, runs)},'
        f' {report.over_seeds(results)}'
    )
    for axis in worst_of:
      labels = ','.join(point.label for point in axis.points)
      shown += f', the worst case over {axis.name}={labels}'
    end = ends[column.name]
    yield f'heat_map_{rows.name}_{by.name}{end}', _heat_map(
        results, rows, by, others, worst_of, column, (shown, title)
    )


def _pairs(
    axes: Sequence[axes_lib.Axis],
) -> list[tuple[axes_lib.Axis, axes_lib.Axis, list[axes_lib.Axis]]]:
  """Returns the rows and the columns of heat maps, and the axis of attacks.

  A heat map shows the worst of the attacks. If fewer than two other axes are
  swept, the attacks, or the algorithms, are the rows.
  """
  algorithms = [axis for axis in axes if axis.name == report.ALGORITHM]
  attacks = [axis for axis in axes if axis.name == _ATTACK]
  others = [a for a in axes if a not in (*algorithms, *attacks)]
  if len(others) > 1:
    return [(*pair, attacks) for pair in itertools.combinations(others, 2)]
  pairs = [(*p, attacks) for p in itertools.product(algorithms, others)]
  for pair in itertools.product(attacks, others or algorithms):
    pairs.append((*pair, []))
  return pairs


def _heat_map(
    results: pd.DataFrame,
    rows: axes_lib.Axis,
    by: axes_lib.Axis,
    others: Sequence[axes_lib.Axis],
    worst_of: Sequence[axes_lib.Axis],
    column: columns.Column,
    titles: Sequence[str],
) -> charts.Spec:
  """Draws the heat map of a pair of axes, with a panel for each other point."""
  # Side by side: the algorithms. In each line: a combination of the others.
  others = sorted(others, key=lambda axis: axis.name == report.ALGORITHM)
  names = [axis.name for axis in (*others, rows, by)]
  hidden = [axis.name for axis in worst_of]
  means = report.means(results, [*names, *hidden], [column.name])[column.name]
  kind = column.kind
  groups = means.groupby(level=names, sort=False)
  # As for attacks in ByzFL's benchmark (https://byzfl.epfl.ch), the worst mean.
  worst = groups.agg(
      lambda x: (x.min if kind.higher_is_better else x.max)(skipna=False)
  )
  shown_rows, shown_columns = _shown_labels(rows), _shown_labels(by)
  values: list[dict[str, Any]] = []
  for cell in axes_lib.product(others):
    for row, label in itertools.product(shown_rows, shown_columns):
      mean = worst[(*cell.labels.values(), row, label)]
      values.append(
          dict(
              panel=_describe(cell.labels, others),
              row=shown_rows[row],
              column=shown_columns[label],
              value=kind.factor * mean if math.isfinite(mean) else None,
          )
      )
  num_columns = min(len(others[-1].points), 6) if others else 1
  is_long = max(map(len, shown_columns.values())) > _LABEL_LENGTH
  angle = -30 if is_long else 0
  chart = charts.heat_map(rows.name, by.name, angle, kind)
  chart = charts.panels(chart, values, num_columns)
  width = 150 + num_columns * (50 + 46 * len(by.points))
  return charts.titled(chart, width, *titles)


def _shown_labels(axis: axes_lib.Axis) -> dict[str, str]:
  """Returns what figures show for each label: short names of datasets."""
  labels = [point.label for point in axis.points]
  if axis.name != 'dataset':
    return dict(zip(labels, labels))
  short = [datasets.short_name(label) for label in labels]
  # Folders in different places can have the same name.
  return dict(zip(labels, short if len(set(short)) == len(short) else labels))


def _describe(labels: Mapping[str, str], axes: Sequence[axes_lib.Axis]) -> str:
  """Returns the labels of a panel as its title."""
  shown = {axis.name: _shown_labels(axis) for axis in axes}
  return report.describe(
      {name: shown[name][label] for name, label in labels.items()}
  )


def _num_cells(axes: Sequence[axes_lib.Axis]) -> int:
  """Returns the number of combinations of points."""
  return math.prod(len(axis.points) for axis in axes)


def _curve_panels(
    runs: Sequence[report.Run],
    axes: Sequence[axes_lib.Axis],
    title: str,
) -> dict[str, charts.Spec]:
  """Draws a panel for each combination of swept values, a line per algorithm.

  There is a chart for each column. The values of the last swept axis are side
  by side.
  """
  swept = [axis for axis in axes if axis.name != report.ALGORITHM]
  if _num_cells(swept) > _MAX_PANELS:
    return {}

  def algorithm(run: report.Run) -> str:
    return run.labels.get(report.ALGORITHM, '')

  values = [
      dict(
          value,
          panel=charts.wrapped(
              _describe(cell.labels, swept), _SMALL_PANEL['width'] // 7
          ),
      )
      for cell in axes_lib.product(swept)
      for value in curve_points.values(
          curve_points.by_name(
              [r for r in runs if cell.labels.items() <= r.labels.items()],
              algorithm,
          )
      )
  ]
  styles = charts.styles(curve_points.by_name(runs, algorithm))
  num_columns = min(len(swept[-1].points), 8)
  drawn = {}
  for column in curve_points.columns_of(runs):
    chart = charts.curves(runs, column, charts.ROUND, styles) | _SMALL_PANEL
    drawn[column.name] = charts.titled(
        charts.panels(chart, values, num_columns),
        num_columns * _SMALL_PANEL['width'],
        title,
        curve_points.title(column, runs),
        curve_points.band_note(runs),
    )
  return drawn
