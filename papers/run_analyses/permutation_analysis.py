"""Random permutations of the hidden units of finished runs' models.

Algorithm 1 and figure 2 of Li et al., Federated Learning with Position-Aware
Neurons, CVPR 2022.
"""

from typing import NamedTuple

import numpy as np
from typing_extensions import override

from tff_bn.papers import analysis_report
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.papers.run_analyses import run_analysis
from tff_bn.papers.run_analyses import run_tables
from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units
from tff_bn.programs.results import tables


class Group(NamedTuple):
  """A permuted group of hidden units, and the number of their weights."""

  run: str
  seed: int
  group: str
  units: int
  weights: int
  kept_share: float


class Analysis(run_analysis.RunAnalysis):
  """Permutes the hidden units of each model, and compares the outputs."""

  @override
  def check_run(self, run: analyzed_run.AnalyzedRun) -> None:
    run.check_units()

  @override
  def analyze(self) -> analysis_report.Report:
    groups = []
    notes = []
    drawn: dict[str, dict[str, np.ndarray]] = {}
    for run in self.each_run():
      model = run.keras_model
      found = tied_units.unit_groups(model)
      permutations = permutation.random_permutations(
          found, self.flags.shuffle_probability, self.flags.seed
      )
      for group in found:
        weights = {occurrence.weight for occurrence in group.occurrences}
        kept = permutation.kept_share(permutations[group.name])
        groups.append(
            Group(
                *(run.name, run.seed, group.name, group.size),
                *(len(weights), kept),
            )
        )
      drawn.setdefault(run.name, permutations)
      x, _ = run.test_examples(self.flags.num_examples, self.flags.seed)
      permuted = permutation.permute_units(model, permutations)
      before, after = (permutation.outputs(m, x) for m in (model, permuted))
      notes.append(
          f'{run.name}, seed {run.seed}: the outputs for {len(x)} test examples'
          f' change by at most {np.abs(after - before).max():.2g}; their'
          f' largest absolute value is {np.abs(before).max():.3g}.'
      )
    cells = [['Units of', 'Run', 'Seed', 'Units', 'Weights', 'Kept']]
    for g in groups:
      kept_text = f'{g.kept_share:.3f}'
      cells.append(
          [g.group, g.run, str(g.seed), str(g.units), str(g.weights), kept_text]
      )
    return analysis_report.Report(
        tables.csv_text(Group._fields, groups),
        tables.markdown(
            cells,
            [
                'Units that are added to each other, as in residual blocks, are'
                ' one group with the name of its first layer.',
                'Weights: the number of weights with these units. Kept: the'
                ' share of units that stay in place, with P_sf ='
                f' {self.flags.shuffle_probability:g}.',
                *notes,
            ],
        ),
        dict(
            permutation=run_tables.permutations_figure(
                drawn,
                x_label='New position',
                y_label='old position',
                title='Random permutations of hidden units',
            )
        ),
    )
