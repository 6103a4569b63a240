"""Which models are evaluated in a run, on what, and in which rounds."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np

from tff_bn.data.federated import FederatedData
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import client_state_store
from tff_bn.training import evaluation
from tff_bn.training.training_config import TrainingConfig

_BATCH_SIZE = 256
# Keeps this draw apart from others with the same seed.
_EVALUATION_CLIENTS_STREAM = 0x6576616C


class RoundEvaluation:
  """Evaluates the models of a run.

  Attributes:
    test_dataset: The central test set.
    has_client_models: Whether each client has a model of its own.
    metric_names: The names of the model's metrics.
  """

  def __init__(
      self,
      process: Process,
      model: BatchNormModel,
      data: FederatedData,
      config: TrainingConfig,
      store: Optional[client_state_store.ClientStateStore],
  ):
    """Initializes the evaluation.

    Args:
      process: The algorithm.
      model: The model.
      data: The clients' data.
      config: The settings.
      store: What the clients keep; `None` if they keep nothing.
    """
    self._process = process
    self._model = model
    self._data = data
    self._config = config
    self._store = store
    self._evaluator = evaluation.Evaluator(model)
    self.test_dataset = data.test_dataset(_BATCH_SIZE)
    self.has_client_models = (
        isinstance(process, StatefulLearningProcess)
        and process.has_client_models
    )
    self.metric_names = self._evaluator.metric_names

  def is_due(self, round_num: int) -> bool:
    """Whether the model after a round is evaluated."""
    last = self._config.rounds
    return round_num == last or (
        round_num < last and round_num % self._config.evaluate_every == 0
    )

  def evaluate(
      self, state: Any, round_num: int
  ) -> collections.OrderedDict[str, float]:
    """Evaluates the models after a round, if the round is due.

    Args:
      state: The server's state.
      round_num: The number of finished rounds.

    Returns:
      The columns of `metrics.csv` that come from evaluation.
    """
    columns = collections.OrderedDict()
    if not self.is_due(round_num):
      return columns
    if not self.has_client_models:
      clients = self._evaluation_clients(self._data.client_ids)
      server_weights = self._process.get_model_weights(state)
      weights = dict.fromkeys(clients, server_weights)
      test = self._evaluator.evaluate(server_weights, self.test_dataset)
    elif self._store.client_ids() or self._process.has_personal_state:
      weights = self._own_weights(state)
      test = self._evaluator.evaluate_clients(
          weights, lambda client_id: self.test_dataset
      )
    else:
      initial = self._process.get_client_model_weights(
          state, self._process.initialize_client(state)
      )
      clients = self._evaluation_clients(self._data.client_ids)
      weights = dict.fromkeys(clients, initial)
      test = self._evaluator.evaluate(initial, self.test_dataset)
    client_test = self._evaluator.evaluate_clients(
        weights,
        lambda client_id: self._data.client_test_dataset(
            client_id, _BATCH_SIZE
        ),
    )
    for prefix, result in (('test_', test), ('client_test_', client_test)):
      for name in ('loss', *self._evaluator.metric_names):
        if result is not None:
          columns[f'{prefix}{name}'] = result[name]
    return columns

  def final_weights(self, state: Any) -> ModelWeights:
    """Makes the weights of the final model.

    Args:
      state: The server's final state.

    Returns:
      The server's weights, or those that are merged from the clients' models.
    """
    if not self.has_client_models:
      return self._process.get_model_weights(state)
    return evaluation.merge_client_weights(
        self._model,
        (weights for _, weights in self.client_weights(state)),
    )

  def client_weights(self, state: Any) -> Iterator[tuple[str, ModelWeights]]:
    """Makes the weights of the clients' own models, one after another.

    Args:
      state: The server's state.

    Yields:
      The id and the weights of each client that has been sampled.
    """
    for client_id in self._store.client_ids():
      yield client_id, self._weights_of(state, client_id)

  def _own_weights(self, state: Any) -> dict[str, ModelWeights]:
    """The weights of the clients that are evaluated, by client."""
    if self._store.client_ids():
      clients = self._evaluation_clients(self._store.client_ids())
      return {c: self._weights_of(state, c) for c in clients}
    # Before the first round; the chosen ones of all clients.
    initial = self._process.initialize_client(state)
    clients = self._evaluation_clients(self._data.client_ids)
    number_of = {c: n for n, c in enumerate(self._data.client_ids)}
    return {
        c: self._process.get_client_model_weights(
            state, self._process.personalize(initial, number_of[c])
        )
        for c in clients
    }

  def _evaluation_clients(self, candidates: Sequence[str]) -> list[str]:
    """Chooses clients; the same ones as long as the candidates are the same."""
    ids = tuple(self._data.client_ids)
    candidates = set(candidates)
    order = np.random.default_rng(
        [self._config.seed, _EVALUATION_CLIENTS_STREAM]
    ).permutation(len(ids))
    chosen = {
        ids[i]
        for i in [i for i in order if ids[i] in candidates][
            : self._config.max_evaluation_clients
        ]
    }
    return [client_id for client_id in ids if client_id in chosen]

  def _weights_of(self, state: Any, client_id: str) -> ModelWeights:
    return self._process.get_client_model_weights(
        state, self._store.get(client_id)
    )
