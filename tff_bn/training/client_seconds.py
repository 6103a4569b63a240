"""How long clients take in a round: `client_seconds.csv`."""

from collections.abc import Sequence
import pathlib

import tensorflow_federated as tff

from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.training import run_entries

_DIGITS = 4


class ClientSeconds:
  """Adds up the seconds of each client, where the runtime measures them.

  The first client of a run waits until the computation is traced. Clients that
  are computed at the same time share the cores.
  """

  def __init__(self) -> None:
    self._totals: dict[str, tuple[int, float]] = {}

  def add_round(self, client_ids: Sequence[str]) -> None:
    """Adds the round that the default context has just computed."""
    context = tff.framework.get_context_stack().current
    seconds = getattr(context, 'client_seconds', None)
    # Otherwise the clients were computed as one, or are not measured.
    if seconds is None or len(seconds) != len(client_ids):
      return
    for client_id, number in zip(client_ids, seconds):
      rounds, total = self._totals.get(client_id, (0, 0.0))
      self._totals[client_id] = rounds + 1, total + number

  def write(self, run_dir: pathlib.Path) -> None:
    """Writes a row for each client, the slowest first; none: writes nothing."""
    if not self._totals:
      return
    rows = [
        (client_id, rounds, total / rounds)
        for client_id, (rounds, total) in self._totals.items()
    ]
    rows.sort(key=lambda row: -row[-1])
    files.replace(
        run_dir / run_entries.CLIENT_SECONDS,
        csv_files.to_csv(
            ['client', 'rounds', 'seconds_per_round'], rows, _DIGITS
        ),
    )
