"""Colours, axes and files of the programs' figures."""

from collections.abc import Mapping
import pathlib
from typing import Any

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib.backends import backend_agg

from tff_bn.common import files

# Okabe and Ito's colours, which colour-blind people can distinguish; without
# their yellow, which is too light for lines on white.
COLOURS = (
    '#0072B2',
    '#D55E00',
    '#009E73',
    '#CC79A7',
    '#E69F00',
    '#56B4E9',
    '#000000',
)
DASHES = ('-', '--', '-.', ':')
_DPI = 150


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


def line_style(index: int) -> dict[str, str]:
  """Returns the colour and the dashes of a line.

  Args:
    index: The line's position in the legend.

  Returns:
    Arguments of `plot`; the same for the first 28 lines only if the index is.
  """
  return dict(
      color=COLOURS[index % len(COLOURS)],
      linestyle=DASHES[index % len(DASHES)],
  )


def tidy(axes: mpl_axes.Axes) -> None:
  """Adds a light grid and removes the frame at the top and the right."""
  axes.grid(alpha=0.3)
  axes.spines[['top', 'right']].set_visible(False)


def add_legend(drawing: figure.Figure) -> None:
  """Adds one legend for all axes, outside of them."""
  handles: dict[Any, Any] = {}
  for axes in drawing.axes:
    lines, labels = axes.get_legend_handles_labels()
    handles.update(zip(labels, lines))
  drawing.legend(
      handles.values(),
      handles.keys(),
      loc='outside right upper',
      frameon=False,
  )


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
