"""Tests the final model of a run on clients that took no part in training."""

from collections.abc import Callable, Iterable, Sequence
import pathlib
from typing import Optional

import pandas as pd

from tff_bn import data as tff_bn_data
from tff_bn import runtime
from tff_bn.catalog import columns
from tff_bn.catalog import tasks
from tff_bn.common import csv_files
from tff_bn.common import files
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_folder
from tff_bn.training import evaluation
from tff_bn.training import finished
from tff_bn.training import later_clients
from tff_bn.training import measures
from tff_bn.training import saved_models
from tff_bn.training import unseen_clients

_BATCH_SIZE = 256
# After training batch normalization on frozen other weights.
_TRAINED = 'trained'
# The first column of the table of a comparison, and of a single run.
ALGORITHM = 'Algorithm'
_PLURALS = {'accuracy': 'Accuracies'}
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
    _TRAINED: (
        "the second, then the client's own scale, shift and statistics trained"
        ' on its labeled training data for --held_out_epochs'
    ),
}
_ROUND = 'round'
_LABELS = ['client', 'statistics', _ROUND, 'num_examples']
# The columns that are no metrics.
_NOT_METRICS = frozenset({'algorithm', 'seed', *_LABELS, columns.LOSS.name})


def check_model(
    settings: settings_lib.RunSettings, model: BatchNormModel
) -> None:
  """Checks that a run's model can be tested on clients that did not train.

  Raises:
    ValueError: If there are such clients, but the model has no BN statistics,
      or no trainable scale or shift for `--held_out_epochs`.
  """
  if settings.held_out_clients is not None and not model.has_batch_norm:
    raise ValueError(
        f'--held_out_clients={",".join(settings.held_out_clients)} tests BN'
        ' statistics, but there is no batch normalization with'
        f' {settings.describe_model()}.'
    )
  if settings.held_out_epochs is not None:
    try:
      later_clients.check_trainable(model)
    except ValueError as error:
      raise ValueError(
          f'--held_out_epochs={settings.held_out_epochs} is impossible with'
          f' {settings.describe_model()}: {error}'
      ) from error


def test_clients(
    settings: settings_lib.RunSettings,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
    folder: pathlib.Path,
    build_local_training: Callable[[BatchNormModel], StatefulLearningProcess],
) -> None:
  """Tests the final model of a run, prints the results and writes a CSV file.

  Args:
    settings: The run's settings.
    model: The model with which the run was trained.
    data: The data of the clients that took no part in training.
    folder: The run's folder.
    build_local_training: Builds the run's local training for a model.
  """
  saved = saved_models.SavedModels(run_folder.models_folder(folder))
  weights = saved.weights(model)
  evaluator = evaluation.Evaluator(model)
  assert settings.held_out_prior is not None  # There are held-out clients.
  names = [*evaluator.metric_names, columns.LOSS.name]
  results = []
  training: Optional[later_clients.BatchNormTraining] = None
  if settings.held_out_epochs is not None:
    training = later_clients.BatchNormTraining(
        model, weights, build_local_training
    )
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
    if training is not None:
      with runtime.in_process_runtime():
        models[_TRAINED] = training.train(
            models[unseen_clients.REESTIMATED],
            data,
            client_id,
            epochs=settings.held_out_epochs,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )
    test_dataset = data.client_test_dataset(client_id, _BATCH_SIZE)
    for name, client_weights in models.items():
      metrics = evaluation.numbers(
          evaluator.evaluate(client_weights, test_dataset)
      )
      has_data = metrics['num_examples'] > 0
      results.append(
          (
              client_id,
              name,
              saved.manifest['round'],
              metrics['num_examples'],
              *(metrics[name] if has_data else None for name in names),
          )
      )
  path = folder / run_folder.HELD_OUT_CSV
  files.replace(path, csv_files.to_csv([*_LABELS, *names], results))
  print(table(read(folder), CLIENT))
  print(f'Held-out clients: {path}', flush=True)


def read(folder: pathlib.Path) -> pd.DataFrame:
  """Reads a run's results as texts; no rows if they are not there."""
  path = folder / run_folder.HELD_OUT_CSV
  if not path.exists():
    return pd.DataFrame(columns=_LABELS, dtype=str)
  # A client can have the name `NA`.
  found = pd.read_csv(path, dtype=str, keep_default_na=False)
  if _ROUND not in found:  # As earlier versions wrote it.
    manifest = finished.read_models_manifest(folder / run_folder.MODEL)
    found[_ROUND] = str(manifest['round'])
  return found


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
      results.to_csv(
          columns=['algorithm', 'seed', *_run_columns(results)],
          index=False,
          lineterminator='\n',
      ),
  )
  text = table(results, ALGORITHM)
  files.replace(folder / run_folder.HELD_OUT_MARKDOWN, text)
  print(text)
  print(
      f'Held-out clients: {folder / run_folder.HELD_OUT_MARKDOWN},'
      f' {folder / run_folder.HELD_OUT_CSV}'
  )


def _run_columns(results: pd.DataFrame) -> list[str]:
  """Returns the columns of the results of a single run."""
  return [c for c in results.columns if c not in ('algorithm', 'seed')]


def _main_kind(results: pd.DataFrame) -> columns.Kind:
  """Returns the kind of the first metric."""
  return tasks.kind(next(c for c in results.columns if c not in _NOT_METRICS))


def table(results: pd.DataFrame, first_column: str) -> str:
  """Returns `table_cells` as Markdown, with notes."""
  return tables.markdown(
      table_cells(results, first_column),
      _notes(first_column, results),
  )


def _notes(first_column: str, results: pd.DataFrame) -> list[str]:
  """Returns sentences that explain `table_cells`."""
  kind = _main_kind(results)
  rounds = results[_ROUND].unique()
  when = f'after round {rounds[0]}'
  if len(rounds) > 1:
    when = f'after the rounds that are in {run_folder.HELD_OUT_CSV}'
  means = ''
  if first_column != CLIENT:
    means = '; mean over the seeds ± standard deviation'
  return [
      f'{_PLURALS.get(kind.name, kind.heading)}: {measures.HELD_OUT};'
      f' {when}{means}.',
      *(f'{name}: {_EXPLANATIONS[name]}.' for name in _kinds(results)),
  ]


def _kinds(results: pd.DataFrame) -> list[str]:
  """Returns the kinds of statistics in a table; not all runs train them."""
  found = set(results['statistics'])
  return [name for name in _EXPLANATIONS if name != _TRAINED or name in found]


def of_runs(
    runs: Iterable[tuple[str, pathlib.Path]], first_column: str
) -> tuple[list[list[str]], list[str]]:
  """Returns `table_cells` and notes for names and folders of runs.

  Both are empty if no run has results.
  """
  results = pd.concat(
      [read(folder).assign(algorithm=name) for name, folder in runs]
  )
  if results.empty:
    return [], []
  return table_cells(results, first_column), _notes(first_column, results)


def table_cells(results: pd.DataFrame, first_column: str) -> list[list[str]]:
  """Returns a table of the main metric.

  Args:
    results: The results with the names of runs as `algorithm`. Runs with the
      same name are averaged.
    first_column: 'Algorithm', or 'Client' if there is a single run.

  Returns:
    The titles, and a line for each client of each run.
  """
  labels = ['client'] if first_column == CLIENT else ['algorithm', 'client']
  kind = _main_kind(results)
  shown = kind.factor * pd.to_numeric(results[kind.name])
  lines = results.assign(shown=shown).pivot_table(
      index=labels,
      columns='statistics',
      values='shown',
      aggfunc=lambda values: tables.mean_and_deviation(
          values.dropna(), kind.digits
      ),
      sort=False,
      fill_value='–',
  )
  lines = lines.reindex(columns=_kinds(results), fill_value='–')
  titles = dict.fromkeys([first_column, CLIENT])
  return [
      [*titles, *(f'{name}{kind.unit}' for name in _kinds(results))],
      *lines.reset_index().to_numpy().tolist(),
  ]
