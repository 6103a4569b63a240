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

from tff_bn.catalog import columns
from tff_bn.common import csv_files
from tff_bn.programs.plan import axes
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_folder
from tff_bn.training import measures

Row = Mapping[str, float]
# A row of results.csv.
Result = Mapping[str, str | float]
ALGORITHM = axes.ALGORITHM
describe = axes.describe
_SEED = 'seed'


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
  """

  labels: Mapping[str, str]
  seed: int
  rows: Sequence[Row]
  flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
  has_client_models: Optional[bool] = None

  @property
  def name(self) -> str:
    """The name of the run in legends, which is the same for all seeds."""
    return describe(self.labels)


def have_client_models(runs: Sequence[Run]) -> Optional[bool]:
  """Whether the clients of runs have own models; None: only in some runs."""
  first, *others = {run.has_client_models for run in runs} or {None}
  return None if others else first


def read_metrics(text: str) -> list[dict[str, float]]:
  """Reads the text of a metrics.csv; missing values are left out."""
  return [
      {name: float(value) for name, value in row.items() if value}
      for row in csv.DictReader(io.StringIO(text))
  ]


def read_rows(folder: pathlib.Path) -> list[dict[str, float]]:
  """Reads the metrics of a run from its folder."""
  return read_metrics((folder / run_folder.METRICS).read_text(encoding='utf-8'))


def describe_last(rows: Sequence[Row], has_client_models: bool) -> str:
  """Describes the last row of a run in lines, for the end of its training.

  Args:
    rows: The rows of its metrics.csv.
    has_client_models: Whether the clients have own models.

  Returns:
    Its test metrics: on the whole test set and, if they are known, on the
    clients' own test data.
  """
  last = rows[-1]
  measured = {
      measures.name(prefix, has_client_models): {
          name.removeprefix(prefix): value
          for name, value in last.items()
          if name.startswith(prefix)
      }
      for prefix in (measures.TEST, measures.CLIENT_TEST)
  }
  return '\n'.join(
      [
          f'After round {int(last["round"])}, means over at most'
          f' {measures.MAX_CLIENTS} clients:',
          *_measured_lines(measured),
      ]
  )


def _measured_lines(measured: Mapping[str, Row]) -> list[str]:
  """Returns a line with the metrics of each quantity that has any."""
  width = max(map(len, measured)) + 2
  return [
      f'  {name + ":":{width}}'
      + ', '.join(f'{metric} {value:.4f}' for metric, value in metrics.items())
      for name, metrics in measured.items()
      if metrics
  ]


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
  for column in columns.averaged():
    last = [
        row[column.name]
        for row in last_rows(run, average_last)
        if column.name in row
    ]
    if last:
      # No more digits than metrics.csv has.
      values[column.name] = float(f'{statistics.fmean(last):.8g}')
  last_row = {'rounds': run.rows[-1]['round'], **run.rows[-1]}
  for column in columns.COLUMNS:
    if not column.kind.is_averaged and column.name in last_row:
      number = last_row[column.name]
      # The number of rounds can be swept.
      values.setdefault(
          column.name, number if column.kind.digits else int(number)
      )
  return values


def results_csv(results: Sequence[Result]) -> str:
  """Returns the text of results.csv for rows that `result` returned."""
  found = dict.fromkeys(itertools.chain.from_iterable(results))
  common = (_SEED, *(column.name for column in columns.COLUMNS))
  described = [name for name in found if name not in common]
  # The algorithm first.
  described.sort(key=lambda name: name != ALGORITHM)
  names = (*described, *common)
  return csv_files.to_csv(
      names, ([row.get(name) for name in names] for row in results)
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


def results_markdown(
    results: Sequence[Result],
    average_last: int,
    varied: Sequence[str] = (ALGORITHM,),
    sentences: Sequence[str] = (),
    runs: Sequence[Run] = (),
) -> str:
  """Returns the text of results.md.

  Args:
    results: Rows that `result` returned.
    average_last: The number of evaluated rounds over which they average.
    varied: The names of the labels.
    sentences: What the table shows.
    runs: The runs of the rows.

  Returns:
    A table with a line for each combination of labels, over which rounds and
    seeds its numbers are means, the sentences, and the meaning of the columns.
  """
  cells = table_cells(results, varied)
  means, *meanings = notes(results, average_last, runs)
  return tables.markdown(cells, [means, *sentences, *meanings], len(varied))


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
  shown = _table_columns(results)
  varied = sorted(varied, key=lambda name: name != ALGORITHM)
  titles = ['Algorithm' if name == ALGORITHM else name for name in varied]
  cells = [titles + [column.title for column in shown]]
  for labels, rows in by_labels(results, varied).items():
    line = [*labels]
    for column in shown:
      values = [
          column.kind.factor * float(row[column.name])
          for row in rows
          if column.name in row
      ]
      if values and not column.kind.is_averaged:
        values = [statistics.fmean(values)]
      line.append(tables.mean_and_deviation(values, column.kind.digits))
    cells.append(line)
  return cells


def _table_columns(results: Sequence[Result]) -> list[columns.Column]:
  """Returns the columns of the table that a row has."""
  return [
      column
      for column in columns.by_kind()
      if column.in_table and any(column.name in row for row in results)
  ]


def over_rounds(average_last: int) -> str:
  """Says over which rounds the numbers of a table are means.

  Args:
    average_last: The number of evaluated rounds over which they average.
  """
  if average_last == 1:
    return 'value of the last round'
  return f'mean over the last {average_last} evaluated rounds'


def over_seeds(results: Sequence[Result]) -> str:
  """Says over which seeds the numbers of a table are means.

  Args:
    results: Rows that `result` returned.
  """
  seeds = len({row[_SEED] for row in results})
  return f'mean over {seeds} seeds' if seeds > 1 else 'one seed'


def notes(
    results: Sequence[Result], average_last: int, runs: Sequence[Run] = ()
) -> list[str]:
  """Returns sentences that explain the table.

  Args:
    results: Rows that `result` returned.
    average_last: The number of evaluated rounds over which they average.
    runs: The runs of the rows.

  Returns:
    Over which rounds and seeds the numbers are means, and the meaning of each
    column.
  """
  means = f'Accuracies and losses: {over_rounds(average_last)}; '
  means += over_seeds(results)
  if len({row[_SEED] for row in results}) > 1:
    means += ' ± standard deviation'
  means += '.'
  if average_last > 1:
    means += (
        f' The progress and {run_folder.METRICS} have the values of single'
        ' rounds.'
    )
  return [
      means,
      *(
          f'{column.title}: {column.explanation or _measured(column, runs)}.'
          for column in _table_columns(results)
      ),
  ]


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


def evaluation_table(
    evaluations: Sequence[Evaluation], reestimated: bool = False
) -> str:
  """Returns the evaluations as a Markdown table.

  Args:
    evaluations: The evaluations.
    reestimated: Whether the models' BN statistics were computed again. The
      table then says from which data.
  """
  cells = [['Test data', 'Model', 'Examples', 'Accuracy, %', 'Loss']]
  if reestimated:
    cells[0].insert(2, 'BN statistics from')
  for row in evaluations:
    cells.append(
        [
            row.client or measures.WHOLE_TEST_SET,
            row.model,
            str(row.num_examples),
            '–' if row.accuracy is None else f'{100 * row.accuracy:.1f}',
            '–' if row.loss is None else f'{row.loss:.4f}',
        ]
    )
    if reestimated:
      whose = f'{row.client} alone' if row.client else 'all clients'
      cells[-1].insert(2, f'training data of {whose}')
  return tables.markdown(cells)


def describe_evaluation(evaluations: Sequence[Evaluation]) -> str:
  """Describes what was evaluated in lines, in the words of `describe_last`.

  Args:
    evaluations: The global model on the whole test set, and the clients' models
      on their own test data.

  Returns:
    The metrics of the global model and, if clients have test data, the means
    over the clients.
  """
  clients = [e for e in evaluations if e.client and e.num_examples]
  groups = {
      measures.GLOBAL_MODEL: [
          e for e in evaluations if not e.client and e.num_examples
      ],
      measures.OWN_DATA: clients,
  }
  measured = {
      name: {
          metric: statistics.fmean(getattr(row, metric) for row in rows)
          for metric in ('loss', 'accuracy')
          if rows
      }
      for name, rows in groups.items()
  }
  lines = [
      f'Means over {len(clients)} client{"" if len(clients) == 1 else "s"}:',
      *_measured_lines(measured),
  ]
  if any(row.model == _OWN for row in evaluations):
    lines.append(
        f'The global model is merged from the own models. {run_folder.METRICS},'
        f' tff-bn-train and tff-bn-compare measure another number:'
        f' {measures.OWN_MODELS}.'
    )
  return '\n'.join(lines)
