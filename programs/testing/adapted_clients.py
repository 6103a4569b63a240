"""Adapts the model of a run to clients that join later, and tests it."""

from collections.abc import Callable, Iterator
import dataclasses
import pathlib
from typing import Optional

from tff_bn import data as tff_bn_data
from tff_bn import runtime
from tff_bn.catalog import tasks
from tff_bn.common import progress
from tff_bn.common import spelling
from tff_bn.data import class_balance
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.programs.flags import run_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import report
from tff_bn.programs.results import tables
from tff_bn.programs.runs import run_building
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import model_evaluation
from tff_bn.training import evaluation
from tff_bn.training import later_clients
from tff_bn.training import saved_models

_BATCH_SIZE = 256
# The value of `report.Evaluation.model`.
ADAPTED = 'adapted'
# The share of samples that would have to change their class for equal classes,
# from which on statistics of all samples are said to be harmful.
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


def say_label_shift(data: tff_bn_data.FederatedData) -> None:
  """Says for which clients statistics of all their samples may be harmful."""
  if not tasks.has_sample_classes(data.task):
    return
  for client_id in data.client_ids:
    shares = class_balance.class_shares(data, client_id)
    shift = abs(shares - 1 / len(shares)).sum() / 2
    if shift >= _MUCH_LABEL_SHIFT:
      largest = data.label_names[int(shares.argmax())]
      progress.say(
          f'{client_id}: {shares.max():.0%} of its training samples are of'
          f' the class {largest}. Statistics of all samples fit this mix'
          ' of classes, and can lower the accuracy on data with another one.'
          f' --{run_flags.BALANCE_CLASSES} counts each class alike.'
      )


def say_missing_classes(data: tff_bn_data.FederatedData) -> None:
  """Says which classes of clients can't be balanced, because they lack them."""
  for client_id in data.client_ids:
    shares = class_balance.class_shares(data, client_id)
    missing = [
        name for name, share in zip(data.label_names, shares) if not share
    ]
    if missing:
      progress.say(
          f'{client_id}: no training samples of {spelling.name_some(missing)};'
          ' its statistics are of the other classes alone.'
      )


def adapt(
    settings: settings_lib.RunSettings,
    saved: saved_models.SavedModels,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
    folder: pathlib.Path,
    how: str,
    epochs: int,
    export: Callable[[ModelWeights, pathlib.Path], None],
) -> Iterator[AdaptedClient]:
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
    export: Saves weights as a Keras file.

  Yields:
    The results of one client after another.
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

  def adapted(client_id: str, weights: ModelWeights) -> ModelWeights:
    if how == run_flags.BATCH_NORM:
      return later_clients.train_batch_norm(
          model,
          weights,
          data,
          client_id,
          lambda frozen: run_building.build_local_training(settings, frozen),
          epochs=epochs,
          batch_size=settings.batch_size,
          seed=settings.seed,
      )
    return later_clients.own_statistics(
        model,
        weights,
        data,
        client_id,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )

  with runtime.in_process_runtime():
    for client_id in data.client_ids:
      own = client_id if client_id in saved.client_ids else None
      weights = saved.weights(model, own)
      before = evaluate('global' if own is None else 'own', client_id, weights)
      new_weights = adapted(client_id, weights)
      stem = saved_models.client_file_stem(client_id)
      path = folder / run_folder.EXPORTED / f'{stem}.keras'
      export(new_weights, path)
      yield AdaptedClient(
          client_id,
          len(set(data.train_indices[client_id].tolist())),
          before,
          evaluate(ADAPTED, client_id, new_weights),
          path,
      )


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
