"""Matching of the units of global and local models of finished runs.

Figure 7 of Li et al., Federated Learning with Position-Aware Neurons, CVPR
2022.
"""

from collections.abc import Mapping, Sequence

from matplotlib import figure
import numpy as np
from typing_extensions import override

from tff_bn.papers import units
from tff_bn.papers.run_analyses import layer_analysis
from tff_bn.papers.run_analyses import run_tables


class Analysis(layer_analysis.LayerAnalysis):
  """Matches the units of models before and after local training."""

  name = 'matching'
  column = 'diagonal_share'
  label = 'Share on the diagonal'
  title = 'Units that optimal assignment leaves where they are'
  note = (
      'Share of the units that are best matched with the unit at the same'
      ' position, before and after local training, by their activations'
  )

  @override
  def measure(
      self, client: layer_analysis.TrainedClient, layer_names: Sequence[str]
  ) -> dict[str, np.ndarray]:
    return {
        layer: units.match_layers(
            client.before, client.after, layer, client.x
        ).assignment
        for layer in layer_names
    }

  @override
  def share(self, result: np.ndarray) -> float:
    return units.diagonal_share(result)

  @override
  def draw(
      self, results: Mapping[str, Mapping[str, np.ndarray]]
  ) -> figure.Figure:
    return run_tables.permutations_figure(
        results,
        x_label='Unit before',
        y_label='unit after',
        title='Matched units before and after local training',
    )
