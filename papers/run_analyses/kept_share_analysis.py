"""Simulations of the share of units that random permutations keep in place.

Figures 2 and 5 of Li et al., Federated Learning with Position-Aware Neurons,
CVPR 2022.
"""

from collections.abc import Mapping, Sequence
import functools
import math

from matplotlib import figure
import numpy as np
from typing_extensions import override

from tff_bn import position_aware
from tff_bn.papers import analysis_report
from tff_bn.papers import figures
from tff_bn.papers.run_analyses import run_analysis
from tff_bn.papers.run_analyses import run_tables
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import tables

_DEFAULT_NUM_UNITS = (1024,)
_DEFAULT_NUM_STEPS = 100
_DEFAULT_NUM_SHUFFLES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_COLUMNS = (
    *('num_units', 'shuffle_probability', 'num_shuffles', 'num_steps'),
    'kept_share',
)


class Analysis(run_analysis.RunAnalysis):
  """Simulates random permutations, with the sizes of a run if there is one."""

  @override
  def check(self) -> None:
    if not self._num_units:
      raise ValueError(
          f'--run={self.runs[0].folder}: the model has no hidden units that can'
          ' be permuted; give --num_units.'
      )
    largest = max(self._num_shuffles)
    if largest > self._num_steps:
      raise ValueError(
          f'--num_shuffles has {largest:g}, but there are {self._num_steps}'
          ' local steps (--num_steps), each of which permutes units at most'
          ' once.'
      )

  @functools.cached_property
  def _num_units(self) -> Sequence[int]:
    if self.flags.num_units is not None:
      return self.flags.num_units
    if not self.runs:
      return _DEFAULT_NUM_UNITS
    try:
      groups = position_aware.unit_groups(self.runs[0].keras_model)
    except ValueError as error:
      raise ValueError(f'--num_units must be given: {error}') from error
    return sorted({group.size for group in groups})

  @functools.cached_property
  def _num_steps(self) -> int:
    if self.flags.num_steps is not None:
      return self.flags.num_steps
    if not self.runs:
      return _DEFAULT_NUM_STEPS
    settings = self.runs[0].settings
    if settings.local_steps is not None:
      return settings.local_steps
    assert settings.local_epochs is not None  # One of both is given.
    # r_k = E N_k / B, with the mean over the clients.
    indices = self.runs[0].data.train_indices.values()
    mean_size = float(np.mean([len(of_client) for of_client in indices]))
    return math.ceil(settings.local_epochs * mean_size / settings.batch_size)

  @functools.cached_property
  def _num_shuffles(self) -> Sequence[float]:
    if self.flags.num_shuffles is not None:
      return self.flags.num_shuffles
    return [n for n in _DEFAULT_NUM_SHUFFLES if n <= self._num_steps]

  @override
  def analyze(self) -> analysis_report.Report:
    flags, num_steps = self.flags, self._num_steps
    draws = dict(repeats=flags.repeats, seed=flags.seed)
    # By the number of units and P_sf or N_sf.
    by_probability = {
        (size, probability): position_aware.mean_kept_share(
            size, probability, **draws
        )
        for size in self._num_units
        for probability in flags.shuffle_probabilities
    }
    by_shuffles = {
        (size, num_shuffles): position_aware.mean_kept_share(
            size,
            flags.shuffle_probability,
            num_shuffles=num_shuffles,
            num_steps=num_steps,
            **draws,
        )
        for size in self._num_units
        for num_shuffles in self._num_shuffles
    }
    rows: list[tuple] = [
        (size, probability, '', '', share)
        for (size, probability), share in by_probability.items()
    ]
    rows += [
        (size, flags.shuffle_probability, num_shuffles, num_steps, share)
        for (size, num_shuffles), share in by_shuffles.items()
    ]
    notes = [
        f'Number of local steps: {num_steps}. Each permutes the units with'
        f' probability N_sf/{num_steps} and'
        f' P_sf = {flags.shuffle_probability:g}.',
        'Share of units that are in place at the end, mean over'
        f' {flags.repeats} simulations.',
    ]
    return analysis_report.Report(
        tables.csv_text(_COLUMNS, rows),
        _markdown('P_sf', by_probability, ['One permutation.'])
        + '\n'
        + _markdown('N_sf', by_shuffles, notes),
        dict(kept_share=kept_figure(by_probability, by_shuffles)),
    )


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
  drawing, ((left, right),) = run_tables.panels(1, 2, width=4.2, height=3.6)
  for axes, shares, label in (
      (
          left,
          by_probability,
          'Probability that a unit is swapped,\none permutation',
      ),
      (right, by_shuffles, 'Mean number of permutations,\nlocal training'),
  ):
    for number, size in enumerate(dict.fromkeys(size for size, _ in shares)):
      points = sorted((x, y) for (s, x), y in shares.items() if s == size)
      style = line_styles.by_number(number)
      run_tables.draw_means(axes, points, label=f'{size} units', **style)
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.02)
    figures.tidy(axes)
  left.set_ylabel('Share of units in place')
  right.legend(frameon=False, fontsize='small')
  figures.add_title(
      drawing, 'Units that random permutations leave where they are'
  )
  return drawing


def _markdown(
    title: str, shares: Mapping[tuple[int, float], float], notes: Sequence[str]
) -> str:
  points = [
      ((f'{value:g}',), f'R_kept, {size} units', share)
      for (size, value), share in sorted(
          shares.items(), key=lambda item: item[0][1]
      )
  ]
  return run_tables.means_markdown([title], points, '.3f', notes)
