"""Tests the final model of a run on clients that took no part in training."""

from collections.abc import Iterable, Sequence
import csv
import dataclasses
import io
import pathlib
from typing import Optional

import pandas as pd

from tff_bn import data as tff_bn_data
from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_folder
from tff_bn.training import evaluation
from tff_bn.training import measures
from tff_bn.training import saved_models
from tff_bn.training import unseen_clients

_BATCH_SIZE = 256
# The first column of the table of a comparison, and of a single run.
ALGORITHM = 'Algorithm'
CLIENT = 'Client'
_EXPLANATIONS = {
    unseen_clients.AVERAGED: 'BN statistics of the clients that trained',
    unseen_clients.REESTIMATED: (
        "BN statistics from the client's unlabeled training data"
    ),
    unseen_clients.MIXED: (
        'a mixture of both: n/(n+N) of the second, with n training samples and'
        ' N = --held_out_prior'
    ),
}


@dataclasses.dataclass(frozen=True)
class Result:
  """The test of a model on a client that took no part in training.

  Attributes:
    client: The client.
    statistics: Where the model's BN statistics come from.
    num_examples: The number of the client's test examples.
    accuracy: The share of correctly classified examples; None if there are no
      examples.
    loss: The mean loss; None if there are no examples.
  """

  client: str
  statistics: str
  num_examples: int
  accuracy: Optional[float]
  loss: Optional[float]


_COLUMNS = [field.name for field in dataclasses.fields(Result)]


def check_model(
    settings: settings_lib.RunSettings, model: BatchNormModel
) -> None:
  """Checks that a run's model can be tested on clients that did not train.

  Raises:
    ValueError: If there are such clients, but the model has no BN statistics.
  """
  if settings.held_out_clients is not None and not model.has_batch_norm:
    raise ValueError(
        f'--held_out_clients={",".join(settings.held_out_clients)} tests BN'
        f' statistics, but --model={settings.model} with'
        f' --normalization={settings.normalization} has no batch'
        ' normalization.'
    )


def test_clients(
    settings: settings_lib.RunSettings,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
    folder: pathlib.Path,
) -> None:
  """Tests the final model of a run, prints the results and writes a CSV file.

  The data is of the clients that took no part in training.
  """
  weights = saved_models.SavedModels(folder / run_folder.MODEL).weights(model)
  evaluator = evaluation.Evaluator(model)
  assert settings.held_out_prior is not None  # There are held-out clients.
  results = []
  for client_id in data.client_ids:
    own_data = data.client_dataset(
        [client_id],
        seed=settings.seed,
        round_num=0,
        batch_size=settings.batch_size,
        local_epochs=1,
        augment=False,
    )
    models = unseen_clients.unseen_client_weights(
        model,
        weights,
        own_data,
        len(data.train_indices[client_id]),
        settings.held_out_prior,
    )
    test_dataset = data.client_test_dataset(client_id, _BATCH_SIZE)
    for name, client_weights in models.items():
      metrics = evaluator.evaluate(client_weights, test_dataset)
      has_data = metrics['num_examples'] > 0
      results.append(
          Result(
              client_id,
              name,
              metrics['num_examples'],
              metrics['accuracy'] if has_data else None,
              metrics['loss'] if has_data else None,
          )
      )
  path = folder / run_folder.HELD_OUT_CSV
  files.replace(
      path, csv_files.to_csv(_COLUMNS, map(dataclasses.astuple, results))
  )
  print(table([('', results)], CLIENT))
  print(f'Held-out clients: {path}', flush=True)


def read(folder: pathlib.Path) -> list[Result]:
  """Reads the results from a run's folder; none if they are not there."""
  path = folder / run_folder.HELD_OUT_CSV
  if not path.exists():
    return []
  text = path.read_text(encoding='utf-8')
  return [
      Result(
          row['client'],
          row['statistics'],
          int(row['num_examples']),
          *(float(row[n]) if row[n] else None for n in ('accuracy', 'loss')),
      )
      for row in csv.DictReader(io.StringIO(text))
  ]


def write_comparison(
    folder: pathlib.Path,
    runs: Sequence[tuple[str, int, pathlib.Path]],
) -> None:
  """Writes the results of all runs of a comparison into its folder.

  Args:
    folder: The comparison's folder.
    runs: The name of each run in the table, its seed, and its folder. Runs with
      the same name are averaged.
  """
  results = [(name, seed, read(path)) for name, seed, path in runs]
  if not any(rows for _, _, rows in results):
    return
  files.replace(
      folder / run_folder.HELD_OUT_CSV,
      csv_files.to_csv(
          ['algorithm', 'seed', *_COLUMNS],
          (
              [name, seed, *dataclasses.astuple(row)]
              for name, seed, rows in results
              for row in rows
          ),
      ),
  )
  text = table([(name, rows) for name, _, rows in results], ALGORITHM)
  files.replace(folder / run_folder.HELD_OUT_MARKDOWN, text)
  print(text)
  print(
      f'Held-out clients: {folder / run_folder.HELD_OUT_MARKDOWN},'
      f' {folder / run_folder.HELD_OUT_CSV}'
  )


def table(
    results: Iterable[tuple[str, Sequence[Result]]], first_column: str
) -> str:
  """Returns `table_cells` as Markdown, with notes."""
  return tables.markdown(
      table_cells(results, first_column), notes(first_column)
  )


def notes(first_column: str) -> list[str]:
  """Returns sentences that explain `table_cells`."""
  means = ''
  if first_column != CLIENT:
    means = '; mean over the seeds ± standard deviation'
  return [
      f'Accuracies: {measures.HELD_OUT}; value of the last round{means}.',
      *(f'{name}: {text}.' for name, text in _EXPLANATIONS.items()),
  ]


def of_runs(
    runs: Iterable[tuple[str, pathlib.Path]], first_column: str
) -> list[list[str]]:
  """Returns `table_cells` for names and folders of runs, if any has results."""
  results = [(name, read(folder)) for name, folder in runs]
  if not any(rows for _, rows in results):
    return []
  return table_cells(results, first_column)


def table_cells(
    results: Iterable[tuple[str, Sequence[Result]]], first_column: str
) -> list[list[str]]:
  """Returns a table of accuracies.

  Args:
    results: The name of each run and its results. Runs with the same name are
      averaged.
    first_column: 'Algorithm', or 'Client' if there is a single run.

  Returns:
    The titles, and a line for each client of each run.
  """
  labels = list(dict.fromkeys([first_column, CLIENT]))
  accuracies = pd.DataFrame(
      [
          (name, row.client, row.statistics, row.accuracy)
          for name, rows in results
          for row in rows
      ],
      columns=[ALGORITHM, CLIENT, 'statistics', 'accuracy'],
  ).astype({'accuracy': float})
  lines = accuracies.pivot_table(
      index=labels,
      columns='statistics',
      values='accuracy',
      aggfunc=lambda shares: tables.mean_and_deviation(100 * shares.dropna()),
      sort=False,
      fill_value='–',
  ).reindex(columns=list(_EXPLANATIONS), fill_value='–')
  return [
      [*labels, *(f'{name}, %' for name in _EXPLANATIONS)],
      *lines.reset_index().to_numpy().tolist(),
  ]
