"""The numbers of the plots of `report.html`, as JSON can express them."""

from collections.abc import Iterable, Mapping, Sequence
import csv
import math
import pathlib
from typing import Any, Optional

import numpy as np

from tff_bn.programs.results import figures
from tff_bn.programs.results import plots
from tff_bn.programs.results import report
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_timing
from tff_bn.training import measures

# More rows of the label distribution can't be read.
MAX_CLIENTS = 200
_SECONDS = 'seconds'
# The columns of metrics.csv with curves.
_CURVES = (
    'test_accuracy',
    'client_test_accuracy',
    'train_loss',
    'test_loss',
    'client_test_loss',
)
# The titles of the horizontal axes, and their names in the choice.
_AXES = {
    'round': ('Round', 'rounds'),
    'exchanges': ('Exchanges between server and clients', 'exchanges'),
    'megabytes': ('MB sent', 'megabytes'),
    _SECONDS: ('Seconds (mean time of a round × rounds)', 'seconds'),
}
# The lengths of dashes and gaps in pixels, for styles of Matplotlib.
_DASHES: Mapping[str, Sequence[float]] = {
    '-': [],
    '--': [7, 4],
    '-.': [7, 3, 2, 3],
    ':': [2, 3],
}
_DIGITS = 6


def data(
    runs: Sequence[report.Run],
    folders: Sequence[pathlib.Path],
    varied: Sequence[str],
    label_counts: np.ndarray,
    client_ids: Sequence[str],
    class_names: Sequence[str] = (),
) -> dict[str, Any]:
  """Collects what the plots show.

  Args:
    runs: The runs; those that differ only in the seed become one line.
    folders: Their folders.
    varied: The names of the labels that differ between runs.
    label_counts: Examples by client and class, shape [clients, classes].
    client_ids: The clients' names.
    class_names: The classes' names. Default: their numbers.

  Returns:
    The lines of the curves, the axes among which the reader chooses, the
    clients' accuracies and their labels.
  """
  names = list(dict.fromkeys(run.name for run in runs))
  columns = [
      column
      for column in _CURVES
      if any(column in row for run in runs for row in run.rows)
  ]
  styles = _styles(runs)
  series = []
  for name in names:
    members = [run for run in runs if run.name == name]
    own_folders = [
        folder for run, folder in zip(runs, folders) if run.name == name
    ]
    series.append(
        {
            'name': name,
            'labels': dict(members[0].labels),
            'color': styles[name]['color'],
            'dash': _DASHES[styles[name]['linestyle']],
            **_curves(members, own_folders, columns),
        }
    )
  return {
      'series': series,
      'columns': [_column(column, runs) for column in columns],
      'axes': [
          {
              'name': axis,
              'title': title,
              'short': short,
              'log': plots.needs_logarithm(runs, axis),
          }
          for axis, (title, short) in _AXES.items()
          if any(any(line.get(axis, ())) for line in series)
      ],
      'filters': _filters(runs, varied),
      'clients': [
          [names.index(run.name), run.seed, client, accuracy]
          for run, folder in zip(runs, folders)
          for client, accuracy in client_accuracies(folder)
      ],
      'labels': {
          'clients': list(client_ids[:MAX_CLIENTS]),
          'counts': label_counts[:MAX_CLIENTS].tolist(),
          **({'classes': list(class_names)} if class_names else {}),
      },
  }


def _styles(runs: Sequence[report.Run]) -> dict[str, dict[str, str]]:
  """Returns the colors and dashes of lines by name.

  The runs of an algorithm have its color. If there is no other algorithm,
  colors tell apart what else differs.
  """
  labels = {run.name: run.labels for run in runs}
  algorithms = {
      name: named.get(report.ALGORITHM, '') for name, named in labels.items()
  }
  if len(set(algorithms.values())) == 1:
    return figures.line_styles(list(labels), algorithms)
  of_algorithms = figures.line_styles(list(dict.fromkeys(algorithms.values())))
  styles = {}
  counts: dict[str, int] = {}
  for name, algorithm in algorithms.items():
    number = counts.setdefault(algorithm, 0)
    counts[algorithm] += 1
    style = dict(of_algorithms[algorithm])
    dashes = list(figures.DASHES)
    first = dashes.index(style['linestyle'])
    style['linestyle'] = dashes[(first + number) % len(dashes)]
    styles[name] = style
  return styles


def _curves(
    runs: Sequence[report.Run],
    folders: Sequence[pathlib.Path],
    columns: Iterable[str],
) -> dict[str, Any]:
  """Returns means and deviations over seeds, and the costs, by round."""
  found = {column: plots.mean_and_deviation(runs, column) for column in columns}
  rounds = sorted({int(row['round']) for run in runs for row in run.rows})
  curves: dict[str, Any] = {'round': rounds}
  for axis in report.LAST_COLUMNS:
    costs = plots.costs_by_round(runs, axis)
    if costs:
      curves[axis] = [_rounded(costs.get(number)) for number in rounds]
  seconds = seconds_per_round(folders)
  if seconds is not None:
    curves[_SECONDS] = [_rounded(seconds * number) for number in rounds]
  curves['values'] = {}
  for column, (own_rounds, mean, deviation) in found.items():
    means, deviations = (
        dict(zip(own_rounds.tolist(), values.tolist()))
        for values in (mean, deviation)
    )
    if means:
      curves['values'][column] = {
          'mean': [_rounded(means.get(number)) for number in rounds],
          'deviation': [_rounded(deviations.get(number)) for number in rounds],
      }
  return curves


def _rounded(value: Optional[float]) -> Optional[float]:
  if value is None or not math.isfinite(value):
    return None
  return float(f'{value:.{_DIGITS}g}')


def seconds_per_round(folders: Sequence[pathlib.Path]) -> Optional[float]:
  """Returns the mean time of a round in runs; None if no time is known."""
  timings = [run_timing.read(folder) for folder in folders]
  known = [t.seconds / t.rounds for t in timings if t is not None and t.rounds]
  return float(np.mean(known)) if known else None


def _column(name: str, runs: Sequence[report.Run]) -> dict[str, Any]:
  """Describes the vertical axis of a column."""
  is_loss = name.endswith('loss')
  measured = measures.name(name, report.have_client_models(runs))
  return {
      'name': name,
      'title': f'{"Loss" if is_loss else "Accuracy"}: {measured}',
      'unit': 'Loss (cross-entropy)' if is_loss else 'Accuracy',
      'format': '~g' if is_loss else '~%',
      # With wrong BN statistics, losses differ by orders of magnitude.
      'log': is_loss,
  }


def _filters(
    runs: Sequence[report.Run], varied: Sequence[str]
) -> dict[str, list[str]]:
  """Returns the values of each label, if several labels vary."""
  values = {
      name: list(dict.fromkeys(run.labels[name] for run in runs))
      for name in varied
  }
  if len(values) < 2:
    return {}
  return {name: texts for name, texts in values.items() if len(texts) > 1}


def client_accuracies(folder: pathlib.Path) -> list[tuple[str, float]]:
  """Reads the accuracies of a run's clients.

  Args:
    folder: The run's folder.

  Returns:
    The id and the accuracy of each client; none if they are not there.

  Raises:
    ValueError: If the file is damaged. A run that failed has no checksum of it.
  """
  path = folder / run_folder.CLIENT_METRICS
  if not path.exists():
    return []
  try:
    with path.open(encoding='utf-8', newline='') as file:
      return [
          (row['client'], float(row['accuracy']))
          for row in csv.DictReader(file)
      ]
  except (ValueError, KeyError, TypeError, csv.Error) as error:
    raise ValueError(
        f'{path} is damaged. Remove it; the command of the run writes it again.'
    ) from error
