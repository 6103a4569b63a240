"""Weight divergence of the clients of finished runs.

Figure 6 of Li et al., Federated Learning with Position-Aware Neurons, CVPR
2022.
"""

from collections.abc import Sequence

import numpy as np

from tff_bn import position_aware
from tff_bn.programs import cli
from tff_bn.programs.analyses.position_aware import analyzed_run
from tff_bn.programs.analyses.position_aware import report


def analyze(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> report.Report:
  """Trains clients of each run for a round, and measures how they diverge.

  Args:
    runs: The runs.
    flags: The program's flags.

  Returns:
    The divergence of each layer, and the accuracies of the global models.
  """
  rows = []
  for run in runs:
    clients = run.draw_clients(flags.num_clients, flags.seed)
    by_round = [
        position_aware.weight_divergence_by_layer(
            [run.model.to_keras(weights) for weights in trained]
        )
        for trained in run.train_rounds(clients, flags.num_rounds)
    ]
    rows += [
        report.LayerValue(
            *(run.name, run.seed, '', layer, ''),
            float(np.mean([divergences[layer] for divergences in by_round])),
        )
        for layer in by_round[0]
    ]
  return report.Report(
      report.layer_csv(rows, 'divergence'),
      report.layer_markdown(rows, 4, _notes(runs, flags.num_rounds)),
      dict(
          weight_divergence=report.layer_figure(
              rows, 'Mean distance from mean', 'Weight divergence by layer'
          )
      ),
  )


def check(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> None:
  """Raises a `ValueError` if what the flags ask for is impossible."""
  for run in runs:
    clients = run.draw_clients(flags.num_clients, flags.seed)
    if len(clients) < 2:
      raise ValueError(
          f'--run={run.folder} trains one client in a round, which diverges'
          ' from none; ask for more by --num_clients.'
      )
    if flags.num_rounds > 1 and run.has_client_models:
      raise ValueError(
          f'--num_rounds={flags.num_rounds} is impossible: the clients of'
          f' --run={run.folder} have models of their own, but between rounds'
          ' FedAvg makes one model. Use --num_rounds=1.'
      )


def _notes(
    runs: Sequence[analyzed_run.AnalyzedRun], num_rounds: int
) -> list[str]:
  notes = [
      "Mean Euclidean distance of the clients' trainable weights from their"
      ' mean, after local training '
      + (
          "in the round after the run's last one."
          if num_rounds == 1
          else f"in each of the {num_rounds} rounds after the run's last one;"
          ' mean over these rounds.'
      )
  ]
  for name in dict.fromkeys(run.name for run in runs):
    accuracies = [run.test_accuracy for run in runs if run.name == name]
    notes.append(
        f'Test accuracy of {name}: {100 * np.mean(accuracies):.2f} %'
        + (
            f' ± {100 * np.std(accuracies, ddof=1):.2f} over'
            f' {len(accuracies)} seeds.'
            if len(accuracies) > 1
            else '.'
        )
    )
  return notes
