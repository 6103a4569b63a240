"""Plots of sweeps: heat maps, and a panel of curves for each combination."""

from collections.abc import Mapping, Sequence
import itertools
import math
import pathlib
import statistics
from typing import NamedTuple

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from tff_bn.catalog import datasets
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.results import figures
from tff_bn.programs.results import plots
from tff_bn.programs.results import report
from tff_bn.training import measures

_ATTACK = 'attack'
# More panels can't be read.
_MAX_PANELS = 100
# Characters in a line of a panel's title.
_TITLE_WIDTH = 36
# The columns with curves, and the titles of their vertical axes.
_CURVES = {
    'test_accuracy': 'Accuracy',
    'client_test_accuracy': 'Accuracy',
    'train_loss': 'Loss',
    'test_loss': 'Loss',
}
_MAPS = ('test_accuracy', 'client_test_accuracy')


class Panel(NamedTuple):
  """A panel of a heat map.

  Attributes:
    title: Its title.
    values: The values, shape [rows, columns]; NaN where there is none.
  """

  title: str
  values: np.ndarray


def mean_over_seeds(
    results: Sequence[report.Result],
    names: Sequence[str],
    column: str,
    worst_of: Sequence[str] = (),
) -> dict[tuple[str, ...], float]:
  """Computes the mean of a column over the seeds for each cell.

  Args:
    results: Rows of results.csv.
    names: The names of the labels that tell the cells apart.
    column: The column.
    worst_of: Names of further labels. The value of a cell is the smallest of
      the means that these labels tell apart, as for attacks in ByzFL's
      benchmark (https://byzfl.epfl.ch).

  Returns:
    The values by the cells' labels. Cells without values, and with values that
    are not finite, are NaN.
  """
  means: dict[tuple[str, ...], list[float]] = {}
  for labels, rows in report.by_labels(results, (*names, *worst_of)).items():
    values = [float(row.get(column, math.nan)) for row in rows]
    means.setdefault(labels[: len(names)], []).append(statistics.fmean(values))
  # `min` could miss a NaN.
  return {labels: float(np.min(values)) for labels, values in means.items()}


def heat_map_figure(
    panels: Sequence[Panel],
    *,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    row_title: str,
    column_title: str,
    title: str,
    panels_per_line: int,
    decimals: int = 1,
) -> figure.Figure:
  """Draws heat maps with the same rows and columns, with numbers in the cells.

  Args:
    panels: The heat maps.
    row_labels: The labels of the rows; the first row is at the top.
    column_labels: The labels of the columns.
    row_title: What the rows differ in.
    column_title: What the columns differ in.
    title: The figure's title, which says what the values are.
    panels_per_line: The number of panels side by side.
    decimals: The digits after the point in the cells.

  Returns:
    A figure whose panels have the same colors for the same values.
  """
  num_lines = math.ceil(len(panels) / panels_per_line)
  width = 0.9 + 0.14 * max(map(len, row_labels)) + 0.62 * len(column_labels)
  height = 0.9 + 0.42 * len(row_labels)
  drawing = figures.new_figure(
      width=max(4.5, 1.5 + width * panels_per_line),
      height=max(2.4, 0.8 + height * num_lines),
  )
  grid = drawing.subplots(
      num_lines, panels_per_line, squeeze=False, sharex=True, sharey=True
  )
  finite = np.concatenate([panel.values.ravel() for panel in panels])
  finite = finite[np.isfinite(finite)]
  lowest, highest = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
  for axes, panel in itertools.zip_longest(grid.flat, panels):
    if panel is None:
      axes.set_axis_off()
      continue
    axes.imshow(
        panel.values,
        cmap='viridis',
        aspect='auto',
        interpolation='nearest',
        vmin=lowest,
        vmax=highest,
    )
    _write_numbers(axes, panel.values, (lowest + highest) / 2, decimals)
    axes.set_title(panel.title, fontsize='medium')
    axes.set_xticks(range(len(column_labels)), column_labels)
    axes.set_yticks(range(len(row_labels)), row_labels)
  if max(map(len, column_labels)) > 6:
    for axes in grid.flat:
      axes.tick_params(axis='x', labelrotation=30)
  drawing.supxlabel(column_title, fontsize='medium')
  drawing.supylabel(row_title, fontsize='medium')
  drawing.colorbar(grid.flat[0].images[0], ax=grid)
  figures.add_title(drawing, title)
  return drawing


def _write_numbers(
    axes: mpl_axes.Axes, values: np.ndarray, middle: float, decimals: int
) -> None:
  """Writes each cell's number into it."""
  for (row, column), value in np.ndenumerate(values):
    is_number = np.isfinite(value)
    axes.text(
        column,
        row,
        f'{value:.{decimals}f}' if is_number else '–',
        ha='center',
        va='center',
        fontsize='small',
        # The upper half of the colors is light.
        color='white' if is_number and value < middle else 'black',
    )


def _heat_maps(
    runs: Sequence[report.Run],
    results: Sequence[report.Result],
    average_last: int,
    axes: Sequence[axes_lib.Axis],
    title: str,
) -> dict[str, figure.Figure]:
  """Draws a heat map for each pair of swept axes."""
  has_client_models = report.have_client_models(runs)
  drawings = {}
  for (rows, columns, worst_of), column in itertools.product(
      _pairs(axes), _MAPS
  ):
    others = [a for a in axes if a not in (rows, columns, *worst_of)]
    if _num_cells(others) > _MAX_PANELS or not any(
        column in result for result in results
    ):
      continue
    name = f'heat_map_{rows.name}_{columns.name}'
    if column != 'test_accuracy':
      name += '_clients'
    value_title = (
        f'Accuracy in %, {measures.name(column, has_client_models)}:'
        f' {report.over_rounds(average_last)}, {report.over_seeds(results)}'
    )
    drawings[name] = _heat_map(
        results, rows, columns, others, worst_of, column, value_title, title
    )
  return drawings


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
    results: Sequence[report.Result],
    rows: axes_lib.Axis,
    columns: axes_lib.Axis,
    others: Sequence[axes_lib.Axis],
    worst_of: Sequence[axes_lib.Axis],
    column: str,
    value_title: str,
    title: str,
) -> figure.Figure:
  """Draws the heat map of a pair of axes, with a panel for each other point."""
  # Side by side: the algorithms. In each line: a combination of the others.
  others = sorted(others, key=lambda axis: axis.name == report.ALGORITHM)
  names = [axis.name for axis in (*others, rows, columns)]
  values = mean_over_seeds(
      results, names, column, [axis.name for axis in worst_of]
  )
  row_labels, column_labels = (
      [point.label for point in axis.points] for axis in (rows, columns)
  )
  panels = [
      Panel(
          _describe(cell.labels, others),
          100
          * np.array(
              [
                  [
                      values[(*cell.labels.values(), row, label)]
                      for label in column_labels
                  ]
                  for row in row_labels
              ]
          ),
      )
      for cell in axes_lib.product(others)
  ]
  worst = [
      f', the worst case over {axis.name}='
      + ','.join(point.label for point in axis.points)
      for axis in worst_of
  ]
  return heat_map_figure(
      panels,
      row_labels=list(_shown_labels(rows).values()),
      column_labels=list(_shown_labels(columns).values()),
      row_title=rows.name,
      column_title=columns.name,
      title=''.join([value_title, *worst]) + f'\n{title}' * bool(title),
      panels_per_line=min(len(others[-1].points), 6) if others else 1,
  )


def _curve_panels(
    runs: Sequence[report.Run],
    axes: Sequence[axes_lib.Axis],
    column: str,
    title: str,
) -> figure.Figure:
  """Draws a panel for each combination of swept values, a line per algorithm.

  Args:
    runs: The runs.
    axes: What they differ in.
    column: The column of metrics.csv.
    title: The title.

  Returns:
    A figure. The values of the last swept axis are side by side.
  """
  swept = [axis for axis in axes if axis.name != report.ALGORITHM]
  cells = axes_lib.product(swept)
  num_columns = min(len(swept[-1].points), 8)
  num_lines = math.ceil(len(cells) / num_columns)
  drawing = figures.new_figure(
      width=2.5 + 2.6 * num_columns, height=1.2 + 2.1 * num_lines
  )
  grid = drawing.subplots(
      num_lines, num_columns, sharex=True, sharey=True, squeeze=False
  )
  algorithms = [run.labels.get(report.ALGORITHM, '') for run in runs]
  styles = figures.line_styles(list(dict.fromkeys(algorithms)))
  for panel, cell in itertools.zip_longest(grid.flat, cells):
    if cell is None:
      panel.set_axis_off()
      continue
    panel.set_title(
        figures.wrapped(_describe(cell.labels, swept), _TITLE_WIDTH),
        fontsize='small',
    )
    shown = [run for run in runs if cell.labels.items() <= run.labels.items()]
    groups: dict[str, list[report.Run]] = {}
    for run in shown:
      groups.setdefault(run.labels.get(report.ALGORITHM, ''), []).append(run)
    for name, members in groups.items():
      plots.draw_curve(
          panel,
          members,
          column,
          'round',
          label=name,
          **styles[name],
      )
    figures.tidy(panel)
  # The other panels share its axes.
  first: mpl_axes.Axes = grid.flat[0]
  vertical = _CURVES[column]
  if vertical == 'Accuracy':
    first.set_ylim(0, 1.02)
    first.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1))
  else:
    first.set_yscale('log')
  drawing.supxlabel('Round', fontsize='medium')
  drawing.supylabel(vertical, fontsize='medium')
  if len(styles) > 1:
    figures.add_legend(drawing)
  figures.add_title(
      drawing, title, plots.measured_on(column, runs), plots.band_note(runs)
  )
  return drawing


def save_figures(
    folder: pathlib.Path,
    runs: Sequence[report.Run],
    results: Sequence[report.Result],
    average_last: int,
    axes: Sequence[axes_lib.Axis],
    title: str,
) -> None:
  """Saves the figures of a comparison with sweeps as PNG files.

  Args:
    folder: The folder for the files; it is created if needed.
    runs: The runs.
    results: Their rows of results.csv.
    average_last: The number of evaluated rounds over which these average.
    axes: What they differ in, besides the seed.
    title: The figures' title.
  """
  drawings = _heat_maps(runs, results, average_last, axes, title)
  swept = [axis for axis in axes if axis.name != report.ALGORITHM]
  if _num_cells(swept) <= _MAX_PANELS:
    for column in _CURVES:
      if any(column in row for run in runs for row in run.rows):
        drawings[column] = _curve_panels(runs, axes, column, title)
  figures.save(folder, drawings)
