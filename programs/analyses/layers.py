"""Pairs of models, before and after local training, layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tff_bn import analysis
from tff_bn.programs import cli
from tff_bn.programs.analyses import analyzed_run

# Of so many layers, from the last one, each unit is drawn.
_NUM_SHOWN = 4

_Value = TypeVar('_Value')


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
  before: tf.keras.Model
  after: tf.keras.Model
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
        analysis.layer_activations(run.keras_model, layer, x)
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
    for client, weights in zip(clients, trained, strict=True):
      before = run.model.to_keras(run.client_weights(client))
      after = run.model.to_keras(weights)
      for layer in _layers(run, flags):
        yield Comparison(run.name, run.seed, client, layer, before, after, x, y)


def shown(results: Mapping[Comparison, _Value]) -> dict[Comparison, _Value]:
  """Chooses the results of which each unit is drawn.

  Args:
    results: The results.

  Returns:
    Those of the last few layers of each run's first seed and client.
  """
  firsts: dict[str, tuple[Any, ...]] = {}
  for c in results:
    firsts.setdefault(c.run, (c.seed, c.client))
  chosen = {}
  for run, first in firsts.items():
    of_run = [c for c in results if (c.run, (c.seed, c.client)) == (run, first)]
    chosen.update({c: results[c] for c in of_run[-_NUM_SHOWN:]})
  return chosen


def _layers(
    run: analyzed_run.AnalyzedRun, flags: cli.ParsedFlags
) -> Sequence[str]:
  if flags.layers is not None:
    return flags.layers
  try:
    return analysis.hidden_layers(run.keras_model)
  except ValueError as error:
    raise ValueError(f'--layers must be given: {error}') from error
