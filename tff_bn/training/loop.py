"""The training loop: rounds, and the final model.

The clients and the data of a round are in `sampling`, the call of the process
in `rounds`, and the files of a run in `records`.

A run has a folder:

| entry | content |
| --- | --- |
| `metrics.csv` | one row for every evaluated round |
| `client_metrics.csv` | a row for each client, or for some, at the end |
| `client_seconds.csv` | how long each client takes in a round |
| `metrics_hook.json` | which rows a metrics hook has got |
| `logdir/` | the same for TensorBoard |
| `checkpoints/` | the server's state after the last rounds |
| `client_states.sqlite` | the clients' states, if they have any |
| `model/` | the final models, see `tff_bn.training.saved_models` |

A run can be stopped or killed at any moment. Calling `train` again with the
same arguments continues it and gives the same metrics and weights as an
uninterrupted run, because all random choices depend only on the seed and the
number of the round.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import os
import pathlib
import threading
import types
from typing import Any, Optional, Union

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.common import checks
from tff_bn.data import federated
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes import stateful_process
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import event_loops
from tff_bn.training import folder_lock
from tff_bn.training import kept_statistics
from tff_bn.training import metrics_hook as metrics_hook_lib
from tff_bn.training import metrics_log
from tff_bn.training import records as records_lib
from tff_bn.training import round_evaluation
from tff_bn.training import rounds
from tff_bn.training import run_entries
from tff_bn.training import sampling
from tff_bn.training import saved_models
from tff_bn.training import termination
from tff_bn.training.training_config import TrainingConfig
from tff_bn.training.training_config import TrainingResult
from tff_bn.training.training_config import UnusableModelError


def train(
    process: Process,
    model: BatchNormModel,
    data: federated.FederatedData,
    config: TrainingConfig,
    run_dir: Union[str, os.PathLike[str]],
    *,
    train_on_union: bool = False,
    settings: Mapping[str, str] = types.MappingProxyType({}),
    metrics_hook: Optional[metrics_hook_lib.MetricsHook] = None,
    round_columns: metrics_log.RoundColumns = types.MappingProxyType({}),
) -> TrainingResult:
  """Trains a model, or continues the run in the folder if it is not finished.

  `metrics.csv` has these columns. `NAME` is `loss` or the name of one of the
  model's metrics.

  *   `round`: the number of finished rounds; 0 is the initial model.
  *   `train_NAME`: on the data on which the clients trained in that round;
      empty for round 0.
  *   `test_NAME`: on the central test set. If the clients have own models, it
      is the mean over the clients that were sampled at least once. In round 0
      it is the value of the initial model or, if clients have personal position
      encodings, the mean over the clients.
  *   A metric whose result is a vector has a column for each entry, such as
      `test_NAME_0`.
  *   `client_test_NAME`: the mean over the clients of the model that each would
      use, on its own test data; empty if they have none.
  *   `validation_NAME`: the same on validation data, if clients have any.
  *   `client_train_loss`: the same on all training data of the client, without
      augmentation and in inference mode; each client counts alike. Only with
      `config.evaluate_train_loss`.
  *   `client_deviation_NAME`, `client_worst_tenth_NAME`: of the first metric in
      `client_test_NAME`, see `tff_bn.training.client_metrics.spread`.
  *   `num_clients`, `num_dropped_clients`: in that round.
  *   `num_filtered_clients`: the clients that `client_filter` left out of the
      mean in that round; only with this option.
  *   `rejected_rounds`: the number of rounds so far in which the server kept
      its model because the new one was not finite.
  *   `max_update_norm_ratio`: the largest norm of a client's update in that
      round, divided by the median norm, see `tff_bn.clients.update_norms`.
  *   `exchanges`, `megabytes`: in all rounds so far, see
      `tff_bn.analysis.ProcessTraffic`; empty if they can't be counted.
  *   The metrics of a correction of the clients' drift, in that round.

  Means are over at most `config.max_evaluation_clients` clients. If the process
  has an `evaluation_state`, it is computed with the training data of these
  clients for all evaluations and for the final model. `exchanges` and
  `megabytes` do not include this.

  The Keras files in `model/` take raw samples by default, see
  `TrainingConfig.export`.

  TFF's computations run in the default context of the calling thread, for which
  `tff_bn.runtime` has context managers. If the thread already runs an event
  loop, as in a notebook, `train` works in another thread.

  Args:
    process: The algorithm. Build it with `local_epochs=1`, because the datasets
      already contain the configured number of steps or epochs.
    model: The model with which the process was built.
    data: The clients' data, a `tff_bn.data.FederatedData`. A client's position
      in its `client_ids` is its number for `process.personalize`.
    config: The settings.
    run_dir: The run's folder, which need not exist. If it holds a run, the
      arguments must be the same as before; `config.rounds` may have grown.
    train_on_union: Whether the process gets a single client with the data of
      all sampled clients, in batches of `config.centralized_batch_size`. The
      exchanges and megabytes are then 0.
    settings: Further settings on which the results depend, by name. A run is
      continued only with the same settings, except those in `MAY_CHANGE`. They
      are saved with the final models.
    metrics_hook: Gives the rows of `metrics.csv` to a logger, such as MLflow: a
      function that takes a `HookedRun` and returns a context manager, whose
      value is called with each row, see `tff_bn.training.metrics_hook`. The
      run's settings are `config` and `settings`.
    round_columns: Further columns of `metrics.csv`, by name: functions of the
      number of a round and its metrics that return a number, or `None`.

  Returns:
    The results.

  Warns:
    KeptStatisticsWarning: If more than half of the initial running statistics
      of batch normalization is left after `config.rounds` rounds.

  Raises:
    TooManyFailedRoundsError: If `config.max_failed_rounds` rounds in a row
      failed. The folder then holds these rounds, but no model.
    UnusableModelError: If the final model or its loss on the test data is not
      finite, or if no round has changed the model. The folder then holds all
      rounds, but no model.
    TypeError: If a client's id is not a string, or an argument has the wrong
      type.
    ValueError: If the arguments contradict each other or the folder, or the
      folder is damaged, or one of its entries is a link.
    OSError: If a file can't be read or written at present.
    ClientStateStoreError: If `client_states.sqlite` is damaged or in use.
    MetricsHookError: If the metrics hook fails. The same call continues the run
      and gives the hook the row again.
    WorkersLostError: If no worker is left, see `tff_bn.runtime.ray_runtime`.
      The finished rounds are saved.
  """
  _check_types(model, data, config)
  federated.check_client_ids(data.client_ids)
  num_clients = len(data.client_ids)
  if (config.clients_per_round or 0) > num_clients:
    raise ValueError(
        f'clients_per_round={config.clients_per_round} asks for more clients'
        f' than the {num_clients} in the data; use at most {num_clients}.'
    )
  stateful_process.check_process(process)
  if train_on_union and isinstance(process, StatefulLearningProcess):
    raise ValueError(
        'train_on_union=True merges all clients into one, but the clients of'
        ' this algorithm have own states; use train_on_union=False.'
    )
  if config.centralized_batch_size is not None and not train_on_union:
    raise ValueError(
        f'centralized_batch_size={config.centralized_batch_size} is only for'
        ' train_on_union=True; the batches of clients have batch_size.'
    )
  kept_statistics.warn(
      kept_statistics.find(
          process, model, data, config, train_on_union=train_on_union
      )
  )
  run_dir = pathlib.Path(run_dir)
  run_dir.mkdir(parents=True, exist_ok=True)

  def run(stop: threading.Event) -> TrainingResult:
    with contextlib.ExitStack() as stack:
      stack.enter_context(folder_lock.hold(run_dir))
      run_entries.check(run_dir)
      sampler = sampling.RoundSampler(
          data, config, train_on_union=train_on_union
      )
      records = records_lib.Records(
          process,
          model,
          data,
          config,
          sampler,
          run_dir=run_dir,
          settings=settings,
          metrics_hook=metrics_hook,
          round_columns=round_columns,
          stack=stack,
      )
      return _Run(process, model, config, records, sampler, run_dir).train(stop)

  return event_loops.call_outside_of_event_loops(run)


def _check_types(
    model: BatchNormModel, data: federated.FederatedData, config: TrainingConfig
) -> None:
  """Raises an error if arguments have wrong types or do not fit."""
  checks.check_type(
      'model', model, BatchNormModel, 'be a tff_bn.BatchNormModel'
  )
  checks.check_type(
      'config', config, TrainingConfig, 'be a tff_bn.training.TrainingConfig'
  )
  if not hasattr(data, 'client_ids'):
    raise TypeError(
        'data must be a tff_bn.data.FederatedData, such as'
        f' tff_bn.data.split_dataset(...), but is a {type(data).__name__}.'
    )
  for v in model.variables:
    if v.dtype == tf.bfloat16:
      raise ValueError(
          f'The variable {v.name} of the layer {v.layer!r} has the dtype'
          ' bfloat16, which the files of a run cannot hold. Use the dtype'
          " policy 'mixed_bfloat16', whose variables are float32."
      )
  if not isinstance(data, federated.FederatedData):
    return  # Data of the same form.
  found, expected = map(tf.nest.flatten, (data.element_spec, model.input_spec))
  if len(found) != len(expected) or any(
      a.dtype != b.dtype or not b.shape.is_compatible_with(a.shape)
      for a, b in zip(found, expected)
  ):
    raise ValueError(
        f'The input_spec of the model, {model.input_spec}, does not fit the'
        f' data, whose element_spec is {data.element_spec}.'
    )


class _EarlyEnd(Exception):
  """No further round begins."""


@dataclasses.dataclass(frozen=True)
class _Run:
  """The rounds of a run, and its final model."""

  process: Process
  model: BatchNormModel
  config: TrainingConfig
  records: records_lib.Records
  sampler: sampling.RoundSampler
  run_dir: pathlib.Path

  def train(self, stop: threading.Event) -> TrainingResult:
    """Runs the remaining rounds."""
    try:
      # Signals end the program only while clients are computed, so that a round
      # is recorded completely or not at all.
      with self.records.hook.open(), termination.deferred():
        return self._train(stop)
    except KeyboardInterrupt as error:
      saved = self.records.save_latest()
      if saved is None:
        raise
      raise type(error)(
          f'Round {saved} is saved; the same command continues from there.'
      ) from error
    except (runtime.WorkersLostError, metrics_hook_lib.MetricsHookError):
      self.records.save_latest()
      raise

  def _train(self, stop: threading.Event) -> TrainingResult:
    def select(round_num: int) -> rounds.RoundData:
      if self._is_over():
        raise _EarlyEnd
      if stop.is_set():
        raise KeyboardInterrupt
      with termination.allowed():
        pass
      # A new round changes the final model.
      self.records.models.remove()
      return self.sampler.select(round_num)

    process = rounds.IterativeProcess(
        self.process, self.records.store, self.config.max_failed_rounds
    )
    with contextlib.suppress(_EarlyEnd):
      tff.simulation.run_training_process(
          process,
          training_selection_fn=select,
          total_rounds=self.config.rounds,
          evaluation_fn=self.records.evaluation.evaluate,
          # The evaluation needs only the number of the round.
          evaluation_selection_fn=lambda round_num: round_num,
          # The evaluation and the checkpoints skip rounds themselves, because
          # TFF's loop does not always include the last round.
          rounds_per_evaluation=1,
          program_state_manager=self.records.checkpoints,
          rounds_per_saving_program_state=1,
          metrics_managers=[self.records.log],
      )
    # After an early end, it need not have a checkpoint.
    self.records.checkpoints.save_latest()
    state, round_num = self.records.checkpoints.latest
    process.check(state)
    self._check_changed(state, round_num)
    process.client_seconds.write(self.run_dir)
    best = self.records.best_round()
    return TrainingResult(
        rows=tuple(self.records.log.rows),
        state=state,
        model_weights=self._final_weights(state, round_num, best),
        resumed_from=self.records.checkpoints.resumed_from,
        best_round=best,
    )

  def _is_over(self) -> bool:
    """Whether the run ends early."""
    best, rows = self.records.best, self.records.log.rows
    return best is not None and best.ends(rows, self.config.patience)

  def _final_weights(
      self, state: Any, round_num: int, best: Optional[int]
  ) -> ModelWeights:
    """Returns the weights of the final model, which is saved then.

    The models of the best round, if there is one, are saved inside its folder.
    """
    evaluation, models = self.records.evaluation, self.records.models
    saved = models.find(round_num)
    if saved is not None:
      return saved.weights(self.model)
    # The last round is saved, and many models take long.
    with termination.allowed():
      state = evaluation.evaluated_state(state, round_num)
      evaluation.complete(state, round_num)
      if best is not None:
        of_best = evaluation.after(best)
        best_state = of_best.evaluated_state(
            self.records.checkpoints.load_kept(best, state), best
        )
        of_best.complete(best_state, best)
    with (
        termination.allowed(),
        models.writing(
            self.process.get_model_weights(state),
            evaluation.num_client_models(),
            round_num,
        ) as writer,
    ):
      weights = self._write_models(state, evaluation, writer)
      if best is not None:
        with models.writing(
            self.process.get_model_weights(best_state),
            of_best.num_client_models(),
            best,
            kept_for=self.config.keep_best,
            inside=writer,
        ) as best_writer:
          self._write_models(best_state, of_best, best_writer)
    return weights

  def _write_models(
      self,
      state: Any,
      evaluation: round_evaluation.RoundEvaluation,
      writer: saved_models.Writer,
  ) -> ModelWeights:
    """Writes all models of a state, and returns the global weights."""
    weights = evaluation.final_weights(state, writer.add_client)
    self._check_usable(weights)
    writer.add_global(weights)
    if self.config.save_client_models == 'all':
      for client in evaluation.new_client_weights(state, weights):
        writer.add_keras_client(*client)
    return weights

  def _check_changed(self, state: Any, num_rounds: int) -> None:
    """Raises an error if no round has changed the model."""
    if rounds.failed_rounds(state) >= num_rounds:
      raise UnusableModelError(
          f'The final model is the initial model: all {num_rounds} rounds'
          ' failed, because the loss or the update of every client, or the'
          " server's new model, was not finite. It is not saved; metrics.csv is"
          ' kept.'
      )

  def _check_usable(self, weights: ModelWeights) -> None:
    """Raises an error if the final model or its loss is not finite."""
    rows = self.records.log.rows
    if not records_lib.is_finite(self.model, weights):
      reason = 'its weights are not finite'
    elif (
        rows
        and metrics_log.is_broken(rows[-1]['test_loss'])
        and any(self.records.evaluation.test_dataset)
    ):
      reason = f'its loss on the test data is {rows[-1]["test_loss"]}'
    else:
      return
    since = self.records.log.not_finite_since()
    if since is not None:
      reason += f'. The test loss is not finite since round {since}'
    raise UnusableModelError(
        f'The final model is not finite: {reason}. It is not saved; metrics.csv'
        ' is kept.'
    )
