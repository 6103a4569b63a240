"""Finished runs for the analyses: data, models and further training.

Importing this module imports TensorFlow Federated.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any, Optional

import keras
import numpy as np

from tff_bn import data as tff_bn_data
from tff_bn.common import progress
from tff_bn.common import seeding
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import SINGLE
from tff_bn.keras_model.partition import Role
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import report
from tff_bn.programs.runs import run_building
from tff_bn.programs.testing import model_evaluation
from tff_bn.training import saved_models

_BATCH_SIZE = 256


@dataclasses.dataclass(frozen=True)
class AnalyzedRun:
  """A finished run.

  Attributes:
    name: The run's name in tables and figures. The runs of a comparison that
      differ only in the seed have the same name.
    folder: The run's folder.
    settings: Its settings.
    data: Its data.
    model: Its model.
    weights: The weights of its global model.
    saved: Its saved models.
  """

  name: str
  folder: pathlib.Path
  settings: settings_lib.RunSettings
  data: tff_bn_data.FederatedData
  model: BatchNormModel
  weights: ModelWeights
  saved: saved_models.SavedModels

  @property
  def seed(self) -> int:
    """The run's seed."""
    return self.settings.seed

  @functools.cached_property
  def keras_model(self) -> keras.Model:
    """The global model."""
    return self.model.to_keras(self.weights)

  @functools.cached_property
  def test_accuracy(self) -> float:
    """The final accuracy in the run's metrics.csv."""
    return report.read_rows(self.folder)[-1]['test_accuracy']

  @property
  def has_client_models(self) -> bool:
    """Whether clients have their own models."""
    return bool(self.saved.client_ids)

  @functools.cached_property
  def local_training(self) -> StatefulLearningProcess:
    """The clients' local training; their state has all variables by name."""
    return run_building.build_local_training(self.settings, self.model)

  def client_weights(self, client_id: str) -> ModelWeights:
    """Returns the weights with which a client begins a round."""
    return run_building.client_weights(
        self.settings,
        self.saved,
        self.model,
        client_id,
        self.data.client_number(client_id),
    )

  def client_state(
      self, weights: ModelWeights
  ) -> collections.OrderedDict[str, Any]:
    """Returns the state of `local_training` with these weights.

    Args:
      weights: The weights. Variables that training cannot change have the same
        values as in `model`.

    Raises:
      ValueError: If they have other values.
    """
    values = self.model.from_model_weights(weights)
    shared = SharedWeights(self.model, SINGLE)
    shared.check_constants(values)
    return shared.local(values)

  def test_examples(
      self, num_examples: int, seed: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Draws examples of the central test set.

    Args:
      num_examples: The number of examples; all if there are fewer.
      seed: The random seed.

    Returns:
      x, `float32[examples, ...]`, and y, `int32[examples]`.
    """
    batches = list(self.data.test_dataset(_BATCH_SIZE))
    x, y = (np.concatenate(parts) for parts in zip(*batches))
    if num_examples < len(x):
      rng = seeding.generator(seeding.Stream.ANALYZED_EXAMPLES, seed)
      chosen = np.sort(rng.choice(len(x), num_examples, replace=False))
      x, y = x[chosen], y[chosen]
    return x, y

  def check_units(self) -> None:
    """Checks that the hidden units of the global model can be permuted.

    Raises:
      ValueError: If they can't, or the model has several outputs.
    """
    permutation.outputs(self.keras_model, self.test_examples(1, 0)[0])
    if not tied_units.unit_groups(self.keras_model):
      raise ValueError('the model has no hidden units that can be permuted.')

  def draw_clients(self, num_clients: Optional[int], seed: int) -> list[str]:
    """Draws clients.

    Args:
      num_clients: The number of clients. Default: the number in a round.
      seed: The random seed.

    Returns:
      Their ids, in the order of the data.

    Raises:
      ValueError: If the data has fewer clients.
    """
    ids = self.data.client_ids
    if num_clients is None:
      num_clients = self.settings.clients_per_round or len(ids)
    if num_clients > len(ids):
      raise ValueError(
          f'--num_clients={num_clients} is more than the {len(ids)} clients of'
          ' the run.'
      )
    rng = seeding.generator(seeding.Stream.ANALYZED_CLIENTS, seed)
    chosen = rng.choice(len(ids), int(num_clients), replace=False)
    return [ids[position] for position in sorted(chosen)]

  def train_clients(self, client_ids: Sequence[str]) -> list[ModelWeights]:
    """Trains clients for the round after the run's last one.

    This is ordinary training with the run's optimizer, learning rate, batches
    and steps or epochs, without additions of the run's algorithm such as drift
    correction.

    Args:
      client_ids: The clients. Each starts from its own model if it has one,
        else from the run's global model.

    Returns:
      The weights of each client after its training.

    Raises:
      RuntimeError: If a client's training diverges.
    """
    (trained,) = self.train_rounds(client_ids, 1)
    return trained

  def train_rounds(
      self, client_ids: Sequence[str], num_rounds: int
  ) -> Iterator[list[ModelWeights]]:
    """Trains like `train_clients` for several rounds.

    Between two rounds, FedAvg averages the clients' models.

    Args:
      client_ids: The clients.
      num_rounds: The number of rounds.

    Yields:
      The weights of each client after its training in a round.

    Raises:
      RuntimeError: If a client's training diverges.
    """
    settings = self.settings
    # With local steps, all clients train on the same number of examples.
    is_uniform = settings.client_weighting == 'uniform' or settings.local_steps
    counts = [
        1 if is_uniform else len(self.data.train_indices[client_id])
        for client_id in client_ids
    ]
    starts = {
        client_id: self.client_weights(client_id) for client_id in client_ids
    }
    for round_num in range(settings.rounds, settings.rounds + num_rounds):
      trained = self._train_round(starts, round_num)
      yield trained
      starts = dict(zip(client_ids, self._averaged(trained, counts)))

  def _averaged(
      self, trained: Sequence[ModelWeights], counts: Sequence[int]
  ) -> list[ModelWeights]:
    """Averages the clients' float weights, except personal phases."""
    clients = [self.model.from_model_weights(weights) for weights in trained]
    for position, info in enumerate(self.model.variables):
      if (
          info.dtype.is_floating
          and info.role is not Role.PERSONAL_PHASE
          and position not in self.model.constants
      ):
        values = np.stack([np.asarray(client[position]) for client in clients])
        mean = np.average(values.astype(np.float64), axis=0, weights=counts)
        for client in clients:
          client[position] = mean.astype(values.dtype)
    return [self.model.to_model_weights(client) for client in clients]

  def train_halves(self, num_epochs: int, seed: int) -> list[ModelWeights]:
    """Trains two models independently, each on a half of the training data.

    The models have different initial weights, except for those that training
    cannot change. The learning rate and the batch size are the same as in the
    clients' local training.

    Args:
      num_epochs: The number of epochs.
      seed: The random seed of the halves and the initial weights.

    Returns:
      The weights of both models.

    Raises:
      RuntimeError: If the training of a model diverges.
    """
    rng = seeding.generator(seeding.Stream.ANALYZED_HALVES, seed)
    samples = np.concatenate(list(self.data.train_indices.values()))
    halves = np.array_split(rng.permutation(samples), 2)
    starts = {}
    own = self.model.from_model_weights(self.model.initial_weights)
    for number in range(2):
      settings = self.settings.replaced(seed=int(rng.integers(2**32)))
      model = run_building.build_model(settings, self.data)
      starts[f'half {number + 1}'] = model.to_model_weights(
          [
              own[position] if position in self.model.constants else value
              for position, value in enumerate(
                  model.from_model_weights(model.initial_weights)
              )
          ]
      )
    on_halves = dataclasses.replace(
        self,
        settings=self.settings.replaced(
            seed=seed, local_steps=None, local_epochs=num_epochs
        ),
        data=dataclasses.replace(
            self.data,
            train_indices=dict(zip(starts, halves)),
            test_indices=dict.fromkeys(starts, np.zeros(0, np.int64)),
            recipe=None,
        ),
    )
    return on_halves._train_round(starts, 0)

  def _train_round(
      self, starts: Mapping[str, ModelWeights], num_finished: int
  ) -> list[ModelWeights]:
    """Trains clients with these initial weights after `num_finished` rounds."""
    settings, process = self.settings, self.local_training
    # The clients' training uses only the round's number from the state.
    state = process.initialize()
    state.client_work['round_num'] = np.int32(num_finished)
    output = process.next(
        state,
        [self.client_state(weights) for weights in starts.values()],
        [
            self.data.client_dataset(
                [client_id],
                seed=settings.seed,
                round_num=num_finished + 1,
                batch_size=settings.batch_size,
                local_steps=settings.local_steps,
                local_epochs=settings.local_epochs,
            )
            for client_id in starts
        ],
    )
    num_dropped = int(output.metrics['client_work']['num_dropped_clients'])
    if num_dropped:
      raise RuntimeError(
          f'the local training of {num_dropped} of {len(starts)} clients of'
          f' --run={self.folder} diverged: a loss or a weight is not finite.'
      )
    return [
        process.get_client_model_weights(output.state, client_state)
        for client_state in output.client_states
    ]


def load(
    named_runs: Mapping[pathlib.Path, tuple[str, settings_lib.RunSettings]],
) -> list[AnalyzedRun]:
  """Loads finished runs.

  Args:
    named_runs: The name and the settings of each run, by its folder.

  Returns:
    The runs in the same order.

  Raises:
    ValueError: If the data or a model of a run can't be loaded.
  """
  # Most compared runs have the same dataset.
  datasets: dict[tuple, tff_bn_data.Dataset] = {}
  runs = []
  for number, (folder, (name, settings)) in enumerate(named_runs.items(), 1):
    progress.say(f'[{number}/{len(named_runs)}] Loading {folder} …')
    saved, model = run_building.load_models(settings, folder)
    names = model_evaluation.class_names(saved)
    key = (settings.dataset_key, names)
    if key not in datasets:
      datasets[key] = settings.load(names)
    data = run_building.split_dataset(settings, datasets[key])
    runs.append(
        AnalyzedRun(
            name, folder, settings, data, model, saved.weights(model), saved
        )
    )
  return runs
