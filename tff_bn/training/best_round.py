"""The best round of a run by a validated metric, and the early end of a run.

Importing this module imports no TensorFlow.
"""

from collections.abc import Collection, Iterable, Mapping
import dataclasses
import math
from typing import Optional

from tff_bn.catalog import columns
from tff_bn.catalog import tasks
from tff_bn.training import measures

# The rows of `metrics.csv`, oldest first.
_Rows = Iterable[Mapping[str, Optional[float]]]


def kind(metric: str) -> columns.Kind:
  """Returns the kind of a metric, or of the loss."""
  return columns.LOSS if metric == columns.LOSS.name else tasks.kind(metric)


@dataclasses.dataclass(frozen=True)
class BestRound:
  """Chooses the best evaluated round.

  Attributes:
    metric: `loss` or the name of a metric. The best round is the first one with
      the best mean over the clients' validation data.

  Raises:
    ValueError: If it is not known whether a higher value is better.
  """

  metric: str

  def __post_init__(self):
    if not kind(self.metric).has_direction:
      raise ValueError(
          f'keep_best={self.metric} is impossible: it is not known whether'
          f' higher values of {self.metric} are better. Use'
          f' {columns.LOSS.name}, or another metric.'
      )

  @property
  def column(self) -> str:
    """The column of `metrics.csv` that decides."""
    return f'{measures.VALIDATION}{self.metric}'

  def check(self, names: Collection[str], *, has_validation: bool) -> None:
    """Checks that a run has the metric and validation data.

    Raises:
      ValueError: If it has not.
    """
    if self.metric not in names:
      raise ValueError(
          f'keep_best={self.metric}: there is no such metric, only'
          f' {", ".join(names)}.'
      )
    if not has_validation:
      raise ValueError(
          f'keep_best={self.metric} needs validation data; set a part of the'
          ' training data apart.'
      )

  def find(self, rows: _Rows) -> Optional[int]:
    """Returns the best round after round 0; None if no value is finite."""
    best: Optional[tuple[float, int]] = None
    sign = 1 if kind(self.metric).higher_is_better else -1
    for row in rows:
      value, round_num = row.get(self.column), int(row['round'] or 0)
      if value is None or not math.isfinite(value) or not round_num:
        continue
      if best is None or sign * value > best[0]:
        best = sign * value, round_num
    return None if best is None else best[1]

  def ends(self, rows: _Rows, patience: Optional[int]) -> bool:
    """Whether a run ends early.

    Args:
      rows: The rows of `metrics.csv` up to now.
      patience: The number of evaluations in a row without a better value after
        which a run ends; None: never.
    """
    if patience is None:
      return False
    rounds = [int(row['round'] or 0) for row in rows]
    best = self.find(rows) or 0
    return sum(round_num > best for round_num in rounds) >= patience
