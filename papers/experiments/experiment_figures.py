"""An experiment as the paper's figure: curves, lines, bars or heat maps."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib import image as mpl_image
from matplotlib import ticker
import numpy as np

from tff_bn.papers import figures
from tff_bn.papers.experiments import experiment_numbers
from tff_bn.papers.experiments import paper_form
from tff_bn.papers.experiments.experiment_numbers import Number
from tff_bn.papers.experiments.experiment_numbers import Numbers
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import report

_PANEL_WIDTH = 4.0
_PANEL_HEIGHT = 3.4
# Wider panels for long labels, as long as all together are not wider than this.
_WIDEST_PANELS = 8.0
_CHARACTER_WIDTH = 0.1
# Of a cell of a heat map.
_CELL_WIDTH = 0.55
_CELL_HEIGHT = 0.28
_BARS_WIDTH = 0.8
_PAPER = 'the paper'
_PAPER_AT_THE_END = 'the paper, at the end'
_LABELS = Mapping[str, str]
_Styles = Mapping[tuple[str, ...], dict[str, str]]


def draw(
    numbers: Numbers,
    show: paper_form.Show,
    runs: Sequence[report.Run],
    title: str,
    varied: Sequence[axes_lib.Axis],
) -> figure.Figure:
  """Draws an experiment in the paper's form; a table becomes bars.

  Args:
    numbers: The numbers.
    show: The form.
    runs: The runs with their metrics by round, for curves.
    title: The title.
    varied: The experiment's axes, which tell the algorithms of lines and bars:
      an algorithm has the same color in all figures.

  Returns:
    The figure. The paper's numbers are dashed lines or black marks beside ours;
    the paper's heat map is beside ours.
  """
  if show.kind == 'table':
    rows, others = experiment_numbers.rows_and_columns(show)
    show = paper_form.Show(
        'bars',
        x=others or rows,
        lines=rows if others else (),
        value=show.value,
        best=show.best,
    )
  if show.kind == 'heat_map':
    return _heat_maps(numbers, show, title)
  panels = numbers.combinations(show.panels)
  styles = _styles(numbers.combinations(show.lines), show, varied)
  labels_width = 0.0
  if show.kind != 'curves':
    labels_width = _labels_width(_labels(numbers.combinations(show.x)))
  width = max(_PANEL_WIDTH, min(labels_width, _WIDEST_PANELS / len(panels)))
  drawing, grid = _grid(len(panels), len(numbers.columns), width)
  for labels, column_of_axes in zip(panels, grid.T):
    for column, axes in zip(numbers.columns, column_of_axes):
      by_name = dict(zip(show.panels, labels))
      if show.kind == 'curves':
        _curves(axes, numbers, show, styles, runs, by_name, column)
      else:
        _lines_or_bars(axes, numbers, show, styles, by_name, column)
        if labels_width > width:
          _tilt_labels(axes)
      axes.set_title(numbers.describe(show.panels, labels), fontsize='medium')
      axes.set_ylabel(experiment_numbers.title(column))
      figures.tidy(axes)
  figures.add_legend(drawing)
  drawing.suptitle(title, wrap=True)
  return drawing


def _styles(
    lines: Sequence[tuple[str, ...]],
    show: paper_form.Show,
    varied: Sequence[axes_lib.Axis],
) -> _Styles:
  """Returns the colors and dashes of lines by their labels on the axes."""
  algorithms = {
      (axis.name, show.shown_label(axis.name, point.label)): point.flags[
          report.ALGORITHM
      ]
      for axis in varied
      for point in axis.points
      if report.ALGORITHM in point.flags
  }
  styles = line_styles.choose(
      list(map(str, lines)),
      {
          str(line): algorithms[pair]
          for line in lines
          for pair in zip(show.lines, line)
          if pair in algorithms
      },
  )
  if show.kind == 'bars' and len({s['color'] for s in styles.values()}) < len(
      lines
  ):
    # Bars have no dashes, by which the lines of one algorithm differ.
    styles = line_styles.choose(list(map(str, lines)))
  return {line: styles[str(line)] for line in lines}


def _grid(
    num_columns: int,
    num_rows: int,
    width: float = _PANEL_WIDTH,
    height: float = _PANEL_HEIGHT,
) -> tuple[figure.Figure, np.ndarray]:
  """Returns a figure, and its panels of shape `[rows, columns]`."""
  drawing = figures.new_figure(
      width=2.5 + width * num_columns, height=0.6 + height * num_rows
  )
  return drawing, drawing.subplots(num_rows, num_columns, squeeze=False)


def _curves(
    axes: mpl_axes.Axes,
    numbers: Numbers,
    show: paper_form.Show,
    styles: _Styles,
    runs: Sequence[report.Run],
    panel: _LABELS,
    column: str,
) -> None:
  """Draws a column of metrics.csv against rounds or communication."""
  against = show.x[0]
  is_share = experiment_numbers.is_share(column)
  for line in numbers.combinations(show.lines):
    wanted = {**panel, **dict(zip(show.lines, line))}
    chosen = [
        run
        for run in runs
        if all(run.labels[name] == label for name, label in wanted.items())
    ]
    if not chosen:
      continue
    style = styles[line]
    figures.draw_curve(
        axes,
        chosen,
        column,
        against,
        label=numbers.describe(show.lines, line),
        **style,
    )
    paper = numbers.paper.get(numbers.key(wanted, column))
    if paper is not None:
      value = paper.mean / 100 if is_share else paper.mean
      axes.axhline(
          value,
          color=style['color'],
          linestyle=':',
          linewidth=1.0,
          label=_PAPER_AT_THE_END,
      )
  if is_share:
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, symbol=''))
  elif column.endswith('loss'):
    axes.set_yscale('log')
  axes.set_xlabel(experiment_numbers.title(against))


def _lines_or_bars(
    axes: mpl_axes.Axes,
    numbers: Numbers,
    show: paper_form.Show,
    styles: _Styles,
    panel: _LABELS,
    column: str,
) -> None:
  """Draws a line, or bars of one color, for each point of `lines`."""
  points = numbers.combinations(show.x)
  labels = _labels(points)
  positions, is_scale = _positions(labels)
  is_bars = show.kind == 'bars' or len(points) == 1
  lines = numbers.combinations(show.lines)
  for index, line in enumerate(lines):
    keys = [
        numbers.key(
            {
                **panel,
                **dict(zip(show.lines, line)),
                **dict(zip(show.x, point)),
            },
            column,
        )
        for point in points
    ]
    ours = [numbers.ours.get(key) for key in keys]
    paper = [numbers.paper.get(key) for key in keys]
    style: dict[str, Any] = styles[line]
    name = numbers.describe(show.lines, line) or 'here'
    if is_bars:
      width = _BARS_WIDTH / len(lines)
      shift = (index - (len(lines) - 1) / 2) * width
      x = np.arange(len(points)) + shift
      axes.bar(
          x,
          _means(ours),
          width,
          yerr=_deviations(ours),
          label=name,
          color=style['color'],
          alpha=0.8,
      )
      _draw_paper(axes, x, paper, marker='_', color='black', linestyle='none')
    else:
      axes.errorbar(
          positions,
          _means(ours),
          _deviations(ours),
          marker='o',
          label=name,
          **style,
      )
      _draw_paper(
          axes,
          positions,
          paper,
          color=style['color'],
          linestyle=':',
          marker='x',
      )
  if is_bars:
    axes.set_xticks(np.arange(len(points)), labels)
  else:
    if is_scale and min(positions) > 0 and max(positions) > 20 * min(positions):
      axes.set_xscale('log')
    axes.set_xticks(positions, labels)
    axes.xaxis.set_minor_locator(ticker.NullLocator())
  axes.set_xlabel(', '.join(show.x))


def _draw_paper(
    axes: mpl_axes.Axes,
    x: np.ndarray,
    paper: Sequence[Optional[Number]],
    **style: Any,
) -> None:
  if any(number is not None for number in paper):
    axes.plot(
        x, _means(paper), label=_PAPER, markersize=12, linewidth=1.2, **style
    )


def _labels(points: Sequence[tuple[str, ...]]) -> list[str]:
  """Returns the tick labels, with the values of several axes in lines."""
  return [',\n'.join(point) for point in points]


def _labels_width(labels: Sequence[str]) -> float:
  """Returns about how many inches labels need beside each other."""
  longest = max(len(line) for label in labels for line in label.split('\n'))
  return _CHARACTER_WIDTH * longest * len(labels)


def _tilt_labels(axes: mpl_axes.Axes) -> None:
  """Tilts the labels below a plot, each with its end at its tick."""
  for label in axes.get_xticklabels():
    label.set(rotation=40, horizontalalignment='right')


def _positions(labels: Sequence[str]) -> tuple[np.ndarray, bool]:
  """Returns the places of labels on an axis, and whether they are numbers."""
  try:
    return np.array([float(label) for label in labels]), True
  except ValueError:
    return np.arange(len(labels)), False


def _means(numbers: Sequence[Optional[Number]]) -> np.ndarray:
  return np.array([np.nan if n is None else n.mean for n in numbers])


def _deviations(numbers: Sequence[Optional[Number]]) -> np.ndarray:
  return np.array([0 if n is None else n.deviation or 0 for n in numbers])


def _heat_maps(
    numbers: Numbers, show: paper_form.Show, title: str
) -> figure.Figure:
  """Draws a heat map for each panel, and the paper's beside it."""
  sources = {'here': numbers.ours}
  if numbers.paper:
    sources[_PAPER] = numbers.paper
  shown = [
      (panel, column)
      for panel in numbers.combinations(show.panels)
      for column in numbers.columns
  ]
  num_columns = len(numbers.combinations(show.columns))
  num_rows = len(numbers.combinations(show.rows))
  drawing, grid = _grid(
      len(sources),
      len(shown),
      max(_PANEL_WIDTH, _CELL_WIDTH * num_columns),
      max(_PANEL_HEIGHT, _CELL_HEIGHT * num_rows),
  )
  for (panel, column), line in zip(shown, grid):
    by_name = dict(zip(show.panels, panel))
    values = [
        _matrix(numbers, show, source, by_name, column)
        for source in sources.values()
    ]
    limits = np.concatenate([v[np.isfinite(v)] for v in values])
    for name, axes, matrix in zip(sources, line, values):
      image = _draw_matrix(axes, matrix, limits)
      _label_matrix(axes, numbers, show)
      titles = [numbers.describe(show.panels, panel)]
      if numbers.paper:
        titles.append(name)
      axes.set_title(', '.join(filter(None, titles)), fontsize='medium')
    drawing.colorbar(
        image, ax=line.tolist(), label=experiment_numbers.title(column)
    )
  drawing.suptitle(title, wrap=True)
  return drawing


def _matrix(
    numbers: Numbers,
    show: paper_form.Show,
    source: Mapping[experiment_numbers.Key, Number],
    panel: _LABELS,
    column: str,
) -> np.ndarray:
  """Returns the means of a heat map, of shape `[rows, columns]`."""
  return np.array(
      [
          _means(
              [
                  source.get(
                      numbers.key(
                          {
                              **panel,
                              **dict(zip(show.rows, row)),
                              **dict(zip(show.columns, labels)),
                          },
                          column,
                      )
                  )
                  for labels in numbers.combinations(show.columns)
              ]
          )
          for row in numbers.combinations(show.rows)
      ]
  )


def _draw_matrix(
    axes: mpl_axes.Axes, matrix: np.ndarray, limits: np.ndarray
) -> mpl_image.AxesImage:
  """Draws a matrix in the colors between the smallest and largest limit."""
  image = axes.imshow(
      matrix,
      cmap='viridis',
      aspect='auto',
      vmin=limits.min() if limits.size else 0,
      vmax=limits.max() if limits.size else 1,
  )
  figures.write_cells(
      axes,
      matrix,
      lambda value: f'{value:.3g}',
      is_dark=lambda value: value < limits.mean(),
  )
  return image


def _label_matrix(
    axes: mpl_axes.Axes, numbers: Numbers, show: paper_form.Show
) -> None:
  columns = [', '.join(c) for c in numbers.combinations(show.columns)]
  rows = [', '.join(r) for r in numbers.combinations(show.rows)]
  axes.set_xticks(range(len(columns)), columns)
  axes.set_yticks(range(len(rows)), rows)
  if max(map(len, columns), default=0) > 8:
    _tilt_labels(axes)
  axes.set_xlabel(', '.join(show.columns))
  axes.set_ylabel(', '.join(show.rows))
