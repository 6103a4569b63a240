"""Random permutations of the hidden units of finished runs' models.

Algorithm 1 and figure 2 of Li et al., Federated Learning with Position-Aware
Neurons, CVPR 2022.
"""

from collections.abc import Sequence
import dataclasses

from matplotlib import figure
import numpy as np

from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units
from tff_bn.programs import cli
from tff_bn.programs import tables
from tff_bn.programs.analyses.position_aware import analyzed_run
from tff_bn.programs.analyses.position_aware import report


@dataclasses.dataclass(frozen=True)
class Group:
  """A group of hidden units, permuted.

  Attributes:
    run: The run's name.
    seed: The run's seed.
    group: The group's name, the first layer whose outputs the units are.
    units: How many units there are.
    weights: In how many of the model's weights they occur.
    kept_share: The share of units that the permutation leaves where they are.
  """

  run: str
  seed: int
  group: str
  units: int
  weights: int
  kept_share: float


def analyze(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> report.Report:
  """Permutes each model's hidden units.

  Args:
    runs: The runs.
    flags: The program's flags.

  Returns:
    The groups of units that trade places, and what that does to the outputs.
  """
  groups, notes, drawn = [], [], {}
  for run in runs:
    model = run.keras_model
    found = tied_units.unit_groups(model)
    permutations = permutation.random_permutations(
        found, flags.shuffle_probability, flags.seed
    )
    groups += [
        Group(
            *(run.name, run.seed, group.name, group.size),
            len({occurrence.weight for occurrence in group.occurrences}),
            permutation.kept_share(permutations[group.name]),
        )
        for group in found
    ]
    x, _ = run.test_examples(flags.num_examples, flags.seed)
    before, after = (
        permutation.outputs(m, x)
        for m in (model, permutation.permute_units(model, permutations))
    )
    notes.append(
        f'{run.name}, seed {run.seed}: the outputs for {len(x)} test examples'
        f' change by at most {np.abs(after - before).max():.2g}, and are up to'
        f' {np.abs(before).max():.3g}.'
    )
    if run.name not in {name for name, _ in drawn}:
      for name in list(permutations)[-report.NUM_SHOWN :]:
        drawn[run.name, name] = permutations[name]
  return report.Report(
      report.records_csv(groups),
      tables.markdown(
          [
              ['Units of', 'Run', 'Seed', 'Units', 'Weights', 'Kept'],
              *(
                  [
                      *(g.group, g.run, str(g.seed), str(g.units)),
                      *(str(g.weights), f'{g.kept_share:.3f}'),
                  ]
                  for g in groups
              ),
          ],
          [
              'Units that are tied together, as by a residual addition, are one'
              ' group, after the first layer that computes them.',
              'Weights: in how many of them the units occur. Kept: the share of'
              ' units that stay where they are, with P_sf ='
              f' {flags.shuffle_probability:g}.',
              *notes,
          ],
      ),
      dict(permutation=permutation_figure(drawn)),
  )


def check(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> None:
  """Raises a `ValueError` if a run's model has no units to permute."""
  del flags  # Unused.
  for run in runs:
    run.check_units()


def permutation_figure(
    permutations: dict[tuple[str, str], np.ndarray],
) -> figure.Figure:
  """Draws permutation matrices, as the right part of figure 2.

  Args:
    permutations: The vectors of `position_aware.random_permutation`, by run
      and group.

  Returns:
    A figure with a row for each run and a column for each group; the number in
    brackets is the share of units that are kept.
  """
  return report.matrices_figure(
      permutations,
      {key: permutation.kept_share(p) for key, p in permutations.items()},
      x_label='New position',
      y_label='old position',
      title='Random permutations of hidden units',
  )
