"""Adapts the model of a run to clients that join later, and tests it."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Optional

import numpy as np

from tff_bn import data as tff_bn_data
from tff_bn import runtime
from tff_bn.common import progress
from tff_bn.common import spelling
from tff_bn.data import class_balance
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.programs.flags import run_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import report
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import model_evaluation
from tff_bn.training import evaluation
from tff_bn.training import later_clients
from tff_bn.training import saved_models

_BATCH_SIZE = 256
# The value of `report.Evaluation.model`.
ADAPTED = 'adapted'
# The share of samples that would have to change their class for the mix of
# classes in the run, from which on statistics of all samples are said to be
# harmful. What is to be expected by chance is subtracted.
_MUCH_LABEL_SHIFT = 0.25


@dataclasses.dataclass(frozen=True)
class AdaptedClient:
  """A client with its model.

  Attributes:
    client_id: The client.
    num_training_examples: The number of its training examples.
    before: The model of the run on the client's test data.
    after: The adapted model.
    path: The file of the adapted model.
  """

  client_id: str
  num_training_examples: int
  before: report.Evaluation
  after: report.Evaluation
  path: pathlib.Path


def say_label_shift(
    saved: saved_models.SavedModels, data: tff_bn_data.FederatedData
) -> None:
  """Says for which clients statistics of all their samples may be harmful."""
  counts = saved.manifest.get('class_counts')
  if counts is None:
    return
  run_shares = np.asarray(counts) / sum(counts)
  shifted = []
  for client_id in data.client_ids:
    shares = _shares(data, client_id, len(counts))
    number = len(data.train_indices[client_id])
    if label_shift(shares, number, run_shares) >= _MUCH_LABEL_SHIFT:
      most = int((shares - run_shares).argmax())
      shifted.append(
          f'{client_id} ({data.label_names[most]}: {shares[most]:.0%} instead'
          f' of {run_shares[most]:.0%})'
      )
  if shifted:
    progress.say(
        'The mix of classes in the training data differs from the'
        f" run's for {spelling.name_some(shifted)}. Statistics of all samples"
        ' fit this mix, and can lower the accuracy on data with another one.'
        f' --{run_flags.BALANCE_CLASSES} counts each class alike.'
    )


def _shares(
    data: tff_bn_data.FederatedData, client_id: str, num_classes: int
) -> np.ndarray:
  """Returns the share of each of the run's classes in a client's samples."""
  counts = class_balance.class_counts(data, client_id)
  # The data of a new client may lack the run's last classes.
  return np.pad(counts, (0, num_classes - len(counts))) / counts.sum()


def label_shift(
    shares: np.ndarray, number: int, expected_shares: np.ndarray
) -> float:
  """Returns how far the mix of classes is from what is expected.

  Args:
    shares: The share of each class among the samples.
    number: The number of samples.
    expected_shares: The share of each class that is expected.

  Returns:
    The total variation distance, which is the share of samples that would have
    to change their class, less the mean distance of as many samples that are
    drawn with the expected shares (in the normal approximation).
  """
  chance = np.sqrt(
      2 * expected_shares * (1 - expected_shares) / (np.pi * number)
  )
  return float((np.abs(shares - expected_shares) - chance).sum() / 2)


def say_missing_classes(data: tff_bn_data.FederatedData) -> None:
  """Says which classes of clients can't be balanced, because they lack them."""
  incomplete = []
  for client_id in data.client_ids:
    counts = class_balance.class_counts(data, client_id)
    missing = [n for n, count in zip(data.label_names, counts) if not count]
    if missing:
      incomplete.append(f'{client_id} ({spelling.name_some(missing)})')
  if incomplete:
    progress.say(
        'Without training samples of a class:'
        f' {spelling.name_some(incomplete)}. Their statistics are of the other'
        ' classes alone.'
    )


def adapt(
    settings: settings_lib.RunSettings,
    saved: saved_models.SavedModels,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
    folder: pathlib.Path,
    how: str,
    epochs: int,
    build_local_training: Callable[[BatchNormModel], StatefulLearningProcess],
    export: Callable[[str, ModelWeights, pathlib.Path], None],
) -> tuple[list[AdaptedClient], dict[str, str]]:
  """Adapts the model of a run to each client, and saves it.

  Args:
    settings: The run's settings.
    saved: The run's models.
    model: The model with which the run was trained.
    data: The clients' data.
    folder: The folder in which there is a folder for the models.
    how: A key of `run_flags.ADAPT`.
    epochs: The number of passes over a client's training data, of
      `run_flags.BATCH_NORM`.
    build_local_training: Builds the run's local training for a model.
    export: Saves a client's weights as a Keras file.

  Returns:
    The results of the clients; and why others are left out: those whose
    training data gives no statistics.
  """
  evaluator = evaluation.Evaluator(model)

  def evaluate(
      kind: str, client_id: str, weights: ModelWeights
  ) -> report.Evaluation:
    return model_evaluation.evaluate_weights(
        evaluator,
        weights,
        data.client_test_dataset(client_id, _BATCH_SIZE),
        kind,
        client_id,
    )

  batches = dict(batch_size=settings.batch_size, seed=settings.seed)
  training: Optional[later_clients.BatchNormTraining] = None
  clients = []
  left_out = {}
  with runtime.in_process_runtime():
    # Thousands of clients take minutes.
    for number in progress.counting(len(data.client_ids), 'Adapting client'):
      client_id = data.client_ids[number]
      own = client_id if client_id in saved.client_ids else None
      weights = saved.weights(model, own)
      try:
        new_weights = later_clients.own_statistics(
            model, weights, data, client_id, **batches
        )
      except ValueError as error:
        left_out[client_id] = str(error)
        continue
      if how == run_flags.BATCH_NORM:
        # Clients with own models can differ in more than their BN.
        if training is None or not training.fits(weights):
          training = later_clients.BatchNormTraining(
              model, weights, build_local_training
          )
        new_weights = training.train(
            new_weights, data, client_id, epochs=epochs, **batches
        )
      before = evaluate('global' if own is None else 'own', client_id, weights)
      stem = saved_models.client_file_stem(client_id)
      path = folder / run_folder.ADAPTED / f'{stem}.keras'
      export(client_id, new_weights, path)
      clients.append(
          AdaptedClient(
              client_id,
              len(set(data.train_indices[client_id].tolist())),
              before,
              evaluate(ADAPTED, client_id, new_weights),
              path,
          )
      )
  return clients, left_out


def table(clients: list[AdaptedClient], max_rows: int) -> str:
  """Returns a Markdown table of the main metric before and after."""
  kind = report.evaluated_kind(next(iter(clients[0].before.metrics)))

  def text(found: report.Evaluation) -> str:
    number: Optional[float] = next(iter(found.metrics.values()))
    return '–' if number is None else kind.text(number)

  name = f'{kind.heading}{kind.unit}'
  cells = [
      ['Client', 'Training examples', 'Test examples']
      + [f'{name}, before', f'{name}, adapted']
  ]
  for client in clients[:max_rows]:
    cells.append(
        [
            client.client_id,
            str(client.num_training_examples),
            str(client.after.num_examples),
            text(client.before),
            text(client.after),
        ]
    )
  return tables.markdown(cells)
