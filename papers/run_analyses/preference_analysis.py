"""Classes that the units of global and local models of finished runs prefer.

Figure 8 of Li et al., Federated Learning with Position-Aware Neurons, CVPR
2022.
"""

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib import patches
import numpy as np
from typing_extensions import override

from tff_bn.papers import units
from tff_bn.papers.run_analyses import layer_analysis
from tff_bn.papers.run_analyses import run_tables


class Analysis(layer_analysis.LayerAnalysis):
  """Compares the classes that units prefer before and after local training."""

  needs_classes = True
  name = 'preference'
  column = 'agreeing_share'
  label = 'Share that agrees'
  title = 'Units that prefer the same class after local training'
  note = (
      'Share of the units that contribute most to the same class before and'
      ' after local training, by their preference vectors'
  )

  @override
  def measure(
      self, client: layer_analysis.TrainedClient, layer_names: Sequence[str]
  ) -> dict[str, np.ndarray]:
    before, after = (
        units.preference_vectors_by_layer(
            model, layer_names, client.x, client.y
        )
        for model in (client.before, client.after)
    )
    return {
        layer: np.stack(
            [
                units.preferred_classes(vectors[layer])
                for vectors in (before, after)
            ]
        )
        for layer in layer_names
    }

  @override
  def share(self, result: np.ndarray) -> float:
    return units.agreeing_share(*result)

  @override
  def draw(
      self, results: Mapping[str, Mapping[str, np.ndarray]]
  ) -> figure.Figure:
    most = max(self.runs, key=lambda run: run.data.num_classes).data
    is_common = {run.data.class_names for run in self.runs} == {
        most.class_names
    }
    return classes_figure(
        results, most.num_classes, most.class_names if is_common else ()
    )


def classes_figure(
    preferred: Mapping[str, Mapping[str, np.ndarray]],
    num_classes: int,
    class_names: Sequence[str] = (),
) -> figure.Figure:
  """Draws the class that each unit prefers as a colored line.

  Args:
    preferred: The classes before and after local training, `int64[2, units]`,
      of layers, by run.
    num_classes: The number of classes.
    class_names: Their names. Default: their numbers.

  Returns:
    A figure, see `run_tables.units_figure`. The share is the units that agree.
  """
  colors = matplotlib.colormaps['tab10' if num_classes <= 10 else 'turbo']
  colors = colors.resampled(num_classes)

  def draw(axes: mpl_axes.Axes, classes: np.ndarray) -> None:
    axes.imshow(
        classes,
        cmap=colors,
        vmin=-0.5,
        vmax=num_classes - 0.5,
        aspect='auto',
        interpolation='nearest',
    )
    axes.set_yticks([0, 1], ['before', 'after'])

  drawing = run_tables.units_figure(
      preferred,
      draw,
      lambda classes: units.agreeing_share(*classes),
      x_label='Unit',
      y_label='',
      title='Classes that units prefer, before and after local training',
      width=3.6,
      height=1.8,
  )
  if num_classes <= 20:
    legend = drawing.legend(
        handles=[
            patches.Patch(color=colors(c), label=name)
            for c, name in enumerate(class_names or range(num_classes))
        ],
        loc='outside right center',
        frameon=False,
        title='Class',
    )
    for text in legend.get_texts():
      text.set_parse_math(False)  # Names are no formulas.
  return drawing
