"""Classes that the units of global and local models of finished runs prefer.

Figure 8 of Li et al., Federated Learning with Position-Aware Neurons, CVPR
2022.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools

import matplotlib
from matplotlib import figure
from matplotlib import patches
import numpy as np

from tff_bn import position_aware
from tff_bn.programs import cli
from tff_bn.programs.analyses.position_aware import analyzed_run
from tff_bn.programs.analyses.position_aware import layers
from tff_bn.programs.analyses.position_aware import report


def analyze(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> report.Report:
  """Compares what units prefer before and after local training.

  Args:
    runs: The runs.
    flags: The program's flags.

  Returns:
    The share of the units of each layer that prefer the same class.
  """
  preferred = {}
  for _, of_client in itertools.groupby(
      layers.comparisons(runs, flags), lambda c: (c.before, c.after)
  ):
    comparisons = list(of_client)
    first, names = comparisons[0], [c.layer for c in comparisons]
    before, after = (
        position_aware.preference_vectors_by_layer(
            model, names, first.x, first.y
        )
        for model in (first.before, first.after)
    )
    for c in comparisons:
      preferred[c] = [
          position_aware.preferred_classes(vectors[c.layer])
          for vectors in (before, after)
      ]
  return layers.share_report(
      'preference',
      preferred,
      {
          comparison: (classes[0].size, position_aware.agreeing_share(*classes))
          for comparison, classes in preferred.items()
      },
      functools.partial(
          classes_figure, num_classes=max(run.data.num_classes for run in runs)
      ),
      column='agreeing_share',
      label='Share that agrees',
      title='Units that prefer the same class after local training',
      note=(
          'Share of the units that contribute most to the same class before and'
          ' after local training, by their preference vectors for at most'
          f' {flags.num_examples} test examples.'
      ),
  )


def classes_figure(
    preferred: Mapping[tuple[str, str], Sequence[np.ndarray]], num_classes: int
) -> figure.Figure:
  """Draws the class that each unit prefers, as a coloured line.

  Args:
    preferred: By run and layer, the classes before and after local training.
    num_classes: The number of classes.

  Returns:
    A figure with a row for each run and a column for each layer; the number in
    brackets is the share of units that agree.
  """
  names = list(dict.fromkeys(name for name, _ in preferred))
  drawing, all_axes = report.panels(
      len(names),
      max(sum(name == run for run, _ in preferred) for name in names),
      width=3.6,
      height=1.8,
  )
  colours = matplotlib.colormaps['tab10' if num_classes <= 10 else 'turbo']
  colours = colours.resampled(num_classes)
  for name, row in zip(names, all_axes):
    of_run = {k[1]: v for k, v in preferred.items() if k[0] == name}
    for axes, (layer, classes) in zip(row, of_run.items()):
      axes.imshow(
          np.stack(classes),
          cmap=colours,
          vmin=-0.5,
          vmax=num_classes - 0.5,
          aspect='auto',
          interpolation='nearest',
      )
      axes.set_title(
          f'{layer} [{position_aware.agreeing_share(*classes):.3f}]',
          fontsize='small',
      )
      axes.set_yticks([0, 1], ['before', 'after'])
      axes.set_xlabel('Unit', fontsize='small')
      axes.tick_params(labelsize='small')
    for axes in row[len(of_run) :]:
      axes.set_axis_off()
    row[0].set_ylabel(name)
  if num_classes <= 20:
    drawing.legend(
        handles=[
            patches.Patch(color=colours(c), label=str(c))
            for c in range(num_classes)
        ],
        loc='outside right upper',
        frameon=False,
        title='Class',
    )
  drawing.suptitle('Classes that units prefer, before and after local training')
  return drawing


check = layers.check
