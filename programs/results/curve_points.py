"""The points of curves: means and deviations over the seeds, by round."""

from collections.abc import Callable, Mapping, Sequence
import math
import statistics
from typing import Any, Optional

import numpy as np

from tff_bn.catalog import columns
from tff_bn.programs.results import report
from tff_bn.training import measures

# The horizontal axes that are no columns of results.
ROUND = 'round'
SECONDS = 'seconds'
# Runs share a linear axis if the totals that they have sent differ by at most
# this factor. Then every curve has a fifth of the axis.
_MAX_LINEAR_RATIO = 5
# A line with more points has no circles.
_MAX_CIRCLES = 10
_DIGITS = 6


def mean_and_deviation(
    runs: Sequence[report.Run], column: str
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


def costs_by_round(runs: Sequence[report.Run], column: str) -> dict[int, float]:
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


def totals(runs: Sequence[report.Run], column: str) -> list[float]:
  """Returns the totals in a column of the runs that send anything."""
  found = [run.rows[-1].get(column, 0) for run in runs]
  return [total for total in found if total > 0]


def needs_logarithm(runs: Sequence[report.Run], axis: str) -> bool:
  """Whether a common linear axis would hide some of the runs."""
  if axis == ROUND:
    return False
  found = totals(runs, axis)
  return bool(found) and max(found) > _MAX_LINEAR_RATIO * min(found)


def columns_of(runs: Sequence[report.Run]) -> list[columns.Column]:
  """Returns the columns with curves that a run has."""
  return [
      column
      for column in columns.by_kind()
      if column.kind.is_averaged
      and any(column.name in row for run in runs for row in run.rows)
  ]


def by_name(
    runs: Sequence[report.Run],
    name: Callable[[report.Run], str] = lambda run: run.name,
) -> dict[str, list[report.Run]]:
  """Groups runs, usually those that differ only in the seed.

  Args:
    runs: The runs.
    name: Returns the name of a run's line.

  Returns:
    The runs of each line by its name.
  """
  groups: dict[str, list[report.Run]] = {}
  for run in runs:
    groups.setdefault(name(run), []).append(run)
  return groups


def values(
    groups: Mapping[str, Sequence[report.Run]],
    seconds: Mapping[str, Optional[float]] = {},
) -> list[dict[str, Any]]:
  """Returns the points of curves.

  Args:
    groups: The runs of each line by its name.
    seconds: The time of a round by the lines' names, if it is known.

  Returns:
    For each line and round, its costs, and each column's mean and deviation
    over the seeds: `test_loss` and `test_loss_deviation`.
  """
  rows: list[dict[str, Any]] = []
  for name, runs in groups.items():
    by_round: dict[int, dict[str, Any]] = {
        number: {'name': name, 'round': number}
        for number in sorted(
            {int(r['round']) for run in runs for r in run.rows}
        )
    }
    for column in columns.costs():
      for number, cost in costs_by_round(runs, column.name).items():
        by_round[number][column.name] = _rounded(cost)
    time = seconds.get(name)
    if time is not None:
      for number, row in by_round.items():
        row[SECONDS] = _rounded(time * number)
    for column in columns.averaged():
      for number, mean, deviation in zip(
          *map(np.ndarray.tolist, mean_and_deviation(runs, column.name))
      ):
        by_round[number][column.name] = _rounded(mean)
        by_round[number][deviation_of(column)] = _rounded(deviation)
    rows += by_round.values()
  return rows


def deviation_of(column: columns.Column) -> str:
  """Returns the name of a column's deviations in `values`."""
  return f'{column.name}_deviation'


def are_few(rows: Sequence[Mapping[str, Any]]) -> bool:
  """Whether the lines with these `values` are so short that they need circles.

  A single point has no line.
  """
  return len(rows) <= _MAX_CIRCLES * len({row['name'] for row in rows})


def _rounded(value: float) -> Optional[float]:
  return float(f'{value:.{_DIGITS}g}') if math.isfinite(value) else None


def measured_on(column: columns.Column, runs: Sequence[report.Run]) -> str:
  """Names what a column is measured on, for titles.

  Args:
    column: The column.
    runs: The runs that the chart shows.

  Returns:
    The name, which begins with a capital letter.
  """
  name = measures.name(column.name, report.have_client_models(runs))
  return f'{name[:1].upper()}{name[1:]}'


def band_note(runs: Sequence[report.Run]) -> str:
  """Explains the bands of curves; empty if there are none."""
  num_seeds = len({run.seed for run in runs})
  if num_seeds == 1:
    return ''
  return f'line: mean over {num_seeds} seeds, band: ± one standard deviation'
