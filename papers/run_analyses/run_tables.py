"""Tables and figures of the analyses of finished runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from tff_bn.papers import figures
from tff_bn.position_aware import permutation
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import tables

# Draw individual units for at most this many layers, counted from the output.
_NUM_SHOWN = 4
_Result = TypeVar('_Result')


class LayerValue(NamedTuple):
  """A measured value of a layer of a run."""

  run: str
  layer: str
  value: float


def means_markdown(
    titles: Sequence[str],
    points: Iterable[tuple[Sequence[str], str, float]],
    spec: str,
    notes: Sequence[str],
    with_deviation: bool = False,
) -> str:
  """Makes a table of means.

  Args:
    titles: The titles of the first columns.
    points: For each value, the texts of the first columns and the title of the
      value's column. Values with the same texts and title become their mean.
      Rows and columns are in the order of their first values.
    spec: The format specification of a mean.
    notes: Sentences below the table.
    with_deviation: Whether to add standard deviations to the means.

  Returns:
    Markdown.
  """
  values: dict[tuple[str, ...], dict[str, list[float]]] = {}
  columns: dict[str, None] = {}
  for texts, column, value in points:
    values.setdefault(tuple(texts), {}).setdefault(column, []).append(value)
    columns[column] = None
  has_deviation = False
  cells = [[*titles, *columns]]
  for row, by_column in values.items():
    cells.append(list(row))
    for column in columns:
      same = by_column.get(column, [])
      text = f'{np.mean(same):{spec}}' if same else '–'
      if with_deviation and len(same) > 1:
        has_deviation = True
        text += f' ± {np.std(same, ddof=1):{spec}}'
      cells[-1].append(text)
  if has_deviation:
    notes = [*notes, 'Mean ± standard deviation over seeds and clients.']
  return tables.markdown(cells, notes)


def layer_markdown(
    values: Sequence[LayerValue], spec: str, notes: Sequence[str]
) -> str:
  """Makes a table with a row for each layer and a column for each run.

  Args:
    values: The values. Their means and standard deviations are shown.
    spec: The format specification of a number.
    notes: Sentences below the table.

  Returns:
    Markdown.
  """
  points = [((v.layer,), v.run, v.value) for v in values]
  return means_markdown(('Layer',), points, spec, notes, with_deviation=True)


def draw_means(
    axes: mpl_axes.Axes,
    points: Iterable[tuple[float, float]],
    *,
    label: str,
    **style: Any,
) -> None:
  """Draws a line through the mean of y for each x.

  Args:
    axes: The axes to draw on.
    points: Pairs of x and y.
    label: The line's label.
    **style: The line's color and dashes.
  """
  by_x: dict[float, list[float]] = {}
  for x, y in points:
    by_x.setdefault(x, []).append(y)
  axes.plot(
      list(by_x),
      [np.mean(values) for values in by_x.values()],
      marker='o',
      markersize=4,
      label=label,
      **style,
  )


def layer_figure(
    values: Sequence[LayerValue],
    label: str,
    title: str,
    algorithms: Optional[Mapping[str, str]] = None,
) -> figure.Figure:
  """Draws a group of bars for each layer, with one bar for each run.

  Args:
    values: The values. The height of a bar is the mean over seeds and clients,
      its error bar the standard deviation.
    label: The label of the y axis.
    title: The title.
    algorithms: The algorithm of each run, which gives its color.

  Returns:
    The figure.
  """
  names = list(dict.fromkeys(v.run for v in values))
  layers = list(dict.fromkeys(v.layer for v in values))
  drawing = figures.new_figure(
      width=min(16.0, 5.0 + 0.25 * len(layers) * (1 + len(names))), height=4.5
  )
  axes = drawing.subplots()
  width = 0.8 / len(names)
  styles = line_styles.choose(names, algorithms)
  for number, name in enumerate(names):
    by_layer = [
        [v.value for v in values if (v.run, v.layer) == (name, layer)]
        for layer in layers
    ]
    axes.bar(
        np.arange(len(layers)) + (number - (len(names) - 1) / 2) * width,
        [np.mean(same) if same else np.nan for same in by_layer],
        width,
        yerr=[np.std(x, ddof=1) if len(x) > 1 else 0 for x in by_layer]
        if any(len(same) > 1 for same in by_layer)
        else None,
        color=styles[name]['color'],
        error_kw=dict(ecolor='#404040', capsize=2, linewidth=1),
        label=name,
    )
  axes.set_xticks(range(len(layers)), layers, rotation=40, ha='right')
  axes.tick_params(axis='x', labelsize='small')
  axes.set_ylabel(label)
  figures.tidy(axes)
  axes.grid(visible=False, axis='x')
  axes.set_axisbelow(True)
  if len(names) > 1:
    figures.add_legend(drawing)
  has_bars = any(
      count > 1 for count in Counter((v.run, v.layer) for v in values).values()
  )
  figures.add_title(
      drawing,
      title,
      'error bars: ± one standard deviation' if has_bars else '',
  )
  return drawing


def panels(
    num_rows: int, num_columns: int, *, width: float, height: float
) -> tuple[figure.Figure, np.ndarray]:
  """Makes a figure of panels of the given size in inches.

  Returns:
    The figure and its axes, `[num_rows, num_columns]`.
  """
  drawing = figures.new_figure(
      width=0.5 + width * num_columns, height=0.7 + height * num_rows
  )
  return drawing, drawing.subplots(num_rows, num_columns, squeeze=False)


def units_figure(
    results: Mapping[str, Mapping[str, _Result]],
    draw: Callable[[mpl_axes.Axes, _Result], None],
    share: Callable[[_Result], float],
    *,
    x_label: str,
    y_label: str,
    title: str,
    width: float,
    height: float,
) -> figure.Figure:
  """Draws the units of the last few layers of each run.

  Args:
    results: The result of each layer, by run.
    draw: Draws a result.
    share: Computes the share of units that the title of a panel has in
      brackets.
    x_label: The label of the x axes.
    y_label: The label of the y axes, below the run's name.
    title: The title.
    width: The width of a panel in inches.
    height: The height of a panel in inches.

  Returns:
    A figure with a row for each run and a column for each layer.
  """
  shown = {
      run: list(of_run.items())[-_NUM_SHOWN:] for run, of_run in results.items()
  }
  drawing, all_axes = panels(
      len(shown), max(map(len, shown.values())), width=width, height=height
  )
  for (run, of_run), row in zip(shown.items(), all_axes):
    for axes, (layer, result) in zip(row, of_run):
      draw(axes, result)
      axes.set_title(f'{layer} [{share(result):.3f}]', fontsize='small')
      axes.set_xlabel(x_label, fontsize='small')
      axes.tick_params(labelsize='small')
    for axes in row[len(of_run) :]:
      axes.set_axis_off()
    row[0].set_ylabel(f'{run}\n{y_label}'.strip())
  figures.add_title(drawing, title)
  return drawing


def permutations_figure(
    permutations: Mapping[str, Mapping[str, np.ndarray]],
    *,
    x_label: str,
    y_label: str,
    title: str,
) -> figure.Figure:
  """Draws permutation matrices as dots, see `units_figure`.

  The titles of the panels have the shares of units that stay in place.
  """
  return units_figure(
      permutations,
      _draw_permutation,
      permutation.kept_share,
      x_label=x_label,
      y_label=y_label,
      title=title,
      width=2.6,
      height=2.8,
  )


def _draw_permutation(axes: mpl_axes.Axes, indices: np.ndarray) -> None:
  size = indices.size
  axes.scatter(np.arange(size), indices, s=max(1, 300 / size), c='#0072B2')
  axes.set_xlim(-0.5, size - 0.5)
  axes.set_ylim(size - 0.5, -0.5)
  axes.set_aspect('equal')
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(ticker.MaxNLocator(nbins=4, integer=True))
