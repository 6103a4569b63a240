"""Base class of analyses of layers before and after local training."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import keras
from matplotlib import figure
import numpy as np
from typing_extensions import override

from tff_bn.papers import analysis_report
from tff_bn.papers import units
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.papers.run_analyses import run_analysis
from tff_bn.papers.run_analyses import run_tables
from tff_bn.programs.results import tables


class TrainedClient(NamedTuple):
  """A client's models before and after local training, and test examples."""

  client: str
  before: keras.Model
  after: keras.Model
  x: np.ndarray
  y: np.ndarray


class _Row(NamedTuple):
  """A row of the CSV file."""

  run: str
  seed: int
  client: str
  layer: str
  units: int
  share: float


class LayerAnalysis(run_analysis.RunAnalysis):
  """Measures a share of the units of each layer.

  Attributes:
    name: The name of the analysis.
    column: The name of the share in the CSV file.
    label: The label of the share in the figure.
    title: The figure's title.
    note: The definition of the share, for the table.
  """

  name: str
  column: str
  label: str
  title: str
  note: str

  @abc.abstractmethod
  def measure(
      self, client: TrainedClient, layer_names: Sequence[str]
  ) -> dict[str, np.ndarray]:
    """Returns a result `[..., units]` for each layer."""

  @abc.abstractmethod
  def share(self, result: np.ndarray) -> float:
    """Returns the share of units for a result."""

  @abc.abstractmethod
  def draw(
      self, results: Mapping[str, Mapping[str, np.ndarray]]
  ) -> figure.Figure:
    """Draws each unit, given the results of layers by run."""

  @override
  def check_run(self, run: analyzed_run.AnalyzedRun) -> None:
    run.draw_clients(self.flags.num_clients, self.flags.seed)
    x, _ = run.test_examples(1, self.flags.seed)
    for layer in self._layer_names(run):
      try:
        units.layer_activations(run.keras_model, layer, x)
      except ValueError as error:
        message = str(error).replace('layer_name=', '--layers=')
        raise ValueError(message) from error

  @override
  def analyze(self) -> analysis_report.Report:
    rows = []
    # The first client of each run's first seed.
    drawn: dict[str, dict[str, np.ndarray]] = {}
    for run in self.each_run():
      for client in self._trained_clients(run):
        results = self.measure(client, self._layer_names(run))
        drawn.setdefault(run.name, results)
        rows += [
            _Row(
                *(run.name, run.seed, client.client, layer),
                *(result.shape[-1], self.share(result)),
            )
            for layer, result in results.items()
        ]
    values = [run_tables.LayerValue(x.run, x.layer, x.share) for x in rows]
    note = f'{self.note} for at most {self.flags.num_examples} test examples.'
    return analysis_report.Report(
        tables.csv_text((*_Row._fields[:-1], self.column), rows),
        run_tables.layer_markdown(values, '.3f', [note]),
        {
            self.name: run_tables.layer_figure(
                values, self.label, self.title, self.algorithms
            ),
            f'{self.name}_units': self.draw(drawn),
        },
    )

  def _trained_clients(
      self, run: analyzed_run.AnalyzedRun
  ) -> Iterator[TrainedClient]:
    examples = run.test_examples(self.flags.num_examples, self.flags.seed)
    clients = run.draw_clients(self.flags.num_clients, self.flags.seed)
    for client, weights in zip(
        clients, run.train_clients(clients), strict=True
    ):
      before = run.model.to_keras(run.client_weights(client))
      yield TrainedClient(
          client, before, run.model.to_keras(weights), *examples
      )

  def _layer_names(self, run: analyzed_run.AnalyzedRun) -> Sequence[str]:
    if self.flags.layers is not None:
      return self.flags.layers
    try:
      return units.hidden_layers(run.keras_model)
    except ValueError as error:
      raise ValueError(f'--layers must be given: {error}') from error
