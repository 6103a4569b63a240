"""The points of curves: means and deviations over the seeds, by round."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, Optional

import pandas as pd

from tff_bn.catalog import columns
from tff_bn.programs.results import report
from tff_bn.training import measures

# The horizontal axes that are no columns of results.
ROUND = 'round'
SECONDS = 'seconds'
_DIGITS = 6
_Runs = Sequence[report.Run]


def totals(runs: _Runs, column: str) -> list[float]:
  """Returns the totals in a column of the runs that send anything."""
  found = [run.rows[-1].get(column, 0) for run in runs]
  return [total for total in found if total > 0]


def columns_of(runs: _Runs) -> list[columns.Column]:
  """Returns the columns with curves that a run has.

  A column has no curve if its metric is undefined in all rows, such as the AUC
  of clients with a single class.
  """
  return [
      column
      for column in columns.by_kind(report.columns_of(runs))
      if column.kind.is_averaged
      and column.has_curve
      and any(
          math.isfinite(row.get(column.name, math.nan))
          for run in runs
          for row in run.rows
      )
  ]


def by_name(
    runs: _Runs, name: Callable[[report.Run], str] = lambda run: run.name
) -> dict[str, list[report.Run]]:
  """Groups runs by the name of their line: usually, the seeds of one run."""
  groups: dict[str, list[report.Run]] = {}
  for run in runs:
    groups.setdefault(name(run), []).append(run)
  return groups


def values(
    groups: Mapping[str, _Runs],
    seconds: Mapping[str, Optional[float]] = {},
) -> list[dict[str, Any]]:
  """Returns the points of curves.

  Args:
    groups: The runs of each line by its name.
    seconds: The time of a round by the lines' names, if it is known.

  Returns:
    For each line and round, its costs, and each column's mean and sample
    standard deviation over the seeds (0 for one value): `test_loss` and
    `test_loss_deviation`. Values that are not finite are left out.
  """
  all_runs = [run for runs in groups.values() for run in runs]
  measured = columns.averaged(report.columns_of(all_runs))
  shown = [*columns.costs(), *measured]
  names = [column.name for column in shown]
  points = []
  for name, runs in groups.items():
    time = seconds.get(name)
    rows = pd.DataFrame([row for run in runs for row in run.rows])
    rows = rows.reindex(columns=[ROUND, *names])
    rows = rows.replace([math.inf, -math.inf], math.nan)
    by_round = rows.groupby(ROUND)[names].agg(['mean', 'std'])
    for number, found in by_round.to_dict('index').items():
      point: dict[str, Any] = {'name': name, ROUND: int(number)}
      if time is not None:
        point[SECONDS] = _rounded(time * number)
      for column in shown:
        mean, deviation = found[column.name, 'mean'], found[column.name, 'std']
        if math.isfinite(mean):
          point[column.name] = _rounded(mean)
          if column.kind.is_averaged:
            is_single = math.isnan(deviation)
            point[deviation_of(column.name)] = (
                0.0 if is_single else _rounded(deviation)
            )
      points.append(point)
  return points


def deviation_of(column: str) -> str:
  """Returns the name of a column's deviations in `values`."""
  return f'{column}_deviation'


def _rounded(value: float) -> float:
  return float(f'{value:.{_DIGITS}g}')


def title(column: columns.Column, runs: _Runs) -> str:
  """Returns the title of a chart: the quantity, the model and the data."""
  measured = measures.name(column.name, report.have_client_models(runs))
  return f'{column.kind.heading}: {measured}'


def band_note(runs: _Runs) -> str:
  """Explains the bands of curves; empty if there are none."""
  num_seeds = len({run.seed for run in runs})
  if num_seeds == 1:
    return ''
  return f'line: mean over {num_seeds} seeds, band: ± one standard deviation'
