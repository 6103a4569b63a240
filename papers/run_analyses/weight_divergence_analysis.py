"""Weight divergence of the clients of finished runs.

Figure 6 of Li et al., Federated Learning with Position-Aware Neurons, CVPR
2022.
"""

from typing import NamedTuple

import numpy as np
from typing_extensions import override

from tff_bn.papers import analysis_report
from tff_bn.papers import units
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.papers.run_analyses import run_analysis
from tff_bn.papers.run_analyses import run_tables
from tff_bn.programs.results import tables


class Divergence(NamedTuple):
  """The weight divergence of a layer, the mean over rounds."""

  run: str
  seed: int
  layer: str
  divergence: float


class Analysis(run_analysis.RunAnalysis):
  """Trains clients of each run, and measures how far their weights diverge."""

  needs_accuracy = True

  @override
  def check_run(self, run: analyzed_run.AnalyzedRun) -> None:
    clients = run.draw_clients(self.flags.num_clients, self.flags.seed)
    if len(clients) < 2:
      raise ValueError(
          'the run trains one client in a round, but divergence needs at least'
          ' two; use --num_clients=2 or more.'
      )
    if self.flags.num_rounds > 1 and run.has_client_models:
      raise ValueError(
          f'--num_rounds={self.flags.num_rounds} is impossible: the clients'
          ' have their own models, but FedAvg averages all models between'
          ' rounds. Use --num_rounds=1.'
      )

  @override
  def analyze(self) -> analysis_report.Report:
    rows = [row for run in self.each_run() for row in self._measure(run)]
    values = [run_tables.LayerValue(x.run, x.layer, x.divergence) for x in rows]
    return analysis_report.Report(
        tables.csv_text(Divergence._fields, rows),
        run_tables.layer_markdown(values, '.4f', self._notes()),
        dict(
            weight_divergence=run_tables.layer_figure(
                values,
                'Mean distance from mean',
                'Weight divergence by layer',
                self.algorithms,
            )
        ),
    )

  def _measure(self, run: analyzed_run.AnalyzedRun) -> list[Divergence]:
    clients = run.draw_clients(self.flags.num_clients, self.flags.seed)
    by_round = [
        units.weight_divergence_by_layer(
            [run.model.to_keras(weights) for weights in trained]
        )
        for trained in run.train_rounds(clients, self.flags.num_rounds)
    ]
    return [
        Divergence(
            *(run.name, run.seed, layer),
            float(np.mean([divergences[layer] for divergences in by_round])),
        )
        for layer in by_round[0]
    ]

  def _notes(self) -> list[str]:
    num_rounds = self.flags.num_rounds
    rounds = (
        "in the round after the run's last one."
        if num_rounds == 1
        else f"in each of the {num_rounds} rounds after the run's last one;"
        ' mean over these rounds.'
    )
    notes = [
        "Mean Euclidean distance of the clients' trainable weights from their"
        f' mean, after local training {rounds}'
    ]
    for name in dict.fromkeys(run.name for run in self.runs):
      accuracies = [100 * x.test_accuracy for x in self.runs if x.name == name]
      text = f'Test accuracy of {name}: {np.mean(accuracies):.2f} %'
      if len(accuracies) > 1:
        deviation = np.std(accuracies, ddof=1)
        text += f' ± {deviation:.2f} over {len(accuracies)} seeds'
      notes.append(f'{text}.')
    return notes
