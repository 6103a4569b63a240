"""Tables and plots of finished runs: functions of rows, without side effects.

A run's rows are what its `metrics.csv` holds: one mapping from column to number
for each evaluated round.
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import math
import pathlib
import statistics
from typing import Optional

from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from tff_bn.common import csv_files
from tff_bn.programs import figures
from tff_bn.programs import run_folder
from tff_bn.programs import tables

Row = Mapping[str, float]

# Columns of metrics.csv that results.csv averages over the last evaluated
# rounds, and those of which it gives the last value.
_AVERAGED = (
    'test_accuracy',
    'test_loss',
    'client_test_accuracy',
    'client_test_loss',
    'train_loss',
)
_LAST = {'exchanges': int, 'megabytes': float}
RESULT_COLUMNS = ('algorithm', 'seed', *_AVERAGED, 'rounds', *_LAST)

_MAX_CELLS_WITH_NUMBERS = 300
_MAX_NAMED_CLIENTS = 40
# Between what two runs have sent, for them to share a linear axis.
_MAX_LINEAR_RATIO = 20


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run.

  Attributes:
    algorithm: The algorithm's name.
    seed: The run's seed.
    rows: The rows of its metrics.csv.
  """

  algorithm: str
  seed: int
  rows: Sequence[Row]


def read_metrics(text: str) -> list[dict[str, float]]:
  """Reads the text of a metrics.csv; a value that is missing is left out."""
  return [
      {name: float(value) for name, value in row.items() if value}
      for row in csv.DictReader(io.StringIO(text))
  ]


def read_run(algorithm: str, seed: int, folder: pathlib.Path) -> Run:
  """Reads what a run has written into its folder."""
  text = (folder / run_folder.METRICS).read_text(encoding='utf-8')
  return Run(algorithm, seed, read_metrics(text))


def last_rows(run: Run, average_last: int) -> Sequence[Row]:
  """The rows that the table averages over.

  Args:
    run: The run.
    average_last: How many rows at most.

  Returns:
    The last rows of trained models: not round 0's.
  """
  return [row for row in run.rows if row['round'] > 0][-average_last:]


def result(run: Run, average_last: int) -> dict[str, str | float]:
  """The row of results.csv for a run.

  Args:
    run: The run.
    average_last: Accuracies and losses are means over this many evaluated
      rounds, the last ones.

  Returns:
    A value for each of `RESULT_COLUMNS` that the run has.
  """
  values = {'algorithm': run.algorithm, 'seed': run.seed}
  for column in _AVERAGED:
    last = [
        row[column] for row in last_rows(run, average_last) if column in row
    ]
    if last:
      # No more digits than metrics.csv has.
      values[column] = float(f'{statistics.fmean(last):.8g}')
  values['rounds'] = int(run.rows[-1]['round'])
  for column, number_type in _LAST.items():
    if column in run.rows[-1]:
      values[column] = number_type(run.rows[-1][column])
  return values


def results_csv(results: Sequence[Mapping[str, str | float]]) -> str:
  """The text of results.csv, from rows that `result` returned."""
  return csv_files.to_csv(
      RESULT_COLUMNS,
      ([row.get(column) for column in RESULT_COLUMNS] for row in results),
  )


@dataclasses.dataclass(frozen=True)
class _TableColumn:
  """A column of results.md.

  Attributes:
    name: The column of results.csv.
    title: Its title in the table.
    explanation: What it says, for the lines below the table.
    factor: What the value is multiplied with.
    digits: Digits after the point.
  """

  name: str
  title: str
  explanation: str
  factor: float = 1.0
  digits: int = 2


_TABLE_COLUMNS = (
    _TableColumn(
        'test_accuracy',
        'Accuracy, %',
        'on the whole test set; where clients have models of their own, the'
        ' mean over the clients',
        factor=100.0,
        digits=1,
    ),
    _TableColumn(
        'client_test_accuracy',
        'Client accuracy, %',
        "of the model that each client uses, on test data with the client's own"
        ' distribution, mean over the clients',
        factor=100.0,
        digits=1,
    ),
    _TableColumn('test_loss', 'Loss', 'on the whole test set, as the accuracy'),
    _TableColumn(
        'train_loss',
        'Training loss',
        'on the batches of the round, in training',
    ),
    _TableColumn('rounds', 'Rounds', 'trained', digits=0),
    _TableColumn(
        'exchanges',
        'Exchanges',
        'messages to all clients and back, in all rounds',
        digits=0,
    ),
    _TableColumn(
        'megabytes',
        'MB',
        'sent in these exchanges, down once and up by each client (2^20 bytes)',
    ),
)


def results_markdown(
    results: Sequence[Mapping[str, str | float]], average_last: int
) -> str:
  """The text of results.md.

  Args:
    results: Rows that `result` returned.
    average_last: The number of evaluated rounds that they average over.

  Returns:
    A table with a line for each algorithm, and what its columns mean.
  """
  columns = [
      column
      for column in _TABLE_COLUMNS
      if any(column.name in row for row in results)
  ]
  cells = [['Algorithm'] + [column.title for column in columns]]
  algorithms = list(dict.fromkeys(row['algorithm'] for row in results))
  for algorithm in algorithms:
    rows = [row for row in results if row['algorithm'] == algorithm]
    cells.append(
        [algorithm]
        + [
            _mean_and_deviation(
                [row[column.name] for row in rows if column.name in row],
                column,
            )
            for column in columns
        ]
    )
  seeds = len({row['seed'] for row in results})
  over_seeds = (
      f'mean ± standard deviation over {seeds} seeds'
      if seeds > 1
      else 'one seed'
  )
  over_rounds = (
      f'the mean over the last {average_last} evaluated rounds'
      if average_last > 1
      else 'the value of the last evaluated round'
  )
  notes = [
      f'Accuracies and losses are {over_rounds}; {over_seeds}.',
      *(f'{column.title}: {column.explanation}.' for column in columns),
  ]
  return tables.markdown(cells, notes)


def _mean_and_deviation(values: Sequence[float], column: _TableColumn) -> str:
  if not values:
    return '–'
  values = [column.factor * value for value in values]
  mean = f'{statistics.fmean(values):.{column.digits}f}'
  if len(values) == 1 or column.name not in _AVERAGED:
    return mean
  # Of a run that diverged, values may be infinite or NaN.
  with np.errstate(invalid='ignore'):
    deviation = np.std(values, ddof=1)
  return f'{mean} ± {deviation:.{column.digits}f}'


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """How a saved model does on some data.

  Attributes:
    model: 'global', or 'own' for a model that belongs to the client.
    client: The client on whose test data it is; '' for the whole test set.
    num_examples: The number of examples.
    accuracy: The share of examples that are classified rightly; None if there
      are no examples.
    loss: The mean loss; None if there are no examples.
  """

  model: str
  client: str
  num_examples: int
  accuracy: Optional[float]
  loss: Optional[float]


def evaluation_csv(evaluations: Sequence[Evaluation]) -> str:
  """The text of evaluation.csv."""
  return csv_files.to_csv(
      [field.name for field in dataclasses.fields(Evaluation)],
      map(dataclasses.astuple, evaluations),
  )


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
  """The evaluations as a Markdown table."""
  cells = [['Test data', 'Model', 'Examples', 'Accuracy, %', 'Loss']]
  for row in evaluations:
    cells.append(
        [
            row.client or 'whole test set',
            row.model,
            str(row.num_examples),
            '–' if row.accuracy is None else f'{100 * row.accuracy:.1f}',
            '–' if row.loss is None else f'{row.loss:.4f}',
        ]
    )
  return tables.markdown(cells)


_TEST_PANEL = 'Whole test set'
_CLIENT_PANEL = "Clients' own test data"
_AXES = {
    'round': 'Round',
    'exchanges': 'Exchanges between server and clients',
    'megabytes': 'MB sent',
}


def accuracy_figure(
    runs: Sequence[Run], title: str, against: str = 'round'
) -> figure.Figure:
  """Draws accuracy against rounds, or against what was sent in them.

  Args:
    runs: The runs; those of an algorithm become one line.
    title: The title.
    against: The column of the horizontal axis: `round`, `exchanges` or
      `megabytes`.

  Returns:
    A figure with a panel for the whole test set and, if a run has it, one for
    the clients' own test data. A line is the mean over the seeds, the band
    around it one standard deviation. Against what was sent, an algorithm that
    sends nothing is a horizontal line at its last value.
  """
  drawing = _curves(
      runs,
      {'test_accuracy': _TEST_PANEL, 'client_test_accuracy': _CLIENT_PANEL},
      title,
      against,
  )
  for axes in drawing.axes:
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(xmax=1))
  drawing.axes[0].set_ylabel('Accuracy')
  return drawing


def loss_figure(runs: Sequence[Run], title: str) -> figure.Figure:
  """Draws losses against rounds, like `accuracy_figure`."""
  drawing = _curves(
      runs,
      {
          'train_loss': 'Training',
          'test_loss': _TEST_PANEL,
          'client_test_loss': _CLIENT_PANEL,
      },
      title,
  )
  for axes in drawing.axes:
    # A model whose statistics don't fit its data can have any loss.
    axes.set_yscale('log')
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g}'))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
  drawing.axes[0].set_ylabel('Loss (cross-entropy)')
  return drawing


def _curves(
    runs: Sequence[Run],
    panels: Mapping[str, str],
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
  algorithms = list(dict.fromkeys(run.algorithm for run in runs))
  for axes, column in zip(all_axes, columns):
    axes.set_title(panels[column], fontsize='medium')
    axes.set_xlabel(_AXES[against])
    if _needs_logarithm(runs, against):
      axes.set_xscale('log')
      axes.xaxis.set_major_formatter(ticker.StrMethodFormatter('{x:g}'))
    else:
      axes.xaxis.set_major_locator(
          ticker.MaxNLocator(nbins=6, integer=against != 'megabytes')
      )
    for index, algorithm in enumerate(algorithms):
      _draw_curve(
          axes,
          [run for run in runs if run.algorithm == algorithm],
          column,
          against,
          label=algorithm,
          color=figures.COLOURS[index % len(figures.COLOURS)],
          linestyle=figures.DASHES[index % len(figures.DASHES)],
      )
    figures.tidy(axes)
  if len(algorithms) > 1:
    figures.add_legend(drawing)
  drawing.suptitle(title)
  return drawing


def _draw_curve(
    axes: mpl_axes.Axes,
    runs: Sequence[Run],
    column: str,
    against: str,
    **style: str,
):
  """Draws the runs of one algorithm."""
  rounds, mean, deviation = mean_and_deviation(runs, column)
  costs = {
      int(row['round']): row[against]
      for run in runs
      for row in run.rows
      if against in row
  }
  x = np.array([costs.get(number, math.nan) for number in rounds])
  if against != 'round' and x.size and not x.any():
    style['label'] += ' (sends nothing)'
    axes.axhline(mean[-1], linewidth=1.8, **style)
    return
  # A logarithmic axis has no place for the untrained model.
  shown = x > 0 if axes.get_xscale() == 'log' else np.isfinite(x)
  x, mean, deviation = x[shown], mean[shown], deviation[shown]
  if not x.size:
    return
  axes.plot(
      x, mean, linewidth=1.8, marker='o' if x.size == 1 else None, **style
  )
  axes.fill_between(
      x,
      mean - deviation,
      mean + deviation,
      color=style['color'],
      alpha=0.18,
      linewidth=0,
  )


def _totals(runs: Sequence[Run], column: str) -> list[float]:
  """What the runs that send anything have sent in the end."""
  totals = [run.rows[-1].get(column, 0) for run in runs]
  return [total for total in totals if total > 0]


def _needs_logarithm(runs: Sequence[Run], against: str) -> bool:
  """Whether a common linear axis would hide some of the runs."""
  if against == 'round':
    return False
  totals = _totals(runs, against)
  return bool(totals) and max(totals) > _MAX_LINEAR_RATIO * min(totals)


def mean_and_deviation(
    runs: Sequence[Run], column: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean and standard deviation of a column over runs, round by round.

  Args:
    runs: Runs with different seeds.
    column: The column.

  Returns:
    The rounds in which any run has a finite value, the mean, and the sample
    standard deviation (0 for one value); arrays of one length.
  """
  values = {}
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
    counts: np.ndarray, client_ids: Sequence[str], title: str
) -> figure.Figure:
  """Draws how many examples of each class each client has.

  Args:
    counts: Examples by client and class, shape [clients, classes].
    client_ids: The clients' names.
    title: The title.

  Returns:
    A figure: a grid of clients and classes, darker for more examples.
  """
  num_clients, num_classes = counts.shape
  drawing = figures.new_figure(
      width=min(14.0, 3.0 + 0.5 * num_classes),
      height=min(12.0, 1.8 + 0.4 * num_clients),
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
  axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=20, integer=True))
  axes.set_xlabel('Class')
  axes.set_ylabel('Client')
  drawing.colorbar(image, ax=axes, label='Training examples')
  drawing.suptitle(title)
  return drawing


def save_figures(
    folder: pathlib.Path,
    runs: Sequence[Run],
    label_counts: np.ndarray,
    client_ids: Sequence[str],
    title: str,
):
  """Saves the figures of finished runs as PNG files.

  Accuracy against what was sent is for comparisons only: one algorithm sends as
  much in each round, unless it has phases.

  Args:
    folder: The folder for the files; it is made if needed.
    runs: The runs.
    label_counts: Examples by client and class, shape [clients, classes].
    client_ids: The clients' names.
    title: The figures' title.
  """
  drawings = dict(
      accuracy=accuracy_figure(runs, title),
      loss=loss_figure(runs, title),
      label_distribution=label_distribution_figure(
          label_counts, client_ids, f'{title}, seed {runs[0].seed}'
      ),
  )
  if len({run.algorithm for run in runs}) > 1:
    for column in _LAST:
      if _totals(runs, column):
        drawings[f'accuracy_by_{column}'] = accuracy_figure(runs, title, column)
  figures.save(folder, drawings)
