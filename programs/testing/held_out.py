"""Tests the final model of a run on clients that took no part in training."""

from collections.abc import Iterable, Sequence
import pathlib

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
_COLUMNS = ['client', 'statistics', 'num_examples', 'accuracy', 'loss']


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
        ' statistics, but there is no batch normalization with'
        f' {settings.describe_model()}.'
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
          (
              client_id,
              name,
              metrics['num_examples'],
              metrics['accuracy'] if has_data else None,
              metrics['loss'] if has_data else None,
          )
      )
  path = folder / run_folder.HELD_OUT_CSV
  files.replace(path, csv_files.to_csv(_COLUMNS, results))
  print(table(read(folder), CLIENT))
  print(f'Held-out clients: {path}', flush=True)


def read(folder: pathlib.Path) -> pd.DataFrame:
  """Reads a run's results as texts; no rows if they are not there."""
  path = folder / run_folder.HELD_OUT_CSV
  if not path.exists():
    return pd.DataFrame(columns=_COLUMNS, dtype=str)
  # A client can have the name `NA`.
  return pd.read_csv(path, dtype=str, keep_default_na=False)


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
  results = pd.concat(
      [
          read(path).assign(algorithm=name, seed=seed)
          for name, seed, path in runs
      ]
  )
  if results.empty:
    return
  files.replace(
      folder / run_folder.HELD_OUT_CSV,
      results[['algorithm', 'seed', *_COLUMNS]].to_csv(
          index=False, lineterminator='\n'
      ),
  )
  text = table(results, ALGORITHM)
  files.replace(folder / run_folder.HELD_OUT_MARKDOWN, text)
  print(text)
  print(
      f'Held-out clients: {folder / run_folder.HELD_OUT_MARKDOWN},'
      f' {folder / run_folder.HELD_OUT_CSV}'
  )


def table(results: pd.DataFrame, first_column: str) -> str:
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
  results = pd.concat(
      [read(folder).assign(algorithm=name) for name, folder in runs]
  )
  return [] if results.empty else table_cells(results, first_column)


def table_cells(results: pd.DataFrame, first_column: str) -> list[list[str]]:
  """Returns a table of accuracies.

  Args:
    results: The results with the names of runs as `algorithm`. Runs with the
      same name are averaged.
    first_column: 'Algorithm', or 'Client' if there is a single run.

  Returns:
    The titles, and a line for each client of each run.
  """
  labels = ['client'] if first_column == CLIENT else ['algorithm', 'client']
  percent = 100 * pd.to_numeric(results['accuracy'])
  lines = results.assign(percent=percent).pivot_table(
      index=labels,
      columns='statistics',
      values='percent',
      aggfunc=lambda values: tables.mean_and_deviation(values.dropna()),
      sort=False,
      fill_value='–',
  )
  lines = lines.reindex(columns=list(_EXPLANATIONS), fill_value='–')
  titles = dict.fromkeys([first_column, CLIENT])
  return [
      [*titles, *(f'{name}, %' for name in _EXPLANATIONS)],
      *lines.reset_index().to_numpy().tolist(),
  ]
