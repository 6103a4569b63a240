"""Colors, axes and files of the programs' figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
import pathlib
import textwrap
from typing import Any, Optional

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib.backends import backend_agg

from tff_bn.catalog import algorithms
from tff_bn.common import files

# Okabe and Ito's colors, which color-blind people can distinguish; without
# their yellow, which is too light for lines on white.
COLORS = (
    '#0072B2',
    '#D55E00',
    '#009E73',
    '#CC79A7',
    '#E69F00',
    '#56B4E9',
    '#000000',
)
DASHES = ('-', '--', '-.', ':')
# An algorithm has the same color in all figures.
_ALGORITHM_COLORS = {
    'centralized': '#000000',
    'fedavg': '#D55E00',
    'fedbn': '#0072B2',
    'silobn': '#56B4E9',
    'local_affine': '#8C564B',
    'fedtan': '#009E73',
    'fedtan_forward_only': '#A6A000',
    'fedtan_ii': '#B5336A',
    'fbn': '#9457EB',
    'fixbn': '#E377C2',
    'hbn': '#E69F00',
    'dsgd': '#17A2A2',
    'dsgd_fbn': '#B9A0E8',
    'dsgd_fixbn': '#43B843',
    'single': '#7F7F7F',
    'fedprox': '#C49C5A',
    'scaffold': '#3B5BDB',
    'moon': '#FF8A80',
    'fedbs': '#4F7942',
}
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


def line_style(index: int) -> dict[str, str]:
  """Returns the color and the dashes of a line.

  Args:
    index: The line's position in the legend.

  Returns:
    Arguments of `plot`; the same for the first 28 lines only if the index is.
  """
  return dict(
      color=COLORS[index % len(COLORS)],
      linestyle=DASHES[index % len(DASHES)],
  )


def algorithm_style(name: str) -> Optional[dict[str, str]]:
  """Returns the color and the dashes of an algorithm's lines.

  Args:
    name: A name that `--algorithm` takes. A combination such as `fedbn+moon`
      has the color of the algorithm, and other dashes.

  Returns:
    Arguments of `plot`; `None` if there is no such algorithm.
  """
  base, _, correction = name.partition('+')
  if base == algorithms.DEFAULT and correction:
    base, correction = correction, ''
  if base not in _ALGORITHM_COLORS:
    return None
  dashes = list(_ALGORITHM_COLORS).index(base)
  if correction and correction not in algorithms.CORRECTIONS:
    return None
  if correction:
    dashes += 1 + list(algorithms.CORRECTIONS).index(correction)
  return dict(
      color=_ALGORITHM_COLORS[base], linestyle=DASHES[dashes % len(DASHES)]
  )


def line_styles(
    names: Sequence[str], algorithms: Optional[Mapping[str, str]] = None
) -> dict[str, dict[str, str]]:
  """Chooses the colors and the dashes of lines.

  Args:
    names: The names of the lines, all different.
    algorithms: The algorithms that the lines show, by name. Default: the names.

  Returns:
    Arguments of `plot` for each name. A line has its algorithm's style if it is
    the only one of this algorithm, and an unused color otherwise.
  """
  shown = {name: (algorithms or {}).get(name, name) for name in names}
  counts = Counter(shown.values())
  styles = {}
  for name, algorithm in shown.items():
    style = algorithm_style(algorithm)
    if style is not None and counts[algorithm] == 1:
      styles[name] = style
  used = {style['color'] for style in styles.values()}
  unused = [c for c in COLORS if c not in used] or COLORS
  others = [name for name in names if name not in styles]
  for index, name in enumerate(others):
    styles[name] = dict(
        color=unused[index % len(unused)],
        linestyle=DASHES[index % len(DASHES)],
    )
  return styles


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
      loc='outside right center',
      frameon=False,
  )


def wrapped(text: str, width: int) -> str:
  """Breaks a line of text between words, never inside of a word.

  Args:
    text: The line.
    width: The number of characters in a line; a longer word has its own line.

  Returns:
    The lines.
  """
  return textwrap.fill(
      text, width, break_on_hyphens=False, break_long_words=False
  )


def add_title(drawing: figure.Figure, *lines: str) -> None:
  """Adds a title whose lines are broken where the figure ends.

  Words are not broken: if one is wider than the figure, the title is smaller.

  Args:
    drawing: The figure, with its final width.
    *lines: The lines of the title; empty ones are left out.
  """
  width = max(20, int(drawing.get_figwidth() / _CHARACTER_WIDTH))
  text = '\n'.join(
      wrapped(part, width) for line in lines for part in line.splitlines()
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
