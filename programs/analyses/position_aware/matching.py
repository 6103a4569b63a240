"""Matching of the units of global and local models of finished runs.

Figure 7 of Li et al., Federated Learning with Position-Aware Neurons, CVPR
2022.
"""

from collections.abc import Sequence

from matplotlib import figure
import numpy as np

from tff_bn import position_aware
from tff_bn.programs import cli
from tff_bn.programs.analyses.position_aware import analyzed_run
from tff_bn.programs.analyses.position_aware import layers
from tff_bn.programs.analyses.position_aware import report


def analyze(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> report.Report:
  """Matches the units of the models before and after local training.

  Args:
    runs: The runs.
    flags: The program's flags.

  Returns:
    The share of the units of each layer that stay where they are.
  """
  matches = {
      comparison: position_aware.match_layers(
          comparison.before, comparison.after, comparison.layer, comparison.x
      )
      for comparison in layers.comparisons(runs, flags)
  }
  return layers.share_report(
      'matching',
      {c: match.assignment for c, match in matches.items()},
      {
          c: (match.assignment.size, match.diagonal_share)
          for c, match in matches.items()
      },
      assignment_figure,
      column='diagonal_share',
      label='Share on the diagonal',
      title='Units that optimal assignment leaves where they are',
      note=(
          'Share of the units that are best matched with the unit at the same'
          ' position, before and after local training, by their activations for'
          f' at most {flags.num_examples} test examples.'
      ),
  )


def assignment_figure(
    assignments: dict[tuple[str, str], np.ndarray],
) -> figure.Figure:
  """Draws permutation matrices.

  Args:
    assignments: By run and layer, the index vectors of
      `position_aware.optimal_assignment`.

  Returns:
    A figure with a row for each run and a column for each layer; the number in
    brackets is the share on the diagonal.
  """
  return report.matrices_figure(
      assignments,
      {k: position_aware.diagonal_share(q) for k, q in assignments.items()},
      x_label='Unit before',
      y_label='unit after',
      title='Matched units before and after local training',
  )


check = layers.check
