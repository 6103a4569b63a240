"""Figures of Matplotlib: their axes, titles, curves and files."""

from collections.abc import Callable, Mapping, Sequence
import math
import pathlib
from typing import Any

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib.backends import backend_agg
import numpy as np

from tff_bn.common import files
from tff_bn.programs.results import charts
from tff_bn.programs.results import curve_points
from tff_bn.programs.results import report

_DPI = 150
# Inches of a character of a title.
_CHARACTER_WIDTH = 0.1
# Of the width of a figure that a title takes.
_LARGEST_SHARE = 0.97
_SMALLEST_FONT = 1.0
_FONT_STEP = 0.95


def new_figure(width: float, height: float) -> figure.Figure:
  """Creates a figure that needs neither pyplot's state nor a display.

  Args:
    width: The width in inches.
    height: The height in inches.

  Returns:
    The figure.
  """
  drawing = figure.Figure(
      figsize=(width, height), dpi=_DPI, layout='constrained'
  )
  backend_agg.FigureCanvasAgg(drawing)
  return drawing


def tidy(axes: mpl_axes.Axes) -> None:
  """Adds a light grid and removes the frame at the top and the right."""
  axes.grid(alpha=0.3)
  axes.spines[['top', 'right']].set_visible(False)


def write_cells(
    axes: mpl_axes.Axes,
    matrix: np.ndarray,
    text: Callable[[float], str],
    is_dark: Callable[[float], bool],
    **style: Any,
) -> None:
  """Writes the finite values of a heat map into its cells.

  Args:
    axes: The axes of the heat map.
    matrix: Its values.
    text: Returns the text of a value.
    is_dark: Whether the color of a value is dark, so that its text is white.
    **style: Further arguments of the texts.
  """
  for (row, column), value in np.ndenumerate(matrix):
    if np.isfinite(value):
      axes.text(
          column,
          row,
          text(value),
          ha='center',
          va='center',
          color='white' if is_dark(value) else 'black',
          **style,
      )


def add_legend(drawing: figure.Figure) -> None:
  """Adds one legend for all axes, outside of them."""
  handles: dict[Any, Any] = {}
  for axes in drawing.axes:
    lines, labels = axes.get_legend_handles_labels()
    handles.update(zip(labels, lines))
  drawing.legend(
      handles.values(),
      handles.keys(),
      loc='outside right center',
      frameon=False,
  )


def draw_curve(
    axes: mpl_axes.Axes,
    runs: Sequence[report.Run],
    column: str,
    against: str,
    label: str,
    **style: Any,
) -> None:
  """Draws a line for the mean of runs, and a band of one standard deviation.

  Args:
    axes: Where to draw.
    runs: Runs that differ only in the seed.
    column: The column of metrics.csv.
    against: The column of the horizontal axis.
    label: The name in the legend.
    **style: The line's style.
  """
  rows = [row for row in curve_points.values({label: runs}) if column in row]
  mean = np.array([row[column] for row in rows])
  deviation = np.array([row[curve_points.deviation_of(column)] for row in rows])
  x = np.array([row.get(against, math.nan) for row in rows])
  if against != curve_points.ROUND and x.size and not x.any():
    label = f'{label} (sends nothing)'
    axes.axhline(mean[-1], linewidth=1.8, label=label, **style)
  elif np.isfinite(x).any():
    marker = 'o' if x.size == 1 else None
    axes.plot(x, mean, linewidth=1.8, marker=marker, label=label, **style)
    band = dict(color=style['color'], alpha=0.18, linewidth=0)
    axes.fill_between(x, mean - deviation, mean + deviation, **band)


def add_title(drawing: figure.Figure, *lines: str) -> None:
  """Adds a title whose lines are broken where the figure ends.

  Words are not broken: if one is wider than the figure, the title is smaller.

  Args:
    drawing: The figure, with its final width.
    *lines: The lines of the title; empty ones are left out.
  """
  width = max(20, int(drawing.get_figwidth() / _CHARACTER_WIDTH))
  text = '\n'.join(
      charts.wrapped(part, width)
      for line in lines
      for part in line.splitlines()
  )
  title = drawing.suptitle(
      text,
      fontsize='large' if drawing.get_figwidth() > 6 else 'medium',
      # Names of folders may have dollar signs, but they are no formulas.
      parse_math=False,
  )
  most = _LARGEST_SHARE * drawing.bbox.width
  # The widths of characters are whole pixels, so that one step may not do.
  size = float(title.get_fontsize())
  while title.get_window_extent().width > most and size > _SMALLEST_FONT:
    size *= _FONT_STEP
    title.set_fontsize(size)


def save(folder: pathlib.Path, drawings: Mapping[str, figure.Figure]) -> None:
  """Saves figures as PNG files; a file appears only when it is complete.

  Args:
    folder: The folder for the files; it is created if needed.
    drawings: The figures by the files' names, without `.png`.
  """
  folder.mkdir(exist_ok=True)
  for name, drawing in drawings.items():
    with files.replacing(folder / f'{name}.png') as temporary:
      drawing.savefig(temporary, format='png')
