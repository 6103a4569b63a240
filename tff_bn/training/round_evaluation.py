"""Evaluates the models of a run, of the server or of the clients."""

import collections
from collections.abc import Collection, Iterator, Sequence
import dataclasses
from typing import Any, Optional

from tff_bn.common import seeding
from tff_bn.data.federated import FederatedData
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import client_state_store
from tff_bn.training import evaluation
from tff_bn.training.training_config import TrainingConfig

_BATCH_SIZE = 256


@dataclasses.dataclass(frozen=True)
class _ClientModels:
  """The clients' own models.

  Attributes:
    process: The algorithm.
    store: The states of the clients that were sampled at least once.
  """

  process: StatefulLearningProcess
  store: client_state_store.ClientStateStore

  def weights(self, state: Any, client_id: str) -> ModelWeights:
    """Returns the weights of a client that was sampled at least once."""
    return self.process.get_client_model_weights(
        state, self.store.get(client_id)
    )


class RoundEvaluation:
  """Evaluates the models of a run.

  Attributes:
    test_dataset: The central test set.
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
      store: The clients' states; `None` if they have none.
    """
    self._process = process
    self._model = model
    self._data = data
    self._config = config
    self._client_models: Optional[_ClientModels] = None
    if (
        store is not None
        and isinstance(process, StatefulLearningProcess)
        and process.has_client_models
    ):
      self._client_models = _ClientModels(process, store)
    self._evaluator = evaluation.Evaluator(model)
    self.test_dataset = data.test_dataset(_BATCH_SIZE)
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
    columns: collections.OrderedDict[str, float] = collections.OrderedDict()
    if not self.is_due(round_num):
      return columns
    weights, shared = self._evaluated_weights(state)
    test: Optional[evaluation.Metrics]
    if shared is not None:
      test = self._evaluator.evaluate(shared, self.test_dataset)
    else:
      test = self._evaluator.evaluate_clients(
          weights, lambda client_id: self.test_dataset
      )
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

  def _evaluated_weights(
      self, state: Any
  ) -> tuple[dict[str, ModelWeights], Optional[ModelWeights]]:
    """Returns the weights by client, and the weights that all share, if any."""
    models = self._client_models
    if models is not None and (sampled := models.store.client_ids()):
      clients = self._evaluation_clients(sampled)
      return {c: models.weights(state, c) for c in clients}, None
    clients = self._evaluation_clients(self._data.client_ids)
    if models is None:
      shared = self._process.get_model_weights(state)
      return dict.fromkeys(clients, shared), shared
    process = models.process
    initial = process.initialize_client(state)
    if not process.has_personal_state:
      shared = process.get_client_model_weights(state, initial)
      return dict.fromkeys(clients, shared), shared
    own = {
        client_id: process.get_client_model_weights(
            state, process.personalize(initial, number)
        )
        for number, client_id in enumerate(self._data.client_ids)
        if client_id in clients
    }
    return own, None

  def _evaluation_clients(self, candidates: Collection[str]) -> Sequence[str]:
    """Chooses clients. The same candidates give the same choice."""
    ids = tuple(self._data.client_ids)
    order = seeding.generator(
        seeding.Stream.EVALUATION_CLIENTS, self._config.seed
    ).permutation(len(ids))
    among = set(candidates)
    chosen = [ids[i] for i in order if ids[i] in among]
    return sorted(chosen[: self._config.max_evaluation_clients], key=ids.index)

  def final_weights(self, state: Any) -> ModelWeights:
    """Returns the weights of the final model.

    Args:
      state: The server's final state.

    Returns:
      The server's weights. If the clients have own models, the weights that are
      merged from these.
    """
    if self._client_models is None:
      return self._process.get_model_weights(state)
    return evaluation.merge_client_weights(
        self._model,
        (weights for _, weights in self.client_weights(state)),
    )

  def client_weights(self, state: Any) -> Iterator[tuple[str, ModelWeights]]:
    """Yields the weights of the clients' own models, one after another.

    Args:
      state: The server's state.

    Yields:
      The id and the weights of each client that was sampled at least once, if
      the clients have own models.
    """
    models = self._client_models
    if models is not None:
      for client_id in models.store.client_ids():
        yield client_id, models.weights(state, client_id)
