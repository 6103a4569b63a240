"""Plots of finished runs: accuracy, losses and the clients' labels."""

from collections.abc import Sequence
import math
import pathlib
import statistics
from typing import Any

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from tff_bn.programs.results import figures
from tff_bn.programs.results import report
from tff_bn.programs.results.report import Run
from tff_bn.training import measures

_MAX_CELLS_WITH_NUMBERS = 300
_MAX_NAMED_CLIENTS = 40
_MAX_NAMED_CLASSES = 40
# Longer names of classes would leave no space for the figure.
_CLASS_NAME_LENGTH = 24
# Inches of a character of a name that is written upwards.
_CHARACTER_HEIGHT = 0.08
# Runs share a linear axis if the totals that they have sent differ by at most
# this factor. Then every curve has a fifth of the axis.
_MAX_LINEAR_RATIO = 5
# Characters in a line of a panel's title.
_TITLE_WIDTH = 50
_AXES = {
    'round': 'Round',
    'exchanges': 'Exchanges between server and clients',
    'megabytes': 'MB sent',
}


def accuracy_figure(
    runs: Sequence[Run], title: str, against: str = 'round'
) -> figure.Figure:
  """Draws accuracy against rounds, or against the communication in them.

  Args:
    runs: The runs; those that differ only in the seed become one line.
    title: The title.
    against: The column of the horizontal axis: `round`, `exchanges` or
      `megabytes`.

  Returns:
    A figure with a panel for the whole test set and, if a run has it, one for
    the clients' own test data. A line is the mean over the seeds, the band
    around it one standard deviation. Against communication, an algorithm that
    sends nothing is a horizontal line at its last value.
  """
  drawing = _curves(
      runs, ('test_accuracy', 'client_test_accuracy'), title, against
  )
  for axes in drawing.axes:
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1))
  drawing.axes[0].set_ylabel('Accuracy')
  return drawing


def loss_figure(runs: Sequence[Run], title: str) -> figure.Figure:
  """Draws losses against rounds, like `accuracy_figure`."""
  drawing = _curves(
      runs, ('train_loss', 'test_loss', 'client_test_loss'), title
  )
  for axes in drawing.axes:
    # With wrong BN statistics, losses differ by orders of magnitude.
    axes.set_yscale('log')
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g}'))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
  drawing.axes[0].set_ylabel('Loss (cross-entropy)')
  return drawing


def _curves(
    runs: Sequence[Run],
    panels: Sequence[str],
    title: str,
    against: str = 'round',
) -> figure.Figure:
  """Draws a panel for each column that a run has."""
  columns = [
      column
      for column in panels
      if any(column in row for run in runs for row in run.rows)
  ]
  drawing = figures.new_figure(width=1.5 + 4.0 * len(columns), height=4.0)
  all_axes = drawing.subplots(
      1, len(columns), sharex=True, sharey=True, squeeze=False
  )[0]
  names = list(dict.fromkeys(run.name for run in runs))
  styles = figures.line_styles(names)
  for axes, column in zip(all_axes, columns):
    axes.set_title(
        figures.wrapped(measured_on(column, runs), _TITLE_WIDTH),
        fontsize='medium',
    )
    axes.set_xlabel(_AXES[against])
    if needs_logarithm(runs, against):
      axes.set_xscale('log')
      axes.xaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g}'))
    else:
      axes.xaxis.set_major_locator(
          ticker.MaxNLocator(nbins=6, integer=against != 'megabytes')
      )
    for name in names:
      draw_curve(
          axes,
          [run for run in runs if run.name == name],
          column,
          against,
          label=name,
          **styles[name],
      )
    figures.tidy(axes)
  if len(names) > 1:
    figures.add_legend(drawing)
  figures.add_title(drawing, title, band_note(runs))
  return drawing


def measured_on(column: str, runs: Sequence[Run]) -> str:
  """Names what a column of metrics.csv is measured on, for titles.

  Args:
    column: The column, such as `test_loss`.
    runs: The runs that the figure shows.

  Returns:
    The name, which begins with a capital letter.
  """
  name = measures.name(column, report.have_client_models(runs))
  return f'{name[:1].upper()}{name[1:]}'


def band_note(runs: Sequence[Run]) -> str:
  """Explains the bands of curves; empty if there are none."""
  num_seeds = len({run.seed for run in runs})
  if num_seeds == 1:
    return ''
  return f'line: mean over {num_seeds} seeds, band: ± one standard deviation'


def draw_curve(
    axes: mpl_axes.Axes,
    runs: Sequence[Run],
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
  rounds, mean, deviation = mean_and_deviation(runs, column)
  costs = costs_by_round(runs, against)
  x = np.array([costs.get(number, math.nan) for number in rounds])
  if against != 'round' and x.size and not x.any():
    axes.axhline(
        float(mean[-1]),
        linewidth=1.8,
        label=f'{label} (sends nothing)',
        **style,
    )
    return
  # A logarithmic axis has no place for the untrained model.
  shown = x > 0 if axes.get_xscale() == 'log' else np.isfinite(x)
  x, mean, deviation = x[shown], mean[shown], deviation[shown]
  if not x.size:
    return
  axes.plot(
      x,
      mean,
      linewidth=1.8,
      marker='o' if x.size == 1 else None,
      label=label,
      **style,
  )
  axes.fill_between(
      x,
      mean - deviation,
      mean + deviation,
      color=style['color'],
      alpha=0.18,
      linewidth=0,
  )


def costs_by_round(runs: Sequence[Run], column: str) -> dict[int, float]:
  """Returns the totals in a column of runs that differ only in the seed.

  Args:
    runs: The runs.
    column: The column, such as `megabytes`.

  Returns:
    The totals by round.
  """
  return {
      int(row['round']): row[column]
      for run in runs
      for row in run.rows
      if column in row
  }


def _totals(runs: Sequence[Run], column: str) -> list[float]:
  """Returns the totals of the runs that send anything."""
  totals = [run.rows[-1].get(column, 0) for run in runs]
  return [total for total in totals if total > 0]


def needs_logarithm(runs: Sequence[Run], against: str) -> bool:
  """Whether a common linear axis would hide some of the runs."""
  if against == 'round':
    return False
  totals = _totals(runs, against)
  return bool(totals) and max(totals) > _MAX_LINEAR_RATIO * min(totals)


def mean_and_deviation(
    runs: Sequence[Run], column: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Computes a column's mean and standard deviation over runs, by round.

  Args:
    runs: Runs with different seeds.
    column: The column.

  Returns:
    The rounds in which any run has a finite value, the mean, and the sample
    standard deviation (0 for one value); arrays of one length.
  """
  values: dict[int, list[float]] = {}
  for run in runs:
    for row in run.rows:
      if math.isfinite(row.get(column, math.nan)):
        values.setdefault(int(row['round']), []).append(row[column])
  rounds = sorted(values)
  mean = [statistics.fmean(values[r]) for r in rounds]
  deviation = [
      statistics.stdev(values[r]) if len(values[r]) > 1 else 0.0 for r in rounds
  ]
  return np.array(rounds), np.array(mean), np.array(deviation)


def label_distribution_figure(
    counts: np.ndarray,
    client_ids: Sequence[str],
    title: str,
    class_names: Sequence[str] = (),
) -> figure.Figure:
  """Draws the number of examples of each class and client.

  Args:
    counts: Examples by client and class, shape [clients, classes].
    client_ids: The clients' names.
    title: The title.
    class_names: The classes' names. Default: their numbers.

  Returns:
    A figure: a grid of clients and classes, darker for more examples.
  """
  num_clients, num_classes = counts.shape
  names = []
  if num_classes <= _MAX_NAMED_CLASSES:
    names = [_shortened(name) for name in class_names]
  longest = max(map(len, names), default=0)
  drawing = figures.new_figure(
      width=min(14.0, 3.0 + 0.5 * num_classes),
      height=min(12.0, 1.8 + 0.4 * num_clients) + _CHARACTER_HEIGHT * longest,
  )
  axes = drawing.subplots()
  image = axes.imshow(
      counts, cmap='Blues', aspect='auto', interpolation='nearest', vmin=0
  )
  if num_clients * num_classes <= _MAX_CELLS_WITH_NUMBERS:
    for (client, label), count in np.ndenumerate(counts):
      if count:
        axes.text(
            label,
            client,
            str(count),
            ha='center',
            va='center',
            fontsize='small',
            color='white' if count > 0.6 * counts.max() else 'black',
        )
  if num_clients <= _MAX_NAMED_CLIENTS:
    axes.set_yticks(range(num_clients), client_ids)
  if names:
    axes.set_xticks(
        range(num_classes),
        names,
        rotation=90,
        parse_math=False,  # Names are no formulas.
    )
  else:
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=20, integer=True))
  axes.set_xlabel('Class')
  axes.set_ylabel('Client')
  drawing.colorbar(image, ax=axes, label='Training examples')
  figures.add_title(drawing, title)
  return drawing


def _shortened(name: str) -> str:
  if len(name) <= _CLASS_NAME_LENGTH:
    return name
  return f'{name[: _CLASS_NAME_LENGTH - 1]}…'


def save_figures(
    folder: pathlib.Path,
    runs: Sequence[Run],
    label_counts: np.ndarray,
    client_ids: Sequence[str],
    title: str,
    class_names: Sequence[str] = (),
) -> None:
  """Saves the figures of finished runs as PNG files.

  Accuracy against communication is drawn for comparisons only: a single
  algorithm sends the same amount in every round, unless it has phases.

  Args:
    folder: The folder for the files; it is created if needed.
    runs: The runs.
    label_counts: Examples by client and class, shape [clients, classes].
    client_ids: The clients' names.
    title: The figures' title.
    class_names: The classes' names. Default: their numbers.
  """
  drawings = dict(
      accuracy=accuracy_figure(runs, title),
      loss=loss_figure(runs, title),
      label_distribution=label_distribution_figure(
          label_counts,
          client_ids,
          f'{title}, seed {runs[0].seed}',
          class_names,
      ),
  )
  if len({run.name for run in runs}) > 1:
    for column in report.LAST_COLUMNS:
      if _totals(runs, column):
        drawings[f'accuracy_by_{column}'] = accuracy_figure(runs, title, column)
  figures.save(folder, drawings)
