"""Metrics of each class, label or target: their CSV files and tables.

`class_metrics.csv`, or `target_metrics.csv` of a regression, has a row for each
class, label or target of each model; `confusion.csv` has the counts of the
pairs of a true and a predicted class that occur; `calibration.csv` has a row
for each model. See `tff_bn.training.detailed_reports` for the numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import csv
import dataclasses
import math
import pathlib
import statistics
from typing import Any, NamedTuple, Optional, TextIO

from tff_bn.catalog import columns
from tff_bn.catalog import tasks
from tff_bn.common import csv_files
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_folder
from tff_bn.training import detailed_reports

# The titles of counts. All other numbers are metrics of the catalog.
_COUNTS = {
    'num_examples': 'Examples',
    'num_pixels': 'Pixels',
    'true_positives': 'TP',
    'false_positives': 'FP',
    'false_negatives': 'FN',
    'true_negatives': 'TN',
}
# What has the metrics; in other tasks it is a class.
_NOUNS = {tasks.MULTILABEL: 'label', tasks.REGRESSION: 'target'}
# The columns that tell models and their data apart.
_MODEL = ('model', 'client')
_CONFUSION = (*_MODEL, 'true', 'predicted', 'count')
_CALIBRATION = (*_MODEL, 'num_examples', columns.CALIBRATION_ERROR.name)
_MAX_PRINTED_ROWS = 20
# Larger matrices could not be read.
_MAX_MATRIX_CLASSES = 100
_Number = Optional[float]


@dataclasses.dataclass(frozen=True)
class Details:
  """The detailed metrics of a model on some data, as its files have them.

  Attributes:
    model: 'global', or 'own' for the personal model of the client.
    client: The client whose test data is used; '' for the whole test set.
    names: The names of the metrics.
    rows: The metrics of each class, label or target, by its name. None: it is
      undefined.
    confusion: The counts of the pairs of a true and a predicted class that
      occur; the predicted class '' stands for none.
    num_examples: The number of examples, if there is a calibration error.
    calibration_error: The expected calibration error.
  """

  model: str
  client: str
  names: tuple[str, ...]
  rows: Mapping[str, Sequence[_Number]]
  confusion: Mapping[tuple[str, str], int]
  num_examples: Optional[int] = None
  calibration_error: _Number = None

  @classmethod
  def of(
      cls, report: detailed_reports.DetailedReport, model: str, client: str
  ) -> 'Details':
    """Returns the details of a report."""
    confusion = {}
    if report.confusion is not None and report.unpredicted is not None:
      for true, row, missed in zip(
          report.class_names,
          report.confusion.tolist(),
          report.unpredicted.tolist(),
      ):
        counts = zip((*report.class_names, ''), (*row, missed))
        confusion.update({(true, name): n for name, n in counts if n})
    numbers = zip(*(values.tolist() for values in report.metrics.values()))
    error = report.calibration_error
    return cls(
        model,
        client,
        tuple(report.metrics),
        {
            name: tuple(map(_defined, row))
            for name, row in zip(report.class_names, numbers)
        },
        confusion,
        None if error is None else report.num_examples,
        None if error is None else _defined(error),
    )


def _defined(number: float) -> _Number:
  return None if math.isnan(number) else number


class Writer:
  """Writes the files about some models, one model after another."""

  def __init__(self, task: str, open_file: Callable[[str], TextIO]):
    """Initializes the writer, and opens no file.

    Args:
      task: The models' task.
      open_file: Opens the file with a name for writing. The one who opens a
        file also closes it.
    """
    self._task = task
    self._open_file = open_file
    # By the files' names.
    self._files: dict[str, csv_files.Writer] = {}

  def add(self, details: Details) -> None:
    """Writes the rows of a model."""
    metrics = _metrics_file(self._task)
    model = (details.model, details.client)
    self._write(
        metrics.name,
        (*_MODEL, metrics.column, *details.names),
        ((*model, name, *numbers) for name, numbers in details.rows.items()),
    )
    if self._task not in (tasks.REGRESSION, tasks.MULTILABEL):
      self._write(
          run_folder.CONFUSION,
          _CONFUSION,
          ((*model, *pair, count) for pair, count in details.confusion.items()),
      )
    if details.num_examples is not None:
      self._write(
          run_folder.CALIBRATION,
          _CALIBRATION,
          [(*model, details.num_examples, details.calibration_error)],
      )

  def _write(
      self, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]
  ) -> None:
    if name not in self._files:
      self._files[name] = csv_files.Writer(self._open_file(name), header)
    self._files[name].add(rows)


class _MetricsFile(NamedTuple):
  """The file with the metrics of a task, and its column of the names."""

  name: str
  column: str


def metrics_file(task: str) -> str:
  """Returns the name of the file with the metrics of a task."""
  return _metrics_file(task).name


def _metrics_file(task: str) -> _MetricsFile:
  if task == tasks.REGRESSION:
    return _MetricsFile(run_folder.TARGET_METRICS, 'target')
  return _MetricsFile(run_folder.CLASS_METRICS, 'class')


def read(
    folder: pathlib.Path, task: str, *, only_global: bool = False
) -> list[Details]:
  """Reads what a `Writer` wrote into the folder of a run.

  Args:
    folder: The run's folder. If it lacks the files, there are no details.
    task: The run's task.
    only_global: Whether to read the global model only, which comes first.

  Raises:
    ValueError: If a file is damaged.
  """
  metrics = _metrics_file(task)
  names = [metrics.name, run_folder.CONFUSION, run_folder.CALIBRATION]
  try:
    return _read(metrics.column, [folder / name for name in names], only_global)
  except (ValueError, KeyError, TypeError, csv.Error) as error:
    raise ValueError(
        f'One of {", ".join(names)} in {folder} is damaged. Remove them; the'
        ' command of the run writes them again.'
    ) from error


def _read(
    column: str, paths: Iterable[pathlib.Path], only_global: bool
) -> list[Details]:
  """Reads details; `column` has the names of classes, labels or targets."""
  found: dict[tuple[str, str], dict[str, Any]] = {}
  for path in paths:
    for key, row in _rows(path, only_global):
      if column in row:
        name = row.pop(column)
        part = found.setdefault(
            key, dict(names=tuple(row), rows={}, confusion={})
        )
        part['rows'][name] = tuple(map(_number, row.values()))
      elif 'predicted' in row:
        pair = row['true'], row['predicted']
        found[key]['confusion'][pair] = int(row['count'])
      else:
        found[key].update(
            num_examples=int(row['num_examples']),
            calibration_error=_number(row[columns.CALIBRATION_ERROR.name]),
        )
  return [Details(*key, **part) for key, part in found.items()]


def _rows(
    path: pathlib.Path, only_global: bool
) -> Iterator[tuple[tuple[str, str], dict[str, str]]]:
  """Yields the model and the client of each row of a file, and the rest."""
  if not path.exists():
    return
  with path.open(encoding='utf-8', newline='') as file:
    for row in csv.DictReader(file, strict=True):
      key = row.pop('model'), row.pop('client')
      if only_global and key[1]:
        return
      yield key, row


def _number(text: str) -> _Number:
  return None if text == '' else float(text)  # No text is a TypeError.


def noun(task: str) -> str:
  """Returns what has the metrics of a task: 'class', 'label' or 'target'."""
  return _NOUNS.get(task, 'class')


def titles(task: str, names: Iterable[str]) -> list[str]:
  """Returns the titles of a table of metrics with these names."""
  found = [noun(task).capitalize()]
  for name in names:
    kind = tasks.kind(name)
    found.append(_COUNTS.get(name) or f'{kind.heading}{kind.unit}')
  return found


def cells(details: Details) -> list[list[str]]:
  """Returns the lines of a table of metrics, without the titles."""
  return [
      [name, *(_text(*pair) for pair in zip(details.names, numbers))]
      for name, numbers in details.rows.items()
  ]


def _text(name: str, number: _Number) -> str:
  if number is None:
    return '–'
  if name in _COUNTS:
    return columns.COUNT.text(number)
  return tasks.kind(name).text(number)


def calibration(details: Details) -> str:
  """Returns the calibration error in words; empty if there is none."""
  kind = columns.CALIBRATION_ERROR
  if details.calibration_error is None:
    return ''
  return f'{kind.word} {kind.text(details.calibration_error)} %'


def markdown(task: str, details: Details) -> str:
  """Returns the table for the terminal, of the first classes or targets."""
  lines = [
      # A row of the table is one line.
      [' '.join(name.splitlines()), *texts]
      for name, *texts in cells(details)
  ]
  text = tables.markdown(
      [titles(task, details.names), *lines[:_MAX_PRINTED_ROWS]]
  )
  hidden = len(lines) - _MAX_PRINTED_ROWS
  if hidden > 0:
    text += f'\n\n… and {hidden} more rows in the table.'
  error = calibration(details)
  return f'{text}\n\n{error.capitalize()}' if error else text


def means(
    task: str, details: Sequence[Details]
) -> tuple[list[str], list[list[str]]]:
  """Returns the table of a model of several seeds: its titles and lines.

  Metrics have the mean and the standard deviation over the seeds for which they
  are defined, and counts have the mean.
  """
  names = details[0].names
  lines = []
  for name in dict.fromkeys(name for part in details for name in part.rows):
    rows = [part.rows[name] for part in details if name in part.rows]
    line = [name]
    for metric, values in zip(names, zip(*rows)):
      defined = [value for value in values if value is not None]
      if metric in _COUNTS and defined:
        line.append(columns.COUNT.text(statistics.fmean(defined)))
      else:
        kind = tasks.kind(metric)
        line.append(
            tables.mean_and_deviation(
                [kind.factor * value for value in defined], kind.digits
            )
        )
    lines.append(line)
  return titles(task, names), lines


class Matrix(NamedTuple):
  """A confusion matrix.

  Attributes:
    columns: The predicted classes; '' stands for none.
    rows: Each true class with the count of each predicted class, and the share
      that it is of the row.
  """

  columns: list[str]
  rows: list[tuple[str, list[tuple[int, float]]]]


def matrix(
    details: Details, max_classes: int = _MAX_MATRIX_CLASSES
) -> Optional[Matrix]:
  """Returns a confusion matrix to be drawn.

  The matrix of a client has only classes that occur or are predicted. None: it
  is empty, or it has more than `max_classes`.
  """
  counts = details.confusion
  predicted = {column for _, column in counts}
  found = predicted.union(row for row, _ in counts)
  names = [n for n in details.rows if n in found or not details.client]
  if not counts or len(names) > max_classes:
    return None
  shown = [*names, *([''] if '' in predicted and '' not in names else [])]
  rows = []
  for name in names:
    row = [counts.get((name, column), 0) for column in shown]
    total = sum(row) or 1
    rows.append((name, [(count, count / total) for count in row]))
  return Matrix(shown, rows)
