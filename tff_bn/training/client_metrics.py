"""The clients' results after the last round: `client_metrics.csv`."""

from collections.abc import Mapping
import pathlib

from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.training import evaluation
from tff_bn.training import run_entries

_DIGITS = 7  # As in metrics.csv.


def write(
    run_dir: pathlib.Path,
    round_num: int,
    results: Mapping[str, evaluation.Metrics],
) -> None:
  """Writes the results of the clients that have test data.

  Args:
    run_dir: The run's folder.
    round_num: The number of finished rounds.
    results: The results of `Evaluator.evaluate` by client id, at least one.
  """
  numbers = {
      client_id: evaluation.numbers(result)
      for client_id, result in results.items()
  }
  names = list(next(iter(numbers.values())))
  files.replace(
      run_dir / run_entries.CLIENT_METRICS,
      csv_files.to_csv(
          ['round', 'client', *names],
          (
              [round_num, client_id, *(result[name] for name in names)]
              for client_id, result in numbers.items()
              if result['num_examples']
          ),
          _DIGITS,
      ),
  )
