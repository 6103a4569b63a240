"""How many units random permutations leave where they are.

Figures 2 and 5 of Li et al., Federated Learning with Position-Aware Neurons,
CVPR 2022.
"""

from collections.abc import Mapping, Sequence
import math

from matplotlib import figure
import numpy as np

from tff_bn import position_aware
from tff_bn.programs import cli
from tff_bn.programs import figures
from tff_bn.programs import tables
from tff_bn.programs.analyses.position_aware import analyzed_run
from tff_bn.programs.analyses.position_aware import report

_DEFAULT_NUM_UNITS = (1024,)
_DEFAULT_NUM_STEPS = 100
_DEFAULT_NUM_SHUFFLES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def analyze(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> report.Report:
  """Simulates random permutations.

  Args:
    runs: None, or one run for the numbers of units and of local steps.
    flags: The program's flags.

  Returns:
    The shares of units that are kept.
  """
  sizes = _num_units(runs, flags)
  num_steps = _num_steps(runs, flags)
  by_probability, by_shuffles = {}, {}
  for size in sizes:
    for probability in flags.shuffle_probabilities:
      by_probability[size, probability] = position_aware.mean_kept_share(
          size, probability, repeats=flags.repeats, seed=flags.seed
      )
    for num_shuffles in _num_shuffles(flags, num_steps):
      by_shuffles[size, num_shuffles] = position_aware.mean_kept_share(
          size,
          flags.shuffle_probability,
          num_shuffles=num_shuffles,
          num_steps=num_steps,
          repeats=flags.repeats,
          seed=flags.seed,
      )
  rows = [
      (size, probability, '', '', share)
      for (size, probability), share in by_probability.items()
  ] + [
      (size, flags.shuffle_probability, num_shuffles, num_steps, share)
      for (size, num_shuffles), share in by_shuffles.items()
  ]
  return report.Report(
      tables.csv_text(
          (
              *('num_units', 'shuffle_probability', 'num_shuffles'),
              *('num_steps', 'kept_share'),
          ),
          rows,
      ),
      '\n'.join(
          [
              _markdown('P_sf', by_probability, ['Of one permutation.']),
              _markdown(
                  'N_sf',
                  by_shuffles,
                  [
                      'Of local training with so many steps:'
                      f' {num_steps}. In each, units are permuted with'
                      f' probability N_sf/{num_steps} and'
                      f' P_sf = {flags.shuffle_probability:g}.',
                      'Share of units that are where they were in the end, mean'
                      f' over {flags.repeats} simulations.',
                  ],
              ),
          ]
      ),
      dict(kept_share=kept_figure(by_probability, by_shuffles)),
  )


def check(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> None:
  """Raises a `ValueError` if what the flags ask for is impossible."""
  if len(runs) > 1:
    raise ValueError(
        f'--run names {len(runs)} runs; the numbers of units and local steps'
        ' can be those of one only.'
    )
  if not _num_units(runs, flags):
    raise ValueError(
        f'--run={runs[0].folder}: its model has no hidden units that could be'
        ' permuted; give --num_units.'
    )
  num_steps = _num_steps(runs, flags)
  largest = max(_num_shuffles(flags, num_steps))
  if largest > num_steps:
    raise ValueError(
        f'--num_shuffles has {largest:g}, but there are {num_steps} local steps'
        ' (--num_steps), of which each permutes units at most once.'
    )


def _num_units(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> Sequence[int]:
  if flags.num_units is not None:
    return flags.num_units
  if not runs:
    return _DEFAULT_NUM_UNITS
  try:
    groups = position_aware.unit_groups(runs[0].keras_model)
  except ValueError as error:
    raise ValueError(f'--num_units must be given: {error}') from error
  return sorted({group.size for group in groups})


def _num_steps(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> int:
  if flags.num_steps is not None:
    return flags.num_steps
  if not runs:
    return _DEFAULT_NUM_STEPS
  settings = runs[0].settings
  if settings.local_steps is not None:
    return settings.local_steps
  sizes = [len(samples) for samples in runs[0].data.train_indices.values()]
  # r_k = E N_k / B, with the mean over the clients.
  return math.ceil(
      settings.local_epochs * float(np.mean(sizes)) / settings.batch_size
  )


def _num_shuffles(flags: cli.ParsedFlags, num_steps: int) -> Sequence[float]:
  if flags.num_shuffles is not None:
    return flags.num_shuffles
  return [number for number in _DEFAULT_NUM_SHUFFLES if number <= num_steps]


def kept_figure(
    by_probability: Mapping[tuple[int, float], float],
    by_shuffles: Mapping[tuple[int, float], float],
) -> figure.Figure:
  """Draws the shares of units that are kept.

  Args:
    by_probability: The shares by the number of units and P_sf.
    by_shuffles: The shares by the number of units and N_sf.

  Returns:
    A figure with a panel for P_sf and one for N_sf.
  """
  drawing, ((left, right),) = report.panels(1, 2, width=4.2, height=3.6)
  for axes, shares, label in (
      (left, by_probability, 'P_sf, one permutation'),
      (right, by_shuffles, 'N_sf, local training'),
  ):
    for number, size in enumerate(dict.fromkeys(size for size, _ in shares)):
      points = sorted((x, y) for (s, x), y in shares.items() if s == size)
      report.draw_means(axes, points, label=f'{size} units', number=number)
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.02)
    figures.tidy(axes)
  left.set_ylabel('R_kept')
  right.legend(frameon=False, fontsize='small')
  drawing.suptitle('Units that random permutations leave where they are')
  return drawing


def _markdown(
    title: str,
    shares: Mapping[tuple[int, float], float],
    notes: Sequence[str],
) -> str:
  sizes = list(dict.fromkeys(size for size, _ in shares))
  cells = [[title, *(f'R_kept, {size} units' for size in sizes)]]
  for value in sorted({value for _, value in shares}):
    cells.append(
        [f'{value:g}', *(f'{shares[size, value]:.3f}' for size in sizes)]
    )
  return tables.markdown(cells, notes)
