"""A finished run as the analyses need it: its data, its models, more training.

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
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import SINGLE
from tff_bn.keras_model.partition import Role
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.programs import experiment
from tff_bn.programs import report
from tff_bn.programs import settings as settings_lib
from tff_bn.training import saved_models

_BATCH_SIZE = 256
# Keep these draws apart from others with the same seed.
_EXAMPLES_STREAM = 0x6578616D
_CLIENTS_STREAM = 0x636C6965
_HALVES_STREAM = 0x68616C66


@dataclasses.dataclass(frozen=True)
class AnalyzedRun:
  """A finished run.

  Attributes:
    name: What the run is called in tables and figures; the runs of a comparison
      that differ in the seed alone have the same name.
    folder: Its folder.
    settings: Its settings.
    data: Its data.
    model: Its model.
    weights: The weights of its global model.
    saved: Its models.
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
    """The accuracy that the run ended with, from its metrics.csv."""
    run = report.read_run(self.settings.algorithm, self.seed, self.folder)
    return run.rows[-1]['test_accuracy']

  @property
  def has_client_models(self) -> bool:
    """Whether clients have models of their own."""
    return bool(self.saved.client_ids)

  @functools.cached_property
  def local_training(self) -> StatefulLearningProcess:
    """The clients' local training; their state has all variables by name."""
    return experiment.build_local_training(self.settings, self.model)

  def client_weights(self, client_id: str) -> ModelWeights:
    """The weights that a client begins a round with."""
    if client_id in self.saved.client_ids:
      return self.saved.weights(self.model, client_id)
    # It has not taken part yet, but may have position encodings of its own.
    client_state = self.local_training.personalize(
        self.client_state(self.weights), self.data.client_ids.index(client_id)
    )
    return self.model.to_model_weights(client_state.values())

  def client_state(
      self, weights: ModelWeights
  ) -> collections.OrderedDict[str, Any]:
    """The state of `local_training` with these weights."""
    values = self.model.from_model_weights(weights)
    return SharedWeights(self.model, SINGLE).local(values)

  def test_examples(
      self, num_examples: int, seed: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Draws examples of the central test set.

    Args:
      num_examples: How many; all if there are fewer.
      seed: Which ones.

    Returns:
      x, float32 `[examples, ...]`, and y, int32 `[examples]`.
    """
    batches = list(self.data.test_dataset(_BATCH_SIZE))
    x, y = (np.concatenate(parts) for parts in zip(*batches))
    if num_examples < len(x):
      rng = np.random.default_rng([seed, _EXAMPLES_STREAM])
      chosen = np.sort(rng.choice(len(x), num_examples, replace=False))
      x, y = x[chosen], y[chosen]
    return x, y

  def check_units(self) -> None:
    """Checks that the hidden units of the global model can be permuted.

    Raises:
      ValueError: If they can't, or the model has several outputs.
    """
    try:
      has_units = bool(tied_units.unit_groups(self.keras_model))
      permutation.outputs(self.keras_model, self.test_examples(1, 0)[0])
    except ValueError as error:
      raise ValueError(f'--run={self.folder}: {error}') from error
    if not has_units:
      raise ValueError(
          f'--run={self.folder}: its model has no hidden units that could be'
          ' permuted.'
      )

  def draw_clients(self, num_clients: Optional[int], seed: int) -> list[str]:
    """Draws clients.

    Args:
      num_clients: How many. Default: as many as take part in a round.
      seed: Which ones.

    Returns:
      Their ids, in the order of the data.

    Raises:
      ValueError: If there are not so many.
    """
    ids = self.data.client_ids
    if num_clients is None:
      num_clients = self.settings.clients_per_round or len(ids)
    if num_clients > len(ids):
      raise ValueError(
          f'--num_clients={num_clients} is more than the {len(ids)} clients of'
          f' --run={self.folder}.'
      )
    rng = np.random.default_rng([seed, _CLIENTS_STREAM])
    chosen = rng.choice(len(ids), num_clients, replace=False)
    return [ids[position] for position in sorted(chosen)]

  def train_clients(self, client_ids: Sequence[str]) -> list[ModelWeights]:
    """Trains as clients would in the round after the run's last one.

    With the run's optimizer, learning rate, batches and steps or epochs, but
    without what its algorithm does besides ordinary training, such as a
    correction of the clients' drift.

    Args:
      client_ids: The clients. Each starts from the run's global model, or its
        own if it has one.

    Returns:
      The weights of each client after it.

    Raises:
      RuntimeError: If a client's training diverges.
    """
    (trained,) = self.train_rounds(client_ids, 1)
    return trained

  def train_rounds(
      self, client_ids: Sequence[str], num_rounds: int
  ) -> Iterator[list[ModelWeights]]:
    """Trains as `train_clients`, and goes on for more rounds.

    Between two rounds, FedAvg makes one model of the clients'.

    Args:
      client_ids: The clients.
      num_rounds: The number of rounds.

    Yields:
      In each round, the weights of each client after it.

    Raises:
      RuntimeError: If a client's training diverges.
    """
    settings = self.settings
    # How many examples a client trains on. With steps it is the same for all.
    are_alike = settings.client_weighting == 'uniform' or settings.local_steps
    counts = [
        1 if are_alike else len(self.data.train_indices[client_id])
        for client_id in client_ids
    ]
    starts = {
        client_id: self.client_weights(client_id) for client_id in client_ids
    }
    rounds = _LocalRounds(self, settings.rounds)
    for _ in range(num_rounds):
      trained = rounds.next_round(starts)
      yield trained
      starts = dict(zip(client_ids, self._averaged(trained, counts)))

  def _averaged(
      self, trained: Sequence[ModelWeights], counts: Sequence[int]
  ) -> list[ModelWeights]:
    """What each client gets when FedAvg has averaged their weights."""
    clients = [self.model.from_model_weights(weights) for weights in trained]
    for position, info in enumerate(self.model.variables):
      if info.dtype.is_floating and info.role is not Role.PERSONAL_PHASE:
        values = np.stack([np.asarray(client[position]) for client in clients])
        mean = np.average(values.astype(np.float64), axis=0, weights=counts)
        for client in clients:
          client[position] = mean.astype(values.dtype)
    return [self.model.to_model_weights(client) for client in clients]

  def train_halves(self, num_epochs: int, seed: int) -> list[ModelWeights]:
    """Trains two models independently, each on a half of the training data.

    They differ in their initial weights, too. The learning rate and the batch
    size are those of the clients' local training.

    Args:
      num_epochs: How many times to go through the half.
      seed: Determines the halves and the initial weights.

    Returns:
      The weights of both.

    Raises:
      RuntimeError: If the training of one diverges.
    """
    rng = np.random.default_rng([seed, _HALVES_STREAM])
    samples = np.concatenate(list(self.data.train_indices.values()))
    halves = np.array_split(rng.permutation(samples), 2)
    starts = {}
    for number in range(2):
      settings = dataclasses.replace(
          self.settings, seed=int(rng.integers(2**32))
      )
      model = experiment.build_model(settings, self.data)
      starts[f'half {number + 1}'] = model.initial_weights
    on_halves = dataclasses.replace(
        self,
        settings=dataclasses.replace(
            self.settings, seed=seed, local_steps=None, local_epochs=num_epochs
        ),
        data=dataclasses.replace(
            self.data,
            train_indices=dict(zip(starts, halves)),
            test_indices={},
            recipe=None,
        ),
    )
    rounds = _LocalRounds(on_halves, 0)
    return rounds.next_round(starts)


class _LocalRounds:
  """Local training, one round after another."""

  def __init__(self, run: AnalyzedRun, num_finished: int):
    """Builds the training.

    Args:
      run: Whose settings, model and data are used.
      num_finished: The number of rounds that were before.
    """
    self._run = run
    self._num_finished = num_finished
    self._process = run.local_training
    self._state = self._process.initialize()
    self._state.client_work['round_num'] = np.int32(num_finished)

  def next_round(
      self, starts: Mapping[str, ModelWeights]
  ) -> list[ModelWeights]:
    """Trains each client.

    Args:
      starts: The weights with which the clients begin, by client.

    Returns:
      The weights of each client after it.

    Raises:
      RuntimeError: If a client's training diverges.
    """
    self._num_finished += 1
    run, settings = self._run, self._run.settings
    output = self._process.next(
        self._state,
        [run.client_state(weights) for weights in starts.values()],
        [
            run.data.client_dataset(
                [client_id],
                seed=settings.seed,
                round_num=self._num_finished,
                batch_size=settings.batch_size,
                local_steps=settings.local_steps,
                local_epochs=settings.local_epochs,
            )
            for client_id in starts
        ],
    )
    self._state = output.state
    num_dropped = int(output.metrics['client_work']['num_dropped_clients'])
    if num_dropped:
      raise RuntimeError(
          f'the local training of {num_dropped} of {len(starts)} clients of'
          f' --run={run.folder} diverged: a loss or a weight is not finite.'
      )
    return [
        self._process.get_client_model_weights(self._state, client_state)
        for client_state in output.client_states
    ]


def load(
    named_runs: Mapping[pathlib.Path, tuple[str, settings_lib.RunSettings]],
) -> list[AnalyzedRun]:
  """Loads finished runs.

  Args:
    named_runs: Each run's name and settings by its folder.

  Returns:
    The runs, in the same order.

  Raises:
    ValueError: If the data or a model of one can't be loaded.
  """
  # Runs that are compared are most often on the same dataset.
  datasets = {}
  runs = []
  for folder, (name, settings) in named_runs.items():
    key = (settings.dataset, settings.data_dir, settings.image_size)
    if key not in datasets:
      datasets[key] = settings.load()
    data = experiment.split_dataset(settings, datasets[key])
    saved, model = experiment.load_models(settings, folder)
    runs.append(
        AnalyzedRun(
            name, folder, settings, data, model, saved.weights(model), saved
        )
    )
  return runs
