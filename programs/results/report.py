"""Tables of finished runs: functions of rows, without side effects.

A run's rows are the rows of its `metrics.csv`: for each evaluated round, a
mapping from columns to numbers.
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import functools
import math
import pathlib
import statistics
from typing import Optional

import pandas as pd

from tff_bn.catalog import columns
from tff_bn.catalog import tasks
from tff_bn.programs.plan import axes
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_folder
from tff_bn.training import best_round
from tff_bn.training import client_metrics
from tff_bn.training import measures

Row = Mapping[str, float]
ALGORITHM = axes.ALGORITHM
describe = axes.describe
_SEED = 'seed'
_BEST_ROUND = 'best_round'


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run.

  Attributes:
    labels: The labels of the run by the names of what a comparison varies, such
      as `algorithm`.
    seed: The run's seed.
    rows: The rows of its metrics.csv.
    flags: Texts of further flags that differ between the runs, by name.
    has_client_models: Whether the clients have own models; None if it is
      unknown.
    loss: The name of its loss in words; empty if it is unknown.
    keep_best: The metric that chooses its best round; None: its last rounds
      count.
  """

  labels: Mapping[str, str]
  seed: int
  rows: Sequence[Row]
  flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
  has_client_models: Optional[bool] = None
  loss: str = ''
  keep_best: Optional[str] = None

  @functools.cached_property
  def metrics(self) -> list[str]:
    """The metrics in its rows, the main one first."""
    prefixes = (measures.TEST, measures.CLIENT_TEST, measures.TRAIN)
    names = dict.fromkeys(
        name.removeprefix(prefix)
        for row in self.rows
        for name in row
        for prefix in prefixes
        if name.startswith(prefix)
    )
    return [name for name in names if name != columns.LOSS.name]

  @functools.cached_property
  def best_round(self) -> Optional[int]:
    """The best round; None if none is kept."""
    if self.keep_best is None:
      return None
    return best_round.BestRound(self.keep_best).find(self.rows)

  @functools.cached_property
  def name(self) -> str:
    """The name of the run in legends, which is the same for all seeds."""
    return describe(self.labels)


def have_client_models(runs: Sequence[Run]) -> Optional[bool]:
  """Whether the clients of runs have own models; None: only in some runs."""
  first, *others = {run.has_client_models for run in runs} or {None}
  return None if others else first


def columns_of(runs: Sequence[Run]) -> tuple[columns.Column, ...]:
  """Returns the columns of runs. The metrics of the first run come first.

  Runs without any numbers have the columns of a classification.
  """
  names = dict.fromkeys(name for run in runs for name in run.metrics)
  losses = {run.loss for run in runs}
  loss = columns.LOSS
  if len(losses) == 1 and losses != {''}:
    loss = columns.loss(losses.pop())
  given = {name for run in runs for row in run.rows for name in row}
  if any(run.best_round is not None for run in runs):
    given.add(_BEST_ROUND)
  return tuple(
      column
      for column in _columns(list(names), loss)
      if column.name in given or not column.is_optional
  )


def _columns(
    names: Sequence[str], loss: columns.Kind = columns.LOSS
) -> tuple[columns.Column, ...]:
  """Returns the columns of metrics."""
  if not names:
    names = tasks.TASKS[tasks.CLASSIFICATION].metrics
  return columns.of([tasks.kind(name) for name in names], loss)


def columns_of_table(table: pd.DataFrame) -> tuple[columns.Column, ...]:
  """Returns the columns of what `results` returned."""
  names = [
      name.removeprefix(measures.TEST)
      for name in table.columns
      if name.startswith(measures.TEST)
  ]
  return _columns([name for name in names if name != columns.LOSS.name])


def main_kind(found: Sequence[columns.Column]) -> columns.Kind:
  """Returns the kind of the main metric, given the columns of runs."""
  return found[0].kind


def read_rows(folder: pathlib.Path) -> list[dict[str, float]]:
  """Reads the metrics of a run from its folder; leaves out missing values."""
  path = folder / run_folder.METRICS
  with path.open(encoding='utf-8', newline='') as file:
    return [
        {name: float(value) for name, value in row.items() if value}
        for row in csv.DictReader(file)
    ]


def describe_end(run: Run) -> str:
  """Describes the last round, and the best one, at the end of a training.

  The lines have the metrics on the whole test set and, if they are known, on
  the clients' own test data and on their validation data.
  """
  last = run.rows[-1]
  rows = {'': last}
  if run.keep_best is not None and run.best_round is not None:
    best = f', with the best {describe_validated(run.keep_best)}'
    if run.best_round == last['round']:
      rows = {f', the last one{best}': last}
    else:
      rows = {best: counted_rows(run, 1)[0], ', the last one': last}
  lines = []
  for what, row in rows.items():
    measured = {
        measures.name(prefix, run.has_client_models): {
            name.removeprefix(prefix): value
            for name, value in row.items()
            if name.startswith(prefix)
        }
        for prefix in (
            *(measures.TEST, measures.CLIENT_TEST),
            *(*measures.SPREAD, measures.VALIDATION, measures.CLIENT_TRAIN),
        )
    }
    measured = {
        name: metrics
        for name, metrics in measured.items()
        if metrics or name == measures.OWN_DATA
    }
    lines += [
        f'After round {int(row["round"])}{what}, means over at most'
        f' {measures.MAX_CLIENTS} clients:',
        *_measured_lines(measured),
    ]
  return '\n'.join(lines)


def _measured_lines(measured: Mapping[str, Row]) -> list[str]:
  """Returns a line with the metrics of each quantity that has any."""
  width = max(map(len, measured)) + 2
  return [
      f'  {name + ":":{width}}'
      + ', '.join(f'{metric} {value:.4f}' for metric, value in metrics.items())
      for name, metrics in measured.items()
      if metrics
  ]


def counted_rows(run: Run, average_last: int) -> Sequence[Row]:
  """Returns the rows over which the table averages: the last ones.

  If the run keeps its best round, it is this one's row alone. The row of round
  0 never counts: its model is untrained.
  """
  if run.best_round is not None:
    return [row for row in run.rows if row['round'] == run.best_round]
  return [row for row in run.rows if row['round'] > 0][-average_last:]


def results(runs: Sequence[Run], average_last: int) -> pd.DataFrame:
  """Returns the table of results.csv.

  Args:
    runs: The runs.
    average_last: The number of evaluated rounds, counted from the last one,
      over which metrics and losses are averaged.

  Returns:
    A row for each run: its labels, its further flags, its seed and its numbers.
    A cell without a value is an empty text: NaN is a number of a diverged run.
  """
  shown = columns_of(runs)
  rows = [_result(run, shown, average_last) for run in runs]
  common = (_SEED, *(column.name for column in shown))
  described = dict.fromkeys(
      name for row in rows for name in row if name not in common
  )
  # The algorithm first.
  names = [*sorted(described, key=lambda name: name != ALGORITHM), *common]
  return pd.DataFrame(
      [{**dict.fromkeys(names, ''), **row} for row in rows], dtype=object
  )


def _result(
    run: Run, shown: Sequence[columns.Column], average_last: int
) -> dict[str, str | float]:
  """Returns the row of a run."""
  last = {'rounds': run.rows[-1]['round'], **run.rows[-1]}
  if run.best_round is not None:
    last[_BEST_ROUND] = run.best_round
  numbers = {}
  for column in shown:
    if column.kind.is_averaged:
      values = [
          row[column.name]
          for row in counted_rows(run, average_last)
          if column.name in row
      ]
      if values:
        # No more digits than metrics.csv has.
        numbers[column.name] = float(f'{statistics.fmean(values):.8g}')
    elif column.name in last:
      number = last[column.name]
      numbers[column.name] = number if column.kind.digits else int(number)
  # The number of rounds can be swept.
  return {**numbers, **run.labels, **run.flags, _SEED: run.seed}


def to_csv(table: pd.DataFrame) -> str:
  """Returns the text of results.csv."""
  return table.to_csv(index=False, na_rep='nan', lineterminator='\n')


def means(
    table: pd.DataFrame, labels: Sequence[str], numbers: Sequence[str]
) -> pd.DataFrame:
  """Returns means over the seeds.

  Args:
    table: What `results` returned.
    labels: The columns that tell the means apart.
    numbers: The columns of the means.

  Returns:
    A row for each combination of labels, in the order of the first ones. A mean
    is NaN if a run has no such number, or diverged.
  """
  values = table[list(numbers)].apply(pd.to_numeric)
  groups = values.groupby([table[name] for name in labels], sort=False)
  return groups.agg(statistics.fmean)


def results_markdown(
    table: pd.DataFrame,
    average_last: int,
    varied: Sequence[str] = (ALGORITHM,),
    sentences: Sequence[str] = (),
    runs: Sequence[Run] = (),
) -> str:
  """Returns the text of results.md.

  Args:
    table: What `results` returned.
    average_last: The number of evaluated rounds over which it averages.
    varied: The names of the labels. Each combination has a line.
    sentences: What the table shows.
    runs: The runs of the rows.
  """
  cells = table_cells(table, varied)
  over, *meanings = notes(table, average_last, runs)
  return tables.markdown(cells, [over, *sentences, *meanings], len(varied))


def table_cells(
    table: pd.DataFrame, varied: Sequence[str] = (ALGORITHM,)
) -> list[list[str]]:
  """Returns the table of means and standard deviations over the seeds.

  After the titles, there is a line for each combination of the labels `varied`
  of what `results` returned.
  """
  shown = _table_columns(table)
  varied = sorted(varied, key=lambda name: name != ALGORITHM)
  titles = ['Algorithm' if name == ALGORITHM else name for name in varied]
  # A label can have the name of a column: the number of rounds can be swept.
  labels = [table[name].rename(number) for number, name in enumerate(varied)]
  lines = table.groupby(labels, sort=False).agg(
      {column.name: functools.partial(_cell, column) for column in shown}
  )
  return [
      titles + [column.title for column in shown],
      *lines.reset_index().astype(str).to_numpy().tolist(),
  ]


def _cell(column: columns.Column, found: pd.Series) -> str:
  """Returns the cell of a column for runs that differ in the seed."""
  values = [column.kind.factor * float(value) for value in found if value != '']
  if values and not column.kind.is_averaged:
    values = [statistics.fmean(values)]
  return tables.mean_and_deviation(values, column.kind.digits)


def _table_columns(table: pd.DataFrame) -> list[columns.Column]:
  """Returns the columns of the table that a run has."""
  return [
      column
      for column in columns.by_kind(columns_of_table(table))
      if column.in_table
      and column.name in table
      and (table[column.name] != '').any()
  ]


def over_rounds(average_last: int, runs: Sequence[Run] = ()) -> str:
  """Says over which evaluated rounds the numbers of runs are means."""
  kept = dict.fromkeys(
      None if run.best_round is None else run.keep_best for run in runs
  ) or {None: None}
  return '; '.join(_over_rounds(average_last, metric) for metric in kept)


def _over_rounds(average_last: int, keep_best: Optional[str]) -> str:
  if keep_best is not None:
    return f'value of the round with the best {describe_validated(keep_best)}'
  if average_last == 1:
    return 'value of the last round'
  return f'mean over the last {average_last} evaluated rounds'


def describe_validated(metric: str) -> str:
  """Names the mean of a metric over the clients' validation data."""
  return f'validation {best_round.kind(metric).word}'


def measured_words(found: Sequence[columns.Column]) -> str:
  """Names the numbers of runs with these columns, to begin a sentence."""
  kinds = {column.kind.name for column in found if column.kind.is_averaged}
  is_accuracy = kinds == {'accuracy', columns.LOSS.name}
  return f'{"Accuracies" if is_accuracy else "Metrics"} and losses'


def over_seeds(table: pd.DataFrame) -> str:
  """Says over which seeds the numbers of `results` are means."""
  seeds = table[_SEED].nunique()
  return f'mean over {seeds} seeds' if seeds > 1 else 'one seed'


def notes(
    table: pd.DataFrame, average_last: int, runs: Sequence[Run] = ()
) -> list[str]:
  """Returns sentences that explain the table.

  The first one says over which rounds and seeds the numbers are means, the
  others are the meanings of the columns.
  """
  measured = measured_words(columns_of_table(table))
  over = f'{measured}: {over_rounds(average_last, runs)}; {over_seeds(table)}'
  if table[_SEED].nunique() > 1:
    over += ' ± standard deviation'
  over += '.'
  if average_last > 1 or any(run.keep_best for run in runs):
    over += (
        f' The progress and {run_folder.METRICS} have the values of single'
        ' rounds.'
    )
  return [
      over,
      *(
          f'{column.title}: {column.explanation or _measured(column, runs)}'
          f'{_direction(column.kind)}.'
          for column in _table_columns(table)
      ),
  ]


def _direction(kind: columns.Kind) -> str:
  """Says if lower is better."""
  return '; lower is better' if kind.higher_is_better is False else ''


def _measured(column: columns.Column, runs: Sequence[Run]) -> str:
  """Names what a column is measured on, for each algorithm if they differ."""
  names: dict[str, dict[str, None]] = {}
  algorithms: dict[str, None] = {}
  for run in runs:
    name = measures.name(column.name, run.has_client_models)
    algorithm = run.labels.get(ALGORITHM, run.name)
    names.setdefault(name, {})[algorithm] = None
    algorithms[algorithm] = None
  are_apart = sum(map(len, names.values())) == len(algorithms)
  if len(names) > 1 and are_apart:
    return '; '.join(
        f'{", ".join(found)}: {name}' for name, found in names.items()
    )
  return measures.name(column.name, have_client_models(runs))


# A value of `Evaluation.model`.
_OWN = 'own'


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The metrics and the loss of a saved model on some data.

  Attributes:
    model: 'global', or 'own' for the personal model of the client.
    client: The client whose test data is used; '' for the whole test set.
    num_examples: The number of examples.
    metrics: The metrics, the main one first, and then the mean loss, by name;
      None if there are no examples.
  """

  model: str
  client: str
  num_examples: int
  metrics: Mapping[str, Optional[float]]


def evaluation_table(
    evaluations: Sequence[Evaluation], reestimated: bool = False
) -> str:
  """Returns the evaluations as a Markdown table.

  If BN statistics were reestimated, the table says from which data.
  """
  kinds = [evaluated_kind(name) for name in evaluations[0].metrics]
  titles = [f'{kind.heading}{kind.unit}' for kind in kinds]
  cells = [['Test data', 'Model', 'Examples', *titles]]
  if reestimated:
    cells[0].insert(2, 'BN statistics from')
  for row in evaluations:
    cells.append(
        [
            row.client or measures.WHOLE_TEST_SET,
            row.model,
            str(row.num_examples),
            *(
                '–' if number is None else kind.text(number)
                for kind, number in zip(kinds, row.metrics.values())
            ),
        ]
    )
    if reestimated:
      whose = f'{row.client} alone' if row.client else 'all clients'
      cells[-1].insert(2, f'training data of {whose}')
  return tables.markdown(cells)


def evaluated_kind(name: str) -> columns.Kind:
  """Returns the kind of a number in `Evaluation.metrics`."""
  if name == columns.LOSS.name:
    return dataclasses.replace(columns.LOSS, digits=4)
  return tasks.kind(name)


def describe_evaluation(evaluations: Sequence[Evaluation]) -> str:
  """Describes what was evaluated in lines, in the words of `describe_end`.

  They have the metrics of the global model on the whole test set and, if
  clients have test data, the means over the clients' models on it, and how the
  main one differs between clients.
  """
  rows = [row for row in evaluations if row.num_examples]
  clients = [row for row in rows if row.client]
  measured = {
      measures.GLOBAL_MODEL: _mean_metrics([r for r in rows if not r.client]),
      measures.OWN_DATA: _mean_metrics(clients),
  }
  if len(clients) > 1:
    measured |= _spread(clients)
  num_clients = len(clients)
  lines = [
      f'Means over {num_clients} client{"" if num_clients == 1 else "s"}:',
      *_measured_lines(measured),
  ]
  if any(row.model == _OWN for row in rows):
    lines.append(
        f'The global model is merged from the own models. {run_folder.METRICS},'
        f' tff-bn-train and tff-bn-compare measure another number:'
        f' {measures.OWN_MODELS}.'
    )
  return '\n'.join(lines)


def _spread(clients: Sequence[Evaluation]) -> dict[str, dict[str, float]]:
  """Returns how the main metric differs between clients, see `spread`."""
  name = next(iter(clients[0].metrics))
  values = [row.metrics[name] for row in clients]
  found = client_metrics.spread(
      [math.nan if value is None else value for value in values],
      best_round.kind(name).higher_is_better,
  )
  return {
      measured: {name: number}
      for measured, number in zip(
          (measures.CLIENT_SPREAD, measures.WORST_CLIENTS), found
      )
      if not math.isnan(number)
  }


def _mean_metrics(evaluations: Sequence[Evaluation]) -> dict[str, float]:
  """Returns the means of metrics; the loss is first, as in metrics.csv.

  As there, an evaluation for which a metric is NaN, because it is undefined,
  does not count in its mean. Any NaN counts in the loss.
  """
  if not evaluations:
    return {}
  *names, loss = evaluations[0].metrics
  found = pd.DataFrame([row.metrics for row in evaluations])
  return {
      loss: found[loss].mean(skipna=False),
      **{name: found[name].mean() for name in names},
  }
