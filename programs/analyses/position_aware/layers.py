"""Pairs of models, before and after local training, layer by layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
from typing import TypeVar

import keras
from matplotlib import figure
import numpy as np

from tff_bn import position_aware
from tff_bn.programs import cli
from tff_bn.programs.analyses.position_aware import analyzed_run
from tff_bn.programs.analyses.position_aware import report

_Result = TypeVar('_Result')


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
  """A layer of a model before and after a client's local training.

  Attributes:
    run: The run's name.
    seed: The run's seed.
    client: The client.
    layer: The layer's name.
    before: The model with which the client begins.
    after: The model after its local training.
    x: Test examples.
    y: Their labels.
  """

  run: str
  seed: int
  client: str
  layer: str
  before: keras.Model
  after: keras.Model
  x: np.ndarray
  y: np.ndarray


def check(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> None:
  """Raises a `ValueError` if what the flags ask for is impossible."""
  for run in runs:
    run.draw_clients(flags.num_clients, flags.seed)
    x, _ = run.test_examples(1, flags.seed)
    for layer in _layers(run, flags):
      try:
        position_aware.layer_activations(run.keras_model, layer, x)
      except ValueError as error:
        message = str(error).replace('layer_name=', '--layers=')
        raise ValueError(message) from error


def comparisons(
    runs: Sequence[analyzed_run.AnalyzedRun], flags: cli.ParsedFlags
) -> Iterator[Comparison]:
  """Trains clients, and makes a pair for each of their layers.

  Args:
    runs: The runs.
    flags: The program's flags.

  Yields:
    The pairs, by run, client and layer.
  """
  for run in runs:
    x, y = run.test_examples(flags.num_examples, flags.seed)
    clients = run.draw_clients(flags.num_clients, flags.seed)
    trained = run.train_clients(clients)
    names = _layers(run, flags)
    for client, weights in zip(clients, trained, strict=True):
      before = run.model.to_keras(run.client_weights(client))
      after = run.model.to_keras(weights)
      for layer in names:
        yield Comparison(run.name, run.seed, client, layer, before, after, x, y)


def share_report(
    name: str,
    results: Mapping[Comparison, _Result],
    shares: Mapping[Comparison, tuple[int, float]],
    draw_units: Callable[[dict[tuple[str, str], _Result]], figure.Figure],
    *,
    column: str,
    label: str,
    title: str,
    note: str,
) -> report.Report:
  """Reports a share of the units of each layer.

  Args:
    name: The analysis.
    results: What was found of each unit.
    shares: The number of units, and the share of them.
    draw_units: Draws the results of some layers, by run and layer: those of the
      last few layers of each run's first seed and client.
    column: What the share is called in the CSV file.
    label: What it is called in the figure.
    title: The figure's title.
    note: What the share is, for below the table.

  Returns:
    The report, with the figures NAME and NAME_units.
  """
  rows = [
      report.LayerValue(c.run, c.seed, c.client, c.layer, *shares[c])
      for c in results
  ]
  return report.Report(
      report.layer_csv(rows, column),
      report.layer_markdown(rows, 3, [note]),
      {
          name: report.layer_figure(rows, label, title),
          f'{name}_units': draw_units(
              {(c.run, c.layer): results[c] for c in shown(results)}
          ),
      },
  )


def shown(results: Iterable[Comparison]) -> list[Comparison]:
  """Chooses the comparisons of which each unit is drawn.

  Args:
    results: All comparisons.

  Returns:
    Those of the last few layers of each run's first seed and client.
  """
  by_run: dict[str, list[Comparison]] = {}
  for c in results:
    of_run = by_run.setdefault(c.run, [])
    if not of_run or (c.seed, c.client) == (of_run[0].seed, of_run[0].client):
      of_run.append(c)
  return [c for of_run in by_run.values() for c in of_run[-report.NUM_SHOWN :]]


def _layers(
    run: analyzed_run.AnalyzedRun, flags: cli.ParsedFlags
) -> Sequence[str]:
  if flags.layers is not None:
    return flags.layers
  try:
    return position_aware.hidden_layers(run.keras_model)
  except ValueError as error:
    raise ValueError(f'--layers must be given: {error}') from error
