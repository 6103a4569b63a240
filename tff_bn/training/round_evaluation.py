"""Evaluates the models of a run, of the server or of the clients."""

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import copy
import functools
import itertools
from typing import Any, NamedTuple, Optional

import tensorflow as tf

from tff_bn.common import seeding
from tff_bn.data.federated import FederatedData
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import best_round
from tff_bn.training import client_metrics as client_metrics_lib
from tff_bn.training import client_state_store
from tff_bn.training import evaluation
from tff_bn.training import measures
from tff_bn.training import metrics_log
from tff_bn.training import rounds
from tff_bn.training.training_config import TrainingConfig

_BATCH_SIZE = 256


class _ClientModels(NamedTuple):
  """The algorithm whose clients have own models, and the clients' states.

  The store has the states of the clients that were sampled at least once.
  """

  process: StatefulLearningProcess
  store: client_state_store.ClientStateStore


def is_due(config: TrainingConfig, round_num: int) -> bool:
  """Whether the model after a round is evaluated."""
  last = config.rounds
  return round_num == last or (
      round_num < last and round_num % config.evaluate_every == 0
  )


class RoundEvaluation:
  """Evaluates the models of a run.

  Attributes:
    test_dataset: The central test set.
    client_metrics: The results of single clients.
    has_validation: Whether clients have validation data.
    metric_names: The names of the metrics' numbers, see `Evaluator`.
  """

  def __init__(
      self,
      process: Process,
      model: BatchNormModel,
      data: FederatedData,
      config: TrainingConfig,
      store: Optional[client_state_store.ClientStateStore],
      make_dataset: Callable[..., Any],
      client_metrics: client_metrics_lib.ClientMetrics,
  ):
    """Initializes the evaluation.

    `store` has the clients' states, if they have any. `make_dataset` returns
    the training data of clients for a computation, with the arguments of
    `FederatedData.client_dataset`.
    """
    self.client_metrics = client_metrics
    # The round after which the clients' states count; None: the last one.
    self._states_of: Optional[int] = None
    self._process = process
    self._store = store
    self._make_dataset = make_dataset
    # The last result of `evaluated_state`, with the number of its round.
    self._evaluated: Optional[tuple[int, Any]] = None
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
    # Data of the same form may have none.
    validation = getattr(data, 'validation_indices', {})
    self.has_validation = any(map(len, validation.values()))

  @property
  def has_client_models(self) -> bool:
    """Whether the clients have own models."""
    return self._client_models is not None

  def after(self, round_num: int) -> 'RoundEvaluation':
    """Returns an evaluation that ignores clients' states of later rounds."""
    earlier = copy.copy(self)
    earlier._states_of = round_num
    return earlier

  def evaluate(
      self, state: Any, round_num: int
  ) -> collections.OrderedDict[str, float]:
    """Evaluates the models after a round, if the round is due.

    Returns:
      The columns of `metrics.csv` that come from evaluation.
    """
    columns: collections.OrderedDict[str, float] = collections.OrderedDict()
    if not is_due(self._config, round_num):
      return columns
    state = self.evaluated_state(state, round_num)
    weights, shared = self._evaluated_weights(state)
    test: Optional[evaluation.Metrics]
    if shared is not None:
      test = self._evaluator.evaluate(shared, self.test_dataset)
    else:
      test = self._evaluator.evaluate_clients(weights, self._whole_test_dataset)
    by_client = self._evaluate_each_client(weights)
    is_last = round_num == self._config.rounds
    if is_last or self.client_metrics.is_over_time:
      self._write_client_metrics(state, round_num, by_client)
    results = {
        measures.TEST: test,
        measures.CLIENT_TEST: evaluation.mean_over_clients(by_client),
    }
    if self.has_validation:
      results[measures.VALIDATION] = self._evaluator.evaluate_clients(
          weights,
          lambda client_id: self._data.client_validation_dataset(
              client_id, _BATCH_SIZE
          ),
      )
    for prefix, result in results.items():
      if result is not None:
        numbers = evaluation.numbers(result)
        for name in ('loss', *self.metric_names):
          columns[f'{prefix}{name}'] = numbers[name]
    if self._config.evaluate_train_loss:
      train = self._evaluator.evaluate_clients(weights, self._train_dataset)
      assert train is not None  # Each client has training data.
      columns[f'{measures.CLIENT_TRAIN}loss'] = train['loss']
    main = metrics_log.main_metric(self.metric_names)
    columns.update(
        client_metrics_lib.spread_columns(
            {c: evaluation.numbers(found) for c, found in by_client.items()},
            main,
            best_round.kind(main).higher_is_better,
        )
    )
    return columns

  def _write_client_metrics(
      self,
      state: Any,
      round_num: int,
      by_client: Mapping[str, evaluation.Metrics],
  ) -> None:
    """Writes the results of clients after a round: client_metrics.csv.

    If there are only a few clients, it has the results of all clients that can
    be evaluated, otherwise only the given results, of the clients in a mean.
    Clients without test data are left out.
    """
    results = dict(by_client)
    clients = self._candidates()
    if len(clients) <= measures.MAX_TABLE_CLIENTS:
      for client_id in clients:
        # Only one client's weights are in memory at a time.
        if client_id not in by_client:
          weights, _ = self._evaluated_weights(state, [client_id])
          results |= self._evaluate_each_client(weights)
    self.client_metrics.add(
        round_num,
        {
            client_id: evaluation.numbers(results[client_id])
            for client_id in sorted(results, key=self._data.client_number)
        },
    )

  def complete(self, state: Any, round_num: int) -> None:
    """Writes the clients' results after the last round, unless it has done so.

    The file may be from an earlier program, and changed since. `state` is the
    final `evaluated_state`.
    """
    if not self.client_metrics.has(round_num):
      weights, _ = self._evaluated_weights(state)
      self._write_client_metrics(
          state, round_num, self._evaluate_each_client(weights)
      )

  def _evaluate_each_client(
      self, weights: Mapping[str, ModelWeights]
  ) -> dict[str, evaluation.Metrics]:
    return self._evaluator.evaluate_each_client(
        weights,
        lambda client_id: self._data.client_test_dataset(
            client_id, _BATCH_SIZE
        ),
    )

  def _whole_test_dataset(self, client_id: str) -> tf.data.Dataset:
    """Returns the central test set as the model of a client takes it."""
    # Data of the same form may have none.
    if getattr(self._data, 'client_scalings', None) is None:
      return self.test_dataset
    return self._data.test_dataset(_BATCH_SIZE, client_id)

  def _train_dataset(self, client_id: str) -> tf.data.Dataset:
    """Returns all training data of a client, without augmentation."""
    return self._data.client_dataset(
        [client_id],
        seed=self._config.seed,
        round_num=0,
        batch_size=_BATCH_SIZE,
        local_epochs=1,
        augment=False,
    )

  def evaluated_state(self, state: Any, round_num: int) -> Any:
    """Returns the state whose models are evaluated after a round.

    It is the result of the process's `evaluation_state` on the training data of
    at most `max_evaluation_clients` clients, or `state` itself if the process
    has no such computation.
    """
    process, store = self._process, self._store
    if (
        store is None
        or not isinstance(process, StatefulLearningProcess)
        or process.evaluation_state is None
    ):
      return state
    if self._evaluated is None or self._evaluated[0] != round_num:
      clients = self._evaluation_clients(self._data.client_ids)
      numbers = [self._data.client_number(client_id) for client_id in clients]
      datasets = [
          self._make_dataset(
              (client_id,),
              seed=self._config.seed,
              round_num=round_num,
              batch_size=self._config.batch_size,
              local_epochs=1,
              augment=False,
          )
          for client_id in clients
      ]
      self._evaluated = round_num, process.evaluation_state(
          state,
          rounds.client_states(
              process, store, state, clients, numbers, self._states_of
          ),
          datasets,
      )
    return self._evaluated[1]

  def _candidates(self) -> Collection[str]:
    """Returns the clients that can be evaluated.

    If clients have own models, these are the clients that have one already.
    """
    models = self._client_models
    sampled = () if models is None else self._sampled(models)
    return sampled or self._data.client_ids

  def _sampled(self, models: _ClientModels) -> tuple[str, ...]:
    """Returns the clients that were sampled at least once."""
    return models.store.client_ids(self._states_of)

  def _evaluated_weights(
      self, state: Any, clients: Optional[Sequence[str]] = None
  ) -> tuple[dict[str, ModelWeights], Optional[ModelWeights]]:
    """Returns the weights by client, and the weights that all share, if any.

    By default, the clients are those of which a mean is taken.
    """
    if clients is None:
      clients = self._evaluation_clients(self._candidates())
    models = self._client_models
    if models is None:
      shared = self._process.get_model_weights(state)
      return dict.fromkeys(clients, shared), shared
    process, store = models
    if not process.has_personal_state and not self._sampled(models):
      initial = process.initialize_client(state)
      shared = process.get_client_model_weights(state, initial)
      return dict.fromkeys(clients, shared), shared
    numbers = [self._data.client_number(client_id) for client_id in clients]
    states = rounds.client_states(
        process, store, state, clients, numbers, self._states_of
    )
    own = {
        client_id: process.get_client_model_weights(state, client_state)
        for client_id, client_state in zip(clients, states)
    }
    return own, None

  def _evaluation_clients(self, candidates: Collection[str]) -> Sequence[str]:
    """Chooses clients. The same candidates give the same choice."""
    among = set(candidates)
    chosen = itertools.islice(
        (client_id for client_id in self._order if client_id in among),
        self._config.max_evaluation_clients,
    )
    return sorted(chosen, key=self._data.client_number)

  @functools.cached_property
  def _order(self) -> Sequence[str]:
    """The clients in the order in which they are chosen."""
    ids = tuple(self._data.client_ids)
    rng = seeding.generator(
        seeding.Stream.EVALUATION_CLIENTS, self._config.seed
    )
    return [ids[number] for number in rng.permutation(len(ids))]

  def final_weights(
      self,
      state: Any,
      visit: Callable[[str, ModelWeights], None] = lambda *client: None,
  ) -> ModelWeights:
    """Returns the weights of the final model.

    Args:
      state: The final `evaluated_state`.
      visit: Called with the id and the weights of each client that was sampled
        at least once, if the clients have own models. Only one client's weights
        are in memory at a time.

    Returns:
      The server's weights. If the clients have own models, the weights that are
      merged from these.
    """
    models = self._client_models
    if models is None:
      return self._process.get_model_weights(state)

    def visited() -> Iterator[ModelWeights]:
      for client_id, client_state in models.store.newest(self._states_of):
        weights = models.process.get_client_model_weights(state, client_state)
        visit(client_id, weights)
        yield weights

    return evaluation.merge_client_weights(self._model, visited())

  def num_client_models(self) -> int:
    """Returns the number of clients that `final_weights` visits."""
    models = self._client_models
    return 0 if models is None else len(self._sampled(models))

  def new_client_weights(
      self, state: Any, weights: ModelWeights
  ) -> Iterator[tuple[str, ModelWeights]]:
    """Yields the id and the model of each client that was never sampled.

    If the clients have own models, its model is the final one, with `weights`,
    but with the client's personal phases. `state` is the final
    `evaluated_state`.
    """
    models = self._client_models
    if models is None:
      return
    process, sampled = models.process, set(self._sampled(models))
    initial = process.initialize_client(state)
    for number, client_id in enumerate(self._data.client_ids):
      if client_id not in sampled:
        own = process.get_client_model_weights(
            state, process.personalize(initial, number)
        )
        yield client_id, evaluation.with_phases(self._model, weights, own)
