"""Tables of finished runs: functions of rows, without side effects.

A run's rows are the rows of its `metrics.csv`: for each evaluated round, a
mapping from columns to numbers.
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import itertools
import pathlib
import statistics
from typing import Optional

import numpy as np

from tff_bn.common import csv_files
from tff_bn.programs import run_folder
from tff_bn.programs import tables

Row = Mapping[str, float]
# A row of results.csv.
Result = Mapping[str, str | float]
ALGORITHM = 'algorithm'

# Columns of metrics.csv that results.csv averages over the last evaluated
# rounds, and columns whose last value it gives.
_AVERAGED = (
    'test_accuracy',
    'test_loss',
    'client_test_accuracy',
    'client_test_loss',
    'train_loss',
)
LAST_COLUMNS = {'exchanges': int, 'megabytes': float}
# What every run has besides its labels and flags.
_SEED = 'seed'
_METRICS = (*_AVERAGED, 'rounds', *LAST_COLUMNS)


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run.

  Attributes:
    labels: The labels of the run by the names of what a comparison varies, such
      as `algorithm`.
    seed: The run's seed.
    rows: The rows of its metrics.csv.
    flags: Texts of further flags that differ between the runs, by name.
  """

  labels: Mapping[str, str]
  seed: int
  rows: Sequence[Row]
  flags: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    """The name of the run in legends, which is the same for all seeds."""
    return describe(self.labels)


def describe(labels: Mapping[str, str]) -> str:
  """Returns labels as one text, such as `fedavg, gamma=0.5`.

  Args:
    labels: The labels by the names of what is varied.

  Returns:
    The text, with the algorithm first.
  """
  names = sorted(labels, key=lambda name: name != ALGORITHM)
  return ', '.join(
      labels[name] if name == ALGORITHM else f'{name}={labels[name]}'
      for name in names
  )


def read_metrics(text: str) -> list[dict[str, float]]:
  """Reads the text of a metrics.csv; missing values are left out."""
  return [
      {name: float(value) for name, value in row.items() if value}
      for row in csv.DictReader(io.StringIO(text))
  ]


def read_rows(folder: pathlib.Path) -> list[dict[str, float]]:
  """Reads the metrics of a run from its folder."""
  return read_metrics((folder / run_folder.METRICS).read_text(encoding='utf-8'))


def describe_last(rows: Sequence[Row]) -> str:
  """Describes the last row of a run in lines, for the end of its training.

  Args:
    rows: The rows of its metrics.csv.

  Returns:
    Its test metrics: on the whole test set and, if they are known, on the
    clients' own test data.
  """
  last = rows[-1]
  lines = [f'After round {int(last["round"])}:']
  for prefix, data in (
      ('test_', 'whole test set'),
      ('client_test_', "clients' own test data"),
  ):
    metrics = [
        f'{name.removeprefix(prefix)} {value:.4f}'
        for name, value in last.items()
        if name.startswith(prefix)
    ]
    if metrics:
      lines.append(f'  {data + ":":24}{", ".join(metrics)}')
  return '\n'.join(lines)


def last_rows(run: Run, average_last: int) -> Sequence[Row]:
  """Returns the rows over which the table averages.

  Args:
    run: The run.
    average_last: The largest number of rows.

  Returns:
    The last rows, without the row of round 0, whose model is untrained.
  """
  return [row for row in run.rows if row['round'] > 0][-average_last:]


def result(run: Run, average_last: int) -> Result:
  """Returns the row of results.csv for a run.

  Args:
    run: The run.
    average_last: The number of evaluated rounds, counted from the last one,
      over which accuracies and losses are averaged.

  Returns:
    The labels, the flags and the seed, and the metrics that the run has.
  """
  values: dict[str, str | float] = {
      **run.labels,
      **run.flags,
      _SEED: run.seed,
  }
  for column in _AVERAGED:
    last = [
        row[column] for row in last_rows(run, average_last) if column in row
    ]
    if last:
      # No more digits than metrics.csv has.
      values[column] = float(f'{statistics.fmean(last):.8g}')
  # The number of rounds can be swept.
  values.setdefault('rounds', int(run.rows[-1]['round']))
  for column, number_type in LAST_COLUMNS.items():
    if column in run.rows[-1]:
      values[column] = number_type(run.rows[-1][column])
  return values


def results_csv(results: Sequence[Result]) -> str:
  """Returns the text of results.csv for rows that `result` returned."""
  found = dict.fromkeys(itertools.chain.from_iterable(results))
  described = [name for name in found if name not in (_SEED, *_METRICS)]
  # The algorithm first.
  described.sort(key=lambda name: name != ALGORITHM)
  columns = (*described, _SEED, *_METRICS)
  return csv_files.to_csv(
      columns, ([row.get(column) for column in columns] for row in results)
  )


def by_labels(
    results: Sequence[Result], names: Sequence[str]
) -> dict[tuple[str, ...], list[Result]]:
  """Groups rows of results.csv, usually those that differ only in the seed.

  Args:
    results: The rows.
    names: The names of labels.

  Returns:
    The rows by the values of these labels, in the order of the first ones.
  """
  groups: dict[tuple[str, ...], list[Result]] = {}
  for row in results:
    groups.setdefault(tuple(str(row[name]) for name in names), []).append(row)
  return groups


@dataclasses.dataclass(frozen=True)
class _TableColumn:
  """A column of results.md.

  Attributes:
    name: The column of results.csv.
    title: Its title in the table.
    explanation: Its meaning, for the lines below the table.
    factor: The value is multiplied by it.
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
        'on the whole test set; if clients have personal models, the mean over'
        ' the clients',
        factor=100.0,
        digits=1,
    ),
    _TableColumn(
        'client_test_accuracy',
        'Client accuracy, %',
        'of the model that each client uses, on test data with the'
        " distribution of the client's training data; mean over the clients",
        factor=100.0,
        digits=1,
    ),
    _TableColumn(
        'test_loss', 'Loss', 'on the whole test set, like the accuracy'
    ),
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
        'sent in these exchanges: once to all clients, and back by each client'
        ' (2^20 bytes)',
    ),
)


def results_markdown(
    results: Sequence[Result],
    average_last: int,
    varied: Sequence[str] = (ALGORITHM,),
    sentences: Sequence[str] = (),
) -> str:
  """Returns the text of results.md.

  Args:
    results: Rows that `result` returned.
    average_last: The number of evaluated rounds over which they average.
    varied: The names of the labels.
    sentences: What the table shows.

  Returns:
    A table with a line for each combination of labels, the sentences, and the
    meaning of the columns.
  """
  cells = table_cells(results, varied)
  explained = [*sentences, *notes(results, average_last)]
  return tables.markdown(cells, explained, len(varied))


def table_cells(
    results: Sequence[Result], varied: Sequence[str] = (ALGORITHM,)
) -> list[list[str]]:
  """Returns the table of means and standard deviations over the seeds.

  Args:
    results: Rows that `result` returned.
    varied: The names of the labels.

  Returns:
    The titles, and a line for each combination of labels, which begins with
    them.
  """
  columns = _columns(results)
  varied = sorted(varied, key=lambda name: name != ALGORITHM)
  titles = ['Algorithm' if name == ALGORITHM else name for name in varied]
  cells = [titles + [column.title for column in columns]]
  for labels, rows in by_labels(results, varied).items():
    cells.append(
        [*labels]
        + [
            _mean_and_deviation(
                [float(row[column.name]) for row in rows if column.name in row],
                column,
            )
            for column in columns
        ]
    )
  return cells


def _columns(results: Sequence[Result]) -> list[_TableColumn]:
  """Returns the columns that a row has."""
  return [
      column
      for column in _TABLE_COLUMNS
      if any(column.name in row for row in results)
  ]


def notes(results: Sequence[Result], average_last: int) -> list[str]:
  """Returns sentences that explain the table.

  Args:
    results: Rows that `result` returned.
    average_last: The number of evaluated rounds over which they average.
  """
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
  return [
      f'Accuracies and losses are {over_rounds}; {over_seeds}.',
      *(
          f'{column.title}: {column.explanation}.'
          for column in _columns(results)
      ),
  ]


def _mean_and_deviation(values: Sequence[float], column: _TableColumn) -> str:
  if not values:
    return '–'
  values = [column.factor * value for value in values]
  mean = f'{statistics.fmean(values):.{column.digits}f}'
  if len(values) == 1 or column.name not in _AVERAGED:
    return mean
  # The values of a diverged run may be infinite or NaN.
  with np.errstate(invalid='ignore'):
    deviation = np.std(values, ddof=1)
  return f'{mean} ± {deviation:.{column.digits}f}'


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The accuracy and the loss of a saved model on some data.

  Attributes:
    model: 'global', or 'own' for the personal model of the client.
    client: The client whose test data is used; '' for the whole test set.
    num_examples: The number of examples.
    accuracy: The share of correctly classified examples; None if there are no
      examples.
    loss: The mean loss; None if there are no examples.
  """

  model: str
  client: str
  num_examples: int
  accuracy: Optional[float]
  loss: Optional[float]


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
  """Returns the evaluations as a Markdown table."""
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
