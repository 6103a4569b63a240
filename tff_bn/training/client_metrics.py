"""The results of single clients: `client_metrics.csv`."""

from collections.abc import Callable, Mapping, Sequence
import math
import pathlib
from typing import Any, Optional

import numpy as np

from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.training import measures
from tff_bn.training import run_entries

_DIGITS = 7  # As in metrics.csv.
_WORST_SHARE = 0.1
# The round, the client and the numbers by name.
Row = dict[str, Any]


class ClientMetrics:
  """Writes a row for each client that has test data.

  The file has the rows of the last round, of the best one if it is kept or,
  over time, of each evaluated round. A run that continues takes over the rows
  of the checkpoint.
  """

  def __init__(
      self,
      run_dir: pathlib.Path,
      *,
      is_over_time: bool,
      is_due: Callable[[int], bool],
  ):
    """Initializes the file's rows, and writes nothing.

    Args:
      run_dir: The run's folder.
      is_over_time: Whether earlier rounds keep their rows.
      is_due: Returns whether a round is evaluated.
    """
    self._path = run_dir / run_entries.CLIENT_METRICS
    self._is_due = is_due
    self._rows: list[Row] = []
    # The rounds of the rows; all clients of a round may be without test data.
    self._rounds: set[int] = set()
    self.is_over_time = is_over_time

  def has(self, round_num: int) -> bool:
    """Whether the file has the rows of a round."""
    return round_num in self._rounds

  def rows_until(self, round_num: int) -> list[Row]:
    """Returns the rows up to a round that a checkpoint needs."""
    if not self.is_over_time:
      return []
    return [row for row in self._rows if row['round'] <= round_num]

  def restore(self, rows: Sequence[Row]) -> None:
    """Continues after the rows of a checkpoint, see `rows_until`."""
    self._rows = [dict(row) for row in rows if self._is_due(row['round'])]
    self._rounds = {row['round'] for row in self._rows}
    if self._rows:
      self._write(list(self._rows[0]))

  def add(
      self, round_num: int, results: Mapping[str, Mapping[str, Any]]
  ) -> None:
    """Writes the results of a round.

    Unless the file is over time, it loses the rows of earlier rounds.

    Args:
      round_num: The round.
      results: The numbers of each client by name, in the order of the rows; see
        `evaluation.numbers`. Clients without examples have no row.
    """
    self._rounds = {
        r for r in self._rounds if self.is_over_time or r > round_num
    } | {round_num}
    self._rows = [
        row
        for row in self._rows
        if row['round'] in self._rounds and row['round'] != round_num
    ]
    self._rows += [
        {'round': round_num, 'client': client_id, **found}
        for client_id, found in results.items()
        if found['num_examples']
    ]
    self._rows.sort(key=lambda row: row['round'])
    names = list(next(iter(results.values())))
    self._write(['round', 'client', *names])

  def _write(self, header: Sequence[str]) -> None:
    cells = ([row[name] for name in header] for row in self._rows)
    text = csv_files.to_csv(header, cells, _DIGITS)
    files.replace(self._path, text)


def spread(
    values: Sequence[float], higher_is_better: Optional[bool]
) -> tuple[float, float]:
  """Describes how a metric differs between clients.

  Args:
    values: The metric of each client. NaN, an undefined metric, does not count.
    higher_is_better: Which of two values is better; None if it is unknown.

  Returns:
    The standard deviation (the root of the mean squared distance from the
    mean), and the mean over the worst tenth of the clients, at least one. A
    number is NaN if no value is defined, or if it is unknown which are worst.
  """
  defined = np.asarray([v for v in values if not math.isnan(v)], np.float64)
  if not defined.size:
    return math.nan, math.nan
  if higher_is_better is None:
    return float(defined.std()), math.nan
  ordered = np.sort(defined)
  if not higher_is_better:
    ordered = ordered[::-1]
  num_worst = math.ceil(_WORST_SHARE * defined.size)
  return float(defined.std()), float(ordered[:num_worst].mean())


def spread_columns(
    results: Mapping[str, Mapping[str, Any]],
    metric: str,
    higher_is_better: Optional[bool],
) -> dict[str, float]:
  """Returns the columns of `metrics.csv` with the `spread` of a metric.

  `results` has the numbers of each client by name, with `num_examples`.
  Undefined numbers are left out.
  """
  values = [
      float(found[metric])
      for found in results.values()
      if found['num_examples']
  ]
  return {
      f'{prefix}{metric}': number
      for prefix, number in zip(
          measures.SPREAD, spread(values, higher_is_better), strict=True
      )
      if not math.isnan(number)
  }
