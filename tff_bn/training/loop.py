"""The training loop: sampling, checkpoints, resume, metrics, the final model.

A run has a folder:

| entry | content |
| --- | --- |
| `metrics.csv` | one row for every evaluated round |
| `logdir/` | the same for TensorBoard |
| `checkpoints/` | the server's state after the last rounds |
| `client_states.sqlite` | what the clients keep, if they keep anything |
| `model/` | the final models, see `tff_bn.training.saved_models` |

Calling `train` again with the same arguments continues a run that was stopped,
in whatever way and at whatever moment, and ends with the same metrics and
weights as a run that was not. For that, everything random depends on the seed
and the number of the round alone.
"""

import asyncio
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import math
import os
import pathlib
import threading
import types
from typing import Any, Optional, Union
import warnings

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.analysis import communication
from tff_bn.data import federated
from tff_bn.imports import versions
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import checkpoints
from tff_bn.training import client_state_store
from tff_bn.training import evaluation
from tff_bn.training import folder_lock
from tff_bn.training import manifests
from tff_bn.training import metrics_log
from tff_bn.training import round_data
from tff_bn.training import run_identity
from tff_bn.training import saved_models
from tff_bn.training import termination

_EVALUATION_BATCH_SIZE = 256
# Keeps this draw apart from others with the same seed.
_EVALUATION_CLIENTS_STREAM = 0x6576616C
# A client whose update is so many times as large as the median one is reported.
_LARGE_NORM_RATIO = 10
# Settings with which a run may be continued, whatever they were before.
MAY_CHANGE = ('rounds', 'checkpoint_every', 'max_failed_rounds')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
  """How long and on what to train.

  Attributes:
    rounds: The number of rounds.
    clients_per_round: The number of clients that are sampled, uniformly without
      replacement, for every round. Default: all.
    batch_size: The number of examples in a client's batch.
    local_steps: The number of batches on which a client trains in a round.
    local_epochs: The number of passes over its data instead; exactly one of the
      two is set.
    seed: What the sampling of clients and of batches depends on.
    evaluate_every: The number of rounds between two evaluations. The initial
      model and the last round's are evaluated in any case.
    checkpoint_every: The number of rounds between two checkpoints. The last
      round has one in any case.
    max_failed_rounds: After this number of rounds in a row that changed nothing
      `train` raises an error: clients were dropped and none was left, or the
      server's new model was not finite.
    max_evaluation_clients: The most clients whose own models, or on whose own
      data, models are evaluated. If there are more, these are chosen by the
      seed.
  """

  rounds: int
  batch_size: int
  clients_per_round: Optional[int] = None
  local_steps: Optional[int] = None
  local_epochs: Optional[int] = None
  seed: int = 0
  evaluate_every: int = 10
  checkpoint_every: int = 10
  max_failed_rounds: int = 10
  max_evaluation_clients: int = 20

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name != 'seed' and value is not None and value < 1:
        raise ValueError(
            f'{field.name}={value} is not allowed; it must be at least 1.'
        )
    if not 0 <= self.seed < 2**32:
      raise ValueError(
          f'seed={self.seed} is not allowed; it must be from 0 to 2^32 - 1.'
      )
    if (self.local_steps is None) == (self.local_epochs is None):
      raise ValueError(
          f'local_steps={self.local_steps} and'
          f' local_epochs={self.local_epochs}: exactly one of the two must be'
          ' given.'
      )


class TrainingFailedError(RuntimeError):
  """The run has not come to a model that can be used."""


class TooManyFailedRoundsError(TrainingFailedError):
  """Some rounds in a row have changed nothing."""


class UnusableModelError(TrainingFailedError):
  """The final model, or its loss, is not finite."""


@dataclasses.dataclass(frozen=True)
class TrainingResult:
  """What a run ends with.

  Attributes:
    rows: The rows of `metrics.csv`, oldest first, as dictionaries by column.
      Empty cells are `None`. See `train` for the columns.
    state: The server's final state.
    model_weights: The weights of `model/model.keras`.
    resumed_from: The round after which this call continued the run; `None` if
      it started it.
  """

  rows: Sequence[metrics_log.Row]
  state: Any
  model_weights: ModelWeights
  resumed_from: Optional[int]


def train(
    process: Process,
    model: BatchNormModel,
    data: Any,
    config: TrainingConfig,
    run_dir: Union[str, os.PathLike[str]],
    *,
    train_on_union: bool = False,
    settings: Mapping[str, str] = types.MappingProxyType({}),
) -> TrainingResult:
  """Trains, or continues or just reads a run that its folder already holds.

  `metrics.csv` has these columns. `NAME` is `loss` or the name of one of the
  model's metrics.

  *   `round`: the number of finished rounds; 0 is the initial model.
  *   `train_NAME`: what the clients reported in that round alone, on the data
      that they trained on; empty for round 0.
  *   `test_NAME`: on the central test set. For an algorithm whose clients keep
      something (a `StatefulLearningProcess`) it is the mean over the clients
      that were sampled at least once, each with its own model. In round 0 it is
      the initial model, which they share; if they have position encodings of
      their own, the mean over the clients, each with its initial model.
  *   `client_test_NAME`: the mean over the clients of the model that each would
      use, on its own test data; empty if they have none.
  *   `num_clients`, `num_dropped_clients`: in that round.
  *   `rejected_rounds`: in how many rounds so far the server kept its model,
      because the new one was not finite.
  *   `max_update_norm_ratio`: the largest norm of a client's update in that
      round, divided by the median norm, see `tff_bn.clients.update_norms`.
  *   `exchanges`, `megabytes`: in all rounds so far, see
      `tff_bn.analysis.ProcessTraffic`; empty if it can't be counted.
  *   What the algorithm adds, in that round: `switched_to_fedprox` and
      `loss_std` of `tff_bn.algorithms.build_fed_bs`.

  Both kinds of means are over at most `config.max_evaluation_clients` clients.

  TFF's computations run in the default context of the calling thread, for which
  `tff_bn.runtime` has context managers. Inside a running event loop, as in a
  notebook, the work is done in another thread.

  Args:
    process: The algorithm. It should train once through all that it gets
      (`local_epochs=1`), because the datasets that it gets consist of the
      configured number of steps or epochs.
    model: The model with which the process was built.
    data: The clients' data, a `tff_bn.data.FederatedData`. A client's position
      in its `client_ids` is its number for `process.personalize`.
    config: The settings.
    run_dir: The run's folder; it need not exist. A folder that holds a run must
      hold the run of these arguments; `config.rounds` may have grown.
    train_on_union: Whether the process gets one client with the data of all
      sampled clients, in batches that are as many times as large; then nothing
      counts as sent.
    settings: What else the results depend on, by name: a run is continued only
      with the same settings. The arguments need not be repeated.

  Returns:
    The results.

  Raises:
    TooManyFailedRoundsError: If `config.max_failed_rounds` rounds in a row
      failed. The folder then holds the rounds up to there, but no model.
    UnusableModelError: If the final model or its loss on the test data is not
      finite. The folder then holds all rounds, but no model.
    TypeError: If a client's id is not a string.
    ValueError: If the arguments contradict each other or the folder, or what
      the folder holds is damaged.
    OSError: If a file can't be read or written at present.
    ClientStateStoreError: If `client_states.sqlite` is damaged or in use.
    WorkersLostError: If no worker is left, see `tff_bn.runtime.ray_runtime`;
      the finished rounds are saved.
  """
  federated.check_client_ids(data.client_ids)
  num_clients = len(data.client_ids)
  if (config.clients_per_round or 0) > num_clients:
    raise ValueError(
        f'clients_per_round={config.clients_per_round} asks for more clients'
        f' than the {num_clients} that there are; use at most {num_clients}.'
    )
  if train_on_union and isinstance(process, StatefulLearningProcess):
    raise ValueError(
        'train_on_union makes one client of all, but the clients of this'
        ' algorithm keep something of their own.'
    )
  run_dir = pathlib.Path(run_dir)
  run_dir.mkdir(parents=True, exist_ok=True)

  def run(stop: threading.Event) -> TrainingResult:
    with contextlib.ExitStack() as stack:
      stack.enter_context(folder_lock.hold(run_dir))
      run = _Run(
          process, model, data, config, run_dir, train_on_union, settings, stack
      )
      return run.train(stop)

  return _call_outside_of_event_loops(run)


def _call_outside_of_event_loops(
    fn: Callable[[threading.Event], TrainingResult],
) -> TrainingResult:
  """Calls a function that runs an event loop, from wherever this is called.

  Args:
    fn: The function. It gets an event that is set when it should stop.

  Returns:
    What the function returns.
  """
  stop = threading.Event()
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    with _own_event_loop():
      return fn(stop)

  # An event loop can't be run inside another one of the same thread.
  context = tff.framework.get_context_stack().current

  def call_in_thread() -> TrainingResult:
    tff.framework.set_default_context(context)  # It belongs to the thread.
    with _own_event_loop():
      return fn(stop)

  with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
    future = executor.submit(call_in_thread)
    try:
      return future.result()
    except BaseException:
      # Ctrl-C reaches this thread only; the other one stops after its round.
      stop.set()
      raise


@contextlib.contextmanager
def _own_event_loop() -> Iterator[None]:
  """Gives the thread an event loop, in which TFF's training loop works."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    try:
      previous = asyncio.get_event_loop()
    except RuntimeError:  # The thread has none.
      previous = None
  loop = asyncio.new_event_loop()
  asyncio.set_event_loop(loop)
  try:
    yield
  finally:
    # After Ctrl-C a checkpoint may still be being written.
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
      task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(previous)


@dataclasses.dataclass(frozen=True)
class _RoundData:
  """What the clients of a round train on.

  Attributes:
    round_num: The number of the round.
    client_ids: The sampled clients.
    client_numbers: Which clients of all they are.
    datasets: What the process gets for each of them, or for all together.
  """

  round_num: int
  client_ids: Sequence[str]
  client_numbers: Sequence[int]
  datasets: Sequence[Union[tf.data.Dataset, runtime.ClientDataset]]


class _Run:
  """A run with its folder."""

  def __init__(
      self,
      process: Process,
      model: BatchNormModel,
      data: Any,
      config: TrainingConfig,
      run_dir: pathlib.Path,
      train_on_union: bool,
      settings: Mapping[str, str],
      stack: contextlib.ExitStack,
  ):
    self._process = process
    self._model = model
    self._data = data
    self._config = config
    self._train_on_union = train_on_union
    context = tff.framework.get_context_stack().current
    # Such a context makes datasets itself, where and when they are used.
    self._makes_datasets = isinstance(
        context, runtime.PlanContext
    ) and isinstance(data, federated.FederatedData)
    self._run_dir = run_dir
    self._model_dir = run_dir / 'model'
    # `None` once it has turned out that it can't be counted.
    self._traffic: Optional[communication.ProcessTraffic] = (
        communication.ProcessTraffic(process)
    )
    self._sample_fn = tff.simulation.build_uniform_sampling_fn(
        range(len(data.client_ids)), random_seed=config.seed
    )
    self._evaluator = evaluation.Evaluator(model)
    self._test_dataset = data.test_dataset(_EVALUATION_BATCH_SIZE)
    self._identity = run_identity.RunIdentity(
        {
            **{
                name: value
                for name, value in dataclasses.asdict(config).items()
                if name not in MAY_CHANGE
            },
            'train_on_union': train_on_union,
            **settings,
        },
        data.fingerprint(),
        run_identity.describe_process(process, process.initialize()),
    )
    checkpoints.check_run(run_dir / 'checkpoints', self._identity)
    self._store: Optional[client_state_store.ClientStateStore] = None
    self._has_client_models = False
    if isinstance(process, StatefulLearningProcess):
      self._has_client_models = process.has_client_models
      self._store = stack.enter_context(
          client_state_store.SqliteClientStateStore(
              run_dir / 'client_states.sqlite', self._identity.checksum
          )
      )
    self._log = stack.enter_context(
        contextlib.closing(
            metrics_log.MetricsLog(
                run_dir,
                metric_names=self._evaluator.metric_names,
                correction_names=_correction_names(process),
                is_due=self._is_evaluated,
                num_rounds=config.rounds,
                costs_fn=self._costs_until,
            )
        )
    )
    self._checkpoints = checkpoints.CheckpointManager(
        run_dir / 'checkpoints',
        every=config.checkpoint_every,
        last_round=config.rounds,
        identity=self._identity,
        log=self._log,
        store=self._store,
        failed_rounds=_failed_rounds,
        is_finite=lambda state: _is_finite(process.get_model_weights(state)),
    )

  def train(self, stop: threading.Event) -> TrainingResult:
    """Runs the remaining rounds."""
    try:
      # Only while clients are computed, the program can be ended, so that a
      # round is recorded completely or not at all.
      with termination.deferred():
        return self._train(stop)
    except KeyboardInterrupt as error:
      saved = self._save_latest()
      if isinstance(error, termination.Terminated) and saved is not None:
        raise termination.Terminated(
            f'Round {saved} is saved; the same command goes on from there.'
        ) from error
      raise
    except runtime.WorkersLostError:
      self._save_latest()
      raise

  def _save_latest(self) -> Optional[int]:
    """Saves the last round before the program ends; returns it."""
    try:
      return self._checkpoints.save_latest()
    # The checkpoint before is good enough.
    except Exception as error:  # pylint: disable=broad-except
      logging.warning('The last round could not be saved: %s', error)
      return None

  def _train(self, stop: threading.Event) -> TrainingResult:
    def select(round_num: int) -> _RoundData:
      if stop.is_set():
        raise KeyboardInterrupt
      with termination.allowed():
        pass
      # From here on there is another final model to come.
      saved_models.remove(self._model_dir)
      return self._round_data(round_num)

    rounds = _IterativeProcess(
        self._process, self._store, self._config.max_failed_rounds
    )
    state = tff.simulation.run_training_process(
        rounds,
        training_selection_fn=select,
        total_rounds=self._config.rounds,
        evaluation_fn=self._evaluate,
        # The process has what `_evaluate` needs besides the round.
        evaluation_selection_fn=lambda round_num: round_num,
        # `_evaluate` and the checkpoints decide themselves, because the last
        # round counts too.
        rounds_per_evaluation=1,
        program_state_manager=self._checkpoints,
        rounds_per_saving_program_state=1,
        metrics_managers=[self._log],
    )
    rounds.check(state)
    weights = self._final_weights(state)
    self._check_usable(weights)
    if not self._has_saved_model():
      self._save_model(state, weights)
    return TrainingResult(
        rows=tuple(self._log.rows),
        state=state,
        model_weights=weights,
        resumed_from=self._checkpoints.resumed_from,
    )

  def _is_evaluated(self, round_num: int) -> bool:
    last = self._config.rounds
    return round_num == last or (
        round_num < last and round_num % self._config.evaluate_every == 0
    )

  @property
  def _num_sampled(self) -> int:
    return self._config.clients_per_round or len(self._data.client_ids)

  def _costs_until(self, round_num: int) -> metrics_log.Row:
    if self._train_on_union:
      return dict(exchanges=0, megabytes=0.0)
    if self._traffic is None:
      return {}
    try:
      return self._traffic.until(round_num, self._num_sampled)
    except (NotImplementedError, ValueError) as error:
      logging.warning(
          'The columns exchanges and megabytes stay empty: %s', error
      )
      self._traffic = None
      return {}

  def _round_data(self, round_num: int) -> _RoundData:
    all_ids = tuple(self._data.client_ids)
    numbers = range(len(all_ids))
    if self._num_sampled < len(numbers):
      # In the order of the data, so that the order of clients, on which sums
      # of floats depend, does not change from round to round.
      numbers = sorted(self._sample_fn(round_num, self._num_sampled))
    ids = tuple(all_ids[number] for number in numbers)
    batch_size = self._config.batch_size
    if self._train_on_union:
      groups, batch_size = [ids], batch_size * len(ids)
    else:
      groups = [[client_id] for client_id in ids]
    datasets = [
        self._make_dataset(
            group,
            seed=self._config.seed,
            round_num=round_num,
            batch_size=batch_size,
            local_steps=self._config.local_steps,
            local_epochs=self._config.local_epochs,
        )
        for group in groups
    ]
    return _RoundData(round_num, ids, numbers, datasets)

  def _make_dataset(
      self, client_ids: Sequence[str], **draw: Optional[int]
  ) -> Union[tf.data.Dataset, runtime.ClientDataset]:
    if self._makes_datasets:
      return round_data.RoundDataset(self._data, client_ids, **draw)
    return self._data.client_dataset(client_ids, **draw)

  def _evaluate(
      self, state: Any, round_num: int
  ) -> collections.OrderedDict[str, float]:
    """Returns the columns that come from evaluation, if the round has a row."""
    columns = collections.OrderedDict()
    if not self._is_evaluated(round_num):
      return columns
    if not self._has_client_models:
      clients = self._evaluation_clients(self._data.client_ids)
      server_weights = self._process.get_model_weights(state)
      weights = dict.fromkeys(clients, server_weights)
      test = self._evaluator.evaluate(server_weights, self._test_dataset)
    elif self._store.client_ids() or self._process.has_personal_state:
      weights = self._own_weights(state)
      test = self._evaluator.evaluate_clients(
          weights, lambda client_id: self._test_dataset
      )
    else:
      initial = self._process.get_client_model_weights(
          state, self._process.initialize_client(state)
      )
      clients = self._evaluation_clients(self._data.client_ids)
      weights = dict.fromkeys(clients, initial)
      test = self._evaluator.evaluate(initial, self._test_dataset)
    client_test = self._evaluator.evaluate_clients(
        weights,
        lambda client_id: self._data.client_test_dataset(
            client_id, _EVALUATION_BATCH_SIZE
        ),
    )
    for prefix, result in (('test_', test), ('client_test_', client_test)):
      for name in ('loss', *self._evaluator.metric_names):
        if result is not None:
          columns[f'{prefix}{name}'] = result[name]
    return columns

  def _own_weights(self, state: Any) -> dict[str, ModelWeights]:
    """The weights of the clients that are evaluated, by client."""
    if self._store.client_ids():
      clients = self._evaluation_clients(self._store.client_ids())
      return {c: self._client_weights(state, c) for c in clients}
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

  def _client_weights(self, state: Any, client_id: str) -> ModelWeights:
    return self._process.get_client_model_weights(
        state, self._store.get(client_id)
    )

  def _final_weights(self, state: Any) -> ModelWeights:
    if not self._has_client_models:
      return self._process.get_model_weights(state)
    return evaluation.merge_client_weights(
        self._model,
        (self._client_weights(state, c) for c in self._store.client_ids()),
    )

  def _check_usable(self, weights: ModelWeights) -> None:
    """Raises an error if the final model is of no use."""
    rows = self._log.rows
    if not _is_finite(weights):
      reason = 'its weights are not finite'
    elif rows and _is_broken(rows[-1]['test_loss']) and any(self._test_dataset):
      reason = f'its loss on the test data is {rows[-1]["test_loss"]}'
    else:
      return
    raise UnusableModelError(
        f'The final model is of no use: {reason}. It is not saved. A smaller'
        ' learning rate of the clients or of the server may help, or clipping'
        ' gradients.'
    )

  def _has_saved_model(self) -> bool:
    """Whether the final model is saved already, and intact."""
    if not self._model_dir.exists():
      return False
    try:
      models = saved_models.SavedModels(self._model_dir)
      models.check()
    except manifests.DamagedError as error:
      logging.warning(
          '%s The models are written again, from the last checkpoint.', error
      )
      return False
    return models.manifest['run'] == self._identity.checksum

  def _save_model(self, state: Any, weights: ModelWeights) -> None:
    """Saves the final models; the folder appears when it is complete."""
    writer = saved_models.Writer(
        self._model_dir,
        self._model,
        dict(
            run=self._identity.checksum,
            round=self._config.rounds,
            metrics=_metrics_checksum(self._run_dir),
            versions=versions.versions(),
            input_shape=_input_shape(self._model),
            num_classes=getattr(self._data, 'num_classes', None),
        ),
    )
    writer.write_global(weights)
    if self._has_client_models:
      for client_id in self._store.client_ids():
        writer.write_client(client_id, self._client_weights(state, client_id))
    writer.publish()


def is_finished(run_dir: pathlib.Path) -> bool:
  """Whether a folder has a run that has come to its end, and is intact.

  Args:
    run_dir: The run's folder.

  Returns:
    Whether its metrics and its models are those that `train` has written.

  Raises:
    OSError: If a file can't be read at present.
  """
  try:
    models = saved_models.SavedModels(run_dir / 'model')
    models.check()
  except ValueError:
    return False
  return models.manifest['metrics'] == _metrics_checksum(run_dir)


def _metrics_checksum(run_dir: pathlib.Path) -> Optional[str]:
  try:
    text = (run_dir / 'metrics.csv').read_bytes()
  except FileNotFoundError:
    return None
  return hashlib.sha256(text).hexdigest()


def _input_shape(model: BatchNormModel) -> Optional[list[int]]:
  """The shape of a sample; `None` if it has several parts."""
  spec = model.input_spec[0]
  return list(spec.shape[1:]) if isinstance(spec, tf.TensorSpec) else None


def _is_finite(weights: ModelWeights) -> bool:
  """Whether all floating-point numbers of a model are finite."""
  arrays = (np.asarray(value) for value in tf.nest.flatten(weights))
  return all(
      np.all(np.isfinite(array)) for array in arrays if array.dtype.kind == 'f'
  )


def _is_broken(loss: Optional[float]) -> bool:
  return loss is not None and not math.isfinite(loss)


def _failed_rounds(state: Any) -> int:
  """How many rounds in a row, up to a state, changed nothing."""
  try:
    return int(state.finalizer['failed_rounds'])
  except (AttributeError, KeyError, TypeError):
    return 0  # The process of another package.


def _correction_names(process: Process) -> Sequence[str]:
  """The names of the metrics that a correction of the clients' drift adds."""
  try:
    metrics_type = process.next.type_signature.result.metrics.member
    correction_type = metrics_type['client_work']['correction']
  except (AttributeError, KeyError, TypeError):
    return ()  # The process of another package.
  return [name for name, _ in tff.structure.iter_elements(correction_type)]


class _IterativeProcess:
  """Either kind of process in the form that TFF's training loop runs."""

  def __init__(
      self,
      process: Process,
      store: Optional[client_state_store.ClientStateStore],
      max_failed_rounds: int,
  ):
    self._process = process
    self._store = store
    self._max_failed_rounds = max_failed_rounds
    self._reported_clients: set[str] = set()

  def initialize(self) -> Any:
    return self._process.initialize()

  def next(self, state: Any, data: _RoundData) -> tuple[Any, Any]:
    """Runs a round, and keeps what its clients keep."""
    # Of a state that was loaded, too: such a run stays stopped.
    self.check(state)
    if self._store is None:
      with termination.allowed():
        output = self._process.next(state, list(data.datasets))
      self._report_large_update(output.metrics, data)
      return output.state, output.metrics
    client_states = [self._store.get(c) for c in data.client_ids]
    if any(client_state is None for client_state in client_states):
      initial = self._process.initialize_client(state)
      client_states = [
          self._process.personalize(initial, number) if c is None else c
          for number, c in zip(data.client_numbers, client_states, strict=True)
      ]
    with termination.allowed():
      output = self._process.next(state, client_states, list(data.datasets))
    self._report_large_update(output.metrics, data)
    self._store.put_many(
        data.round_num, dict(zip(data.client_ids, output.client_states))
    )
    return output.state, output.metrics

  def _report_large_update(self, metrics: Any, data: _RoundData) -> None:
    """Says which client's update is far larger than the others', once each."""
    try:
      ratio = metrics['client_work']['max_update_norm_ratio']
      position = metrics['client_work']['max_update_norm_client']
    except (KeyError, TypeError):
      return  # The process of another package.
    if not ratio > _LARGE_NORM_RATIO:
      return
    client_id = data.client_ids[position]
    if client_id in self._reported_clients:
      return
    self._reported_clients.add(client_id)
    logging.warning(
        'Round %d: the update of client %s (number %d) is %.3g times as large'
        ' as the median update. It may decide the mean by itself; is its data'
        ' scaled as that of the others? Robust aggregators of the'
        ' model and of the statistics bound its influence.',
        data.round_num,
        client_id,
        data.client_numbers[position],
        ratio,
    )

  def check(self, state: Any) -> None:
    """Raises an error if too many rounds have failed."""
    failed_rounds = _failed_rounds(state)
    if failed_rounds >= self._max_failed_rounds:
      raise TooManyFailedRoundsError(
          f'stopped after round {state.client_work["round_num"]}: in the last'
          f' {failed_rounds} rounds no client was left, because the loss or the'
          " update of every client was not finite, or the server's new model"
          ' was not finite. The model is as it was before. A smaller'
          ' learning rate of the clients, or clipping gradients, may help;'
          f' max_failed_rounds={self._max_failed_rounds} is the number of such'
          ' rounds that is allowed.'
      )
