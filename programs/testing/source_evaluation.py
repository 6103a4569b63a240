"""Evaluates the model of each client on the test data of each source.

A source is a domain if the data has domains, and otherwise a client. FedTAN
(Wang et al., arXiv:2301.02982) shows the results in figures 8 and 13.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import math
import pathlib
from typing import Any, NamedTuple, Optional

import numpy as np

from tff_bn import data as tff_bn_data
from tff_bn.catalog import columns
from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.common import progress
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.programs.results import charts
from tff_bn.programs.results import html_report
from tff_bn.programs.results import report
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import model_evaluation
from tff_bn.training import evaluation
from tff_bn.training import measures
from tff_bn.training import saved_models

_BATCH_SIZE = 256
GLOBAL = 'global'
LABELS = ('model', 'client', 'source', 'num_examples')
_NAME = run_folder.SOURCES_CSV.removesuffix('.csv')
# Longer names of sources are turned.
_LABEL_LENGTH = 6


class Result(NamedTuple):
  """The result of a model on a source.

  Attributes:
    model: 'own' for the personal model of a client, or 'global'.
    client: The client who uses the model; '' for the global model.
    source: The domain or the client whose test data is used; '' for the whole
      test set.
    num_examples: The number of examples.
    metrics: See `report.Evaluation`.
  """

  model: str
  client: str
  source: str
  num_examples: int
  metrics: Mapping[str, Optional[float]]

  @property
  def row(self) -> str:
    """The name of the model in a matrix."""
    return self.client or 'global model'

  @property
  def column(self) -> str:
    """The name of the test data in a matrix."""
    return self.source or measures.WHOLE_TEST_SET


def sources(data: tff_bn_data.FederatedData) -> dict[str, np.ndarray]:
  """Returns the positions of the test samples of each source, by its name.

  Sources without test data are left out. The last one, with the name `''`, is
  the whole test set.
  """
  dataset = data.dataset
  if dataset.domain_test is None:
    found = dict(data.test_indices)
  else:
    found = {
        name: np.flatnonzero(dataset.domain_test == number)
        for number, name in enumerate(dataset.domain_names)
    }
  found = {
      name: positions for name, positions in found.items() if len(positions)
  }
  return {**found, '': np.arange(len(dataset.y_test))}


def evaluate(
    saved: saved_models.SavedModels,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
    *,
    reestimation_batch_size: Optional[int] = None,
) -> Iterator[Result]:
  """Evaluates the models of a run on each source.

  Only one model and the data of a few sources are in memory at a time.

  Args:
    saved: The run's models.
    model: The model with which the run was trained.
    data: The data.
    reestimation_batch_size: See `model_evaluation.evaluate_models`.

  Yields:
    The results of the global model, then those of each client whose model
    differs from it, with a result for each of `sources`.
  """
  evaluator = evaluation.Evaluator(model)
  models = model_evaluation.EvaluatedModels(
      saved, model, data, reestimation_batch_size
  )
  found = sources(data)

  def results(
      kind: str, client_id: str, weights: ModelWeights
  ) -> Iterator[Result]:
    for source, metrics in evaluator.evaluate_each(
        ((source, weights) for source in found),
        lambda source: data.lazy_test_dataset(
            found[source], _BATCH_SIZE, client_id or None
        ),
    ):
      row = model_evaluation.described(metrics, kind, client_id)
      yield Result(kind, client_id, source, row.num_examples, row.metrics)

  yield from results(GLOBAL, '', models.global_model())
  clients = list(filter(models.has_other_weights, data.client_ids))
  for number in progress.counting(len(clients), 'On each source: client'):
    client_id = clients[number]
    yield from results(
        models.kind(client_id), client_id, models.of_client(client_id)
    )


def write(
    folder: pathlib.Path,
    metrics: Sequence[str],
    results: Iterable[Result],
    title: str,
) -> list[pathlib.Path]:
  """Writes results as CSV, and as a table and a heat map if they are few.

  Args:
    folder: The folder, which exists. Its page shows the heat map.
    metrics: The names in `Result.metrics`.
    results: The results, of which only those for the table are in memory.
    title: Says what was evaluated.

  Returns:
    The files.
  """
  path = folder / run_folder.SOURCES_CSV
  matrix = Matrix()
  with (
      files.replacing(path) as temporary,
      temporary.open('w', encoding='utf-8', newline='') as file,
  ):
    writer = csv_files.Writer(file, (*LABELS, *metrics))
    for found in results:
      writer.add([(*found[:-1], *found.metrics.values())])
      matrix.add(found)
  written = [path]
  table = folder / run_folder.SOURCES_MARKDOWN
  plot = folder / run_folder.PLOTS / f'{_NAME}.png'
  if matrix.is_small:
    text = f'{title}\n\n{matrix.markdown()}'
    files.replace(table, text)
    charts.save(plot.parent, {_NAME: matrix.heat_map(title)})
    written += [table, plot]
  else:
    for old in (table, plot):
      old.unlink(missing_ok=True)
  html_report.refresh_figures(folder)
  return written


class Matrix:
  """The main metric of each model on each source.

  If there are too many models or sources for a table, it is empty.

  Attributes:
    is_small: Whether there are at most `measures.MAX_TABLE_CLIENTS` clients
      and as many sources.
  """

  def __init__(self) -> None:
    self.is_small = True
    self._kind: Optional[columns.Kind] = None
    # By the names of the row and of the column.
    self._values: dict[str, dict[str, Optional[float]]] = {}

  def add(self, found: Result) -> None:
    """Adds a result."""
    if not self.is_small:
      return
    name, value = next(iter(found.metrics.items()))
    self._kind = report.evaluated_kind(name)
    row = self._values.setdefault(found.row, {})
    row[found.column] = value
    # The global model and the whole test set come in addition.
    if max(len(self._values), len(row)) > measures.MAX_TABLE_CLIENTS + 1:
      self.is_small = False
      self._values.clear()

  def markdown(self) -> str:
    """Returns a table: a row for each model, a column for each source."""
    assert self._kind is not None
    kind = self._kind
    shown = list(next(iter(self._values.values())))
    cells = [['Model', *shown]]
    for row, values in self._values.items():
      cells.append([row, *(_text(kind, values[name]) for name in shown)])
    what = f'{kind.heading}{kind.unit}'
    return tables.markdown(
        cells,
        [
            f'{what}: the model of the client in the row, on the test data of'
            ' the source in the column. Clients without a row use the global'
            ' model.'
        ],
    )

  def heat_map(self, title: str) -> charts.Spec:
    """Draws `markdown`."""
    assert self._kind is not None
    kind = self._kind
    values: list[dict[str, Any]] = []
    for row, of_row in self._values.items():
      for column, value in of_row.items():
        shown_value = None
        if value is not None and math.isfinite(value):
          shown_value = kind.factor * value
        values.append(dict(row=row, column=column, value=shown_value))
    shown = next(iter(self._values.values()))
    is_long = max(map(len, shown)) > _LABEL_LENGTH
    chart = charts.heat_map(
        'Model of', 'Test data of', -30 if is_long else 0, kind
    )
    width = 150 + 46 * len(shown)
    return charts.titled(
        {**chart, 'data': dict(values=values)},
        width,
        title,
        f'{kind.heading}{kind.unit}',
    )


def _text(kind: columns.Kind, value: Optional[float]) -> str:
  return '–' if value is None else kind.text(value)
