"""What the analyses of trained models write: tables and figures."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, Optional

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from tff_bn.programs import figures
from tff_bn.programs import tables

# Of so many layers of a model, from the last one, each unit is drawn.
NUM_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Report:
  """What an analysis has found.

  Attributes:
    csv: The text of its CSV file: every number.
    markdown: The text of its Markdown file: a table for people.
    drawings: Its figures, by the names of their files.
  """

  csv: str
  markdown: str
  drawings: Mapping[str, figure.Figure]


@dataclasses.dataclass(frozen=True)
class LayerValue:
  """A number that belongs to a layer of a run's model.

  Attributes:
    run: The run's name.
    seed: The run's seed.
    client: The client whose model is compared; '' for all together.
    layer: The layer's name.
    units: The number of the layer's units; '' if that doesn't matter.
    value: The number.
  """

  run: str
  seed: int
  client: str
  layer: str
  units: int | str
  value: float


def records_csv(records: Sequence[Any]) -> str:
  """The text of a CSV file of dataclasses of one kind, a line for each."""
  columns = [field.name for field in dataclasses.fields(records[0])]
  return tables.csv_text(columns, [dataclasses.astuple(r) for r in records])


def draw_means(
    axes: mpl_axes.Axes,
    points: Iterable[tuple[float, float]],
    *,
    label: str,
    number: int,
    linestyle: Optional[str] = None,
) -> None:
  """Draws a line through the mean of y for each x.

  Args:
    axes: Where.
    points: Pairs of x and y.
    label: The line's label.
    number: The line's number, which decides its colour.
    linestyle: How it is drawn. Default: the number decides.
  """
  by_x: dict[float, list[float]] = {}
  for x, y in points:
    by_x.setdefault(x, []).append(y)
  axes.plot(
      list(by_x),
      [np.mean(values) for values in by_x.values()],
      marker='o',
      markersize=4,
      color=figures.COLOURS[number % len(figures.COLOURS)],
      linestyle=linestyle or figures.DASHES[number % len(figures.DASHES)],
      label=label,
  )


def layer_csv(rows: Sequence[LayerValue], column: str) -> str:
  """A line for each number.

  Args:
    rows: The numbers.
    column: What the numbers are called.

  Returns:
    The text of a CSV file. Columns that are empty in all lines are left out.
  """
  names = {field.name: field.name for field in dataclasses.fields(LayerValue)}
  names['value'] = column
  values = {
      name: [getattr(row, field) for row in rows]
      for field, name in names.items()
  }
  values = {k: v for k, v in values.items() if any(x != '' for x in v)}
  return tables.csv_text(list(values), list(zip(*values.values())))


def layer_markdown(
    rows: Sequence[LayerValue], digits: int, notes: Sequence[str]
) -> str:
  """A line for each layer and a column for each run.

  Args:
    rows: The numbers. Those of several seeds and clients become their mean and
      standard deviation.
    digits: How many digits after the point.
    notes: Sentences for below the table.

  Returns:
    Markdown.
  """
  names = _names(rows)
  cells = [['Layer', *names]]
  for layer in _layers(rows):
    cells.append([layer])
    for name in names:
      values = _values(rows, name, layer)
      text = f'{np.mean(values):.{digits}f}' if values else '–'
      if len(values) > 1:
        text += f' ± {np.std(values, ddof=1):.{digits}f}'
      cells[-1].append(text)
  if any(len(_values(rows, n, x)) > 1 for n in names for x in _layers(rows)):
    notes = [*notes, 'Mean ± standard deviation over seeds and clients.']
  return tables.markdown(cells, notes)


def layer_figure(
    rows: Sequence[LayerValue], label: str, title: str
) -> figure.Figure:
  """Draws bars: a group for each layer, in it one for each run.

  Args:
    rows: The numbers. Those of several seeds and clients become their mean,
      with their standard deviation as error bar.
    label: What the numbers are.
    title: The title.

  Returns:
    The figure.
  """
  names, layers = _names(rows), _layers(rows)
  drawing = figures.new_figure(
      width=min(16.0, 5.0 + 0.25 * len(layers) * (1 + len(names))), height=4.5
  )
  axes = drawing.subplots()
  width = 0.8 / len(names)
  for number, name in enumerate(names):
    values = [_values(rows, name, layer) for layer in layers]
    axes.bar(
        np.arange(len(layers)) + (number - (len(names) - 1) / 2) * width,
        [np.mean(v) if v else np.nan for v in values],
        width,
        yerr=[np.std(v, ddof=1) if len(v) > 1 else 0 for v in values]
        if any(len(v) > 1 for v in values)
        else None,
        color=figures.COLOURS[number % len(figures.COLOURS)],
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
  axes.set_title(title, fontsize='medium')
  return drawing


def panels(
    num_rows: int, num_columns: int, *, width: float, height: float
) -> tuple[figure.Figure, np.ndarray]:
  """Makes a figure of panels.

  Args:
    num_rows: The number of rows.
    num_columns: The number of columns.
    width: A panel's width in inches.
    height: A panel's height in inches.

  Returns:
    The figure and its axes, `[num_rows, num_columns]`.
  """
  drawing = figures.new_figure(
      width=0.5 + width * num_columns, height=0.7 + height * num_rows
  )
  return drawing, drawing.subplots(num_rows, num_columns, squeeze=False)


def matrices_figure(
    permutations: Mapping[tuple[str, str], np.ndarray],
    shares: Mapping[tuple[str, str], float],
    *,
    x_label: str,
    y_label: str,
    title: str,
) -> figure.Figure:
  """Draws permutation matrices, with a dot for each one in them.

  Args:
    permutations: Index vectors, by run and layer.
    shares: For each a share of its units.
    x_label: What the positions in the vectors are.
    y_label: What the numbers in them are.
    title: The title.

  Returns:
    A figure with a row for each run and a column for each layer; the share is
    in brackets.
  """
  names = list(dict.fromkeys(name for name, _ in permutations))
  drawing, all_axes = panels(
      len(names),
      max(sum(name == run for run, _ in permutations) for name in names),
      width=2.6,
      height=2.8,
  )
  for name, row in zip(names, all_axes):
    of_run = {k: v for k, v in permutations.items() if k[0] == name}
    for axes, (key, permutation) in zip(row, of_run.items()):
      size = permutation.size
      axes.scatter(
          np.arange(size), permutation, s=max(1, 300 / size), c='#0072B2'
      )
      axes.set_title(f'{key[1]} [{shares[key]:.3f}]', fontsize='small')
      axes.set_xlim(-0.5, size - 0.5)
      axes.set_ylim(size - 0.5, -0.5)
      axes.set_aspect('equal')
      for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(nbins=4, integer=True))
      axes.set_xlabel(x_label, fontsize='small')
      axes.tick_params(labelsize='small')
    for axes in row[len(of_run) :]:
      axes.set_axis_off()
    row[0].set_ylabel(f'{name}\n{y_label}')
  drawing.suptitle(title)
  return drawing


def _names(rows: Sequence[LayerValue]) -> list[str]:
  return list(dict.fromkeys(row.run for row in rows))


def _layers(rows: Sequence[LayerValue]) -> list[str]:
  return list(dict.fromkeys(row.layer for row in rows))


def _values(rows: Sequence[LayerValue], run: str, layer: str) -> list[float]:
  return [row.value for row in rows if (row.run, row.layer) == (run, layer)]
