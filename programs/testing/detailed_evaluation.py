"""Evaluates models by class, label or target, and writes the files of that."""

from collections.abc import Iterable
import csv
import pathlib
from typing import Any

from tff_bn import data as tff_bn_data
from tff_bn.common import files
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.programs.results import detailed_tables
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import model_evaluation
from tff_bn.training import detailed_reports
from tff_bn.training import evaluation
from tff_bn.training import saved_models

_BATCH_SIZE = 256


class DetailedEvaluation:
  """Collects the details of several models.

  Attributes:
    details: The details of the models, in their order.
  """

  def __init__(self, saved: saved_models.SavedModels):
    """Initializes it for the models of a run."""
    self._task = saved.manifest['task']
    self._names = _names(saved)
    self.details: list[detailed_tables.Details] = []

  def add(
      self, model: str, client: str, batches: Iterable[tuple[Any, Any]]
  ) -> None:
    """Adds a model.

    Args:
      model: 'global', or 'own' for the personal model of the client.
      client: The client whose test data is used; '' for the whole test set.
      batches: The labels and the model's outputs, see `Evaluator.outputs`.
    """
    report = detailed_reports.report_of_batches(
        self._task, batches, self._names
    )
    self.details.append(detailed_tables.Details.of(report, model, client))

  def describe(self) -> str:
    """Returns the table of the first model for the terminal."""
    return detailed_tables.markdown(self._task, self.details[0])

  def write(self, folder: pathlib.Path, prefix: str = '') -> list[str]:
    """Replaces the files with the details in a folder.

    Args:
      folder: The folder, which exists.
      prefix: The beginning of the files' names.

    Returns:
      The names of the files.
    """
    remove(folder, prefix)  # Another task has other files.
    texts = detailed_tables.to_csv(self._task, self.details)
    for name, text in texts.items():
      files.replace(folder / f'{prefix}{name}', text)
    return [f'{prefix}{name}' for name in texts]


def remove(folder: pathlib.Path, prefix: str = '') -> None:
  """Removes the files with details in a folder."""
  for name in run_folder.DETAILS:
    (folder / f'{prefix}{name}').unlink(missing_ok=True)


def _names(saved: saved_models.SavedModels) -> tuple[str, ...]:
  """Returns the names of the classes, labels or targets of a run's models."""
  return model_evaluation.class_names(saved) or detailed_reports.default_names(
      saved.manifest['task'], saved.manifest['num_outputs']
  )


def evaluate_final_models(
    model: BatchNormModel, data: tff_bn_data.FederatedData, run: pathlib.Path
) -> list[str]:
  """Writes the details of the final models of a run into its folder.

  They are the models of the best round if it is kept, or of the last one: the
  global model on the whole test set, and the models of the clients
  in `client_metrics.csv` on the clients' own test data.

  Args:
    model: The model with which the run was trained.
    data: The run's data.
    run: The run's folder, with its models.

  Returns:
    The names of the files.
  """
  saved = saved_models.SavedModels(run_folder.models_folder(run))
  evaluator = evaluation.Evaluator(model)
  weights = saved.weights(model)
  found = DetailedEvaluation(saved)
  found.add(
      'global', '', evaluator.outputs(weights, data.test_dataset(_BATCH_SIZE))
  )
  path = run / run_folder.CLIENT_METRICS
  with path.open(encoding='utf-8', newline='') as file:
    # The file can have rows of other rounds.
    clients = [
        row['client']
        for row in csv.DictReader(file)
        if int(row['round']) == saved.manifest['round']
    ]
  for client in clients:
    has_own = client in saved.client_ids
    found.add(
        'own' if has_own else 'global',
        client,
        evaluator.outputs(
            saved.weights(model, client) if has_own else weights,
            data.client_test_dataset(client, _BATCH_SIZE),
        ),
    )
  return found.write(run)
