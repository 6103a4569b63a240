"""Evaluates models by class, label or target, and writes the files of that."""

from collections.abc import Collection, Iterable, Iterator
import contextlib
import csv
import pathlib
from typing import Any, Optional, TextIO

from tff_bn import data as tff_bn_data
from tff_bn.common import files
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.programs.results import detailed_tables
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import model_evaluation
from tff_bn.training import detailed_reports
from tff_bn.training import saved_models


class DetailedEvaluation:
  """Writes the details of several models into files, see `writing`.

  Attributes:
    names: The names of the files.
  """

  def __init__(
      self,
      saved: saved_models.SavedModels,
      folder: pathlib.Path,
      prefix: str,
      stack: contextlib.ExitStack,
  ):
    self._task = saved.manifest['task']
    self._class_names = _class_names(saved)
    self._first: Optional[detailed_tables.Details] = None
    self._folder = folder
    self._prefix = prefix
    self._stack = stack
    self.names: list[str] = []
    self._writer = detailed_tables.Writer(self._task, self._open)

  def _open(self, name: str) -> TextIO:
    self.names.append(f'{self._prefix}{name}')
    path = self._stack.enter_context(
        files.replacing(self._folder / self.names[-1])
    )
    return self._stack.enter_context(
        path.open('w', encoding='utf-8', newline='')
    )

  def add(
      self, model: str, client: str, batches: Iterable[tuple[Any, Any]]
  ) -> None:
    """Adds a model.

    Args:
      model: 'global', or 'own' for the personal model of the client.
      client: The client whose test data is used; '' for the whole test set.
      batches: The labels and the model's outputs of each batch.
    """
    report = detailed_reports.report_of_batches(
        self._task, batches, self._class_names
    )
    details = detailed_tables.Details.of(report, model, client)
    self._first = self._first or details
    self._writer.add(details)

  def describe(self) -> str:
    """Returns the table of the first model for the terminal."""
    assert self._first is not None
    return detailed_tables.markdown(self._task, self._first)


@contextlib.contextmanager
def writing(
    saved: saved_models.SavedModels, folder: pathlib.Path, prefix: str = ''
) -> Iterator[DetailedEvaluation]:
  """Replaces the files with the details of a run's models in a folder.

  Args:
    saved: The run's models.
    folder: The folder, which exists.
    prefix: The beginning of the files' names.

  Yields:
    An evaluation, to which the models are added. The old files stay until the
    end of the `with` block, and after an error.
  """
  with contextlib.ExitStack() as stack:
    details = DetailedEvaluation(saved, folder, prefix, stack)
    yield details
  # Another task has other files.
  remove(folder, prefix, kept=details.names)


def remove(
    folder: pathlib.Path, prefix: str = '', kept: Collection[str] = ()
) -> None:
  """Removes the files with details in a folder, except for some of them."""
  for name in run_folder.DETAILS:
    if f'{prefix}{name}' not in kept:
      (folder / f'{prefix}{name}').unlink(missing_ok=True)


def _class_names(saved: saved_models.SavedModels) -> tuple[str, ...]:
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
  path = run / run_folder.CLIENT_METRICS
  with path.open(encoding='utf-8', newline='') as file:
    # The file can have rows of other rounds.
    clients = [
        row['client']
        for row in csv.DictReader(file)
        if int(row['round']) == saved.manifest['round']
    ]
  with writing(saved, run) as details:
    for _ in model_evaluation.evaluate_models(
        saved, model, data, clients, visit=details.add
    ):
      pass
  return details.names
