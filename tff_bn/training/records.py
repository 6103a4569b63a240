"""The bookkeeping of a run: the files of its folder."""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any, Optional, Union

from absl import logging
import numpy as np
import tensorflow_federated as tff

from tff_bn.analysis import communication
from tff_bn.catalog import columns
from tff_bn.data import federated
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import best_round
from tff_bn.training import checkpoints
from tff_bn.training import client_metrics
from tff_bn.training import client_state_store
from tff_bn.training import final_models
from tff_bn.training import metrics_hook as metrics_hook_lib
from tff_bn.training import metrics_log
from tff_bn.training import round_evaluation
from tff_bn.training import rounds
from tff_bn.training import run_entries
from tff_bn.training import run_identity
from tff_bn.training import sampling
from tff_bn.training.training_config import MAY_CHANGE
from tff_bn.training.training_config import TrainingConfig


class Records:
  """The parts of a run that write its files.

  Attributes:
    store: The clients' states; `None` if they have none.
    evaluation: The metrics of evaluated rounds.
    best: Chooses the best round; `None` if it is not kept.
    hook: Gives the rows of `metrics.csv` to a metrics hook.
    models: The final models.
    log: The rows of `metrics.csv`.
    checkpoints: The server's state after the last rounds.
  """

  def __init__(
      self,
      process: Process,
      model: BatchNormModel,
      data: federated.FederatedData,
      config: TrainingConfig,
      sampler: sampling.RoundSampler,
      *,
      run_dir: pathlib.Path,
      settings: Mapping[str, str],
      metrics_hook: Optional[metrics_hook_lib.MetricsHook],
      round_columns: metrics_log.RoundColumns,
      stack: contextlib.ExitStack,
  ):
    """Opens the files, and checks that they are of this run.

    The `stack` closes them. See `train` for the other arguments.
    """
    self._sampler = sampler
    self._config = config
    self.best = None
    if config.keep_best is not None:
      self.best = best_round.BestRound(config.keep_best)
    is_due = functools.partial(round_evaluation.is_due, config)
    # `None` after the traffic could not be counted.
    self._traffic: Optional[communication.ProcessTraffic] = (
        communication.ProcessTraffic(process)
    )
    identity = run_identity.RunIdentity(
        {
            name: value
            for name, value in {
                **dataclasses.asdict(config),
                'train_on_union': sampler.train_on_union,
                **settings,
            }.items()
            if name not in MAY_CHANGE
        },
        data.fingerprint(),
        run_identity.describe_process(process, process.initialize(), model),
    )
    checkpoints.check_run(run_dir / run_entries.CHECKPOINTS, identity)
    self.store: Optional[client_state_store.ClientStateStore] = None
    if isinstance(process, StatefulLearningProcess):
      self.store = stack.enter_context(
          client_state_store.ClientStateStore(
              run_dir / run_entries.CLIENT_STATES, identity.checksum
          )
      )
    self.evaluation = round_evaluation.RoundEvaluation(
        process,
        model,
        data,
        config,
        self.store,
        sampler.make_dataset,
        client_metrics.ClientMetrics(
            run_dir,
            is_over_time=config.client_metrics_over_time,
            is_due=is_due,
        ),
    )
    if self.best is not None:
      self.best.check(
          ('loss', *self.evaluation.metric_names),
          has_validation=self.evaluation.has_validation,
      )
    self.hook = metrics_hook_lib.HookedRows(
        metrics_hook, run_dir, {**settings, **dataclasses.asdict(config)}
    )
    self.models = final_models.FinalModels(
        run_dir, identity.checksum, settings, model, data, config
    )
    self.log = stack.enter_context(
        contextlib.closing(
            metrics_log.MetricsLog(
                run_dir,
                metric_names=self.evaluation.metric_names,
                correction_names=_correction_names(process),
                is_due=is_due,
                num_rounds=config.rounds,
                costs_fn=self._costs_until,
                round_columns={**_filter_columns(process), **round_columns},
                on_rows=self.hook.update,
                has_client_models=self.evaluation.has_client_models,
                has_validation=self.evaluation.has_validation,
                has_train_loss=config.evaluate_train_loss,
            )
        )
    )
    self.checkpoints = checkpoints.CheckpointManager(
        run_dir / run_entries.CHECKPOINTS,
        every=config.checkpoint_every,
        last_round=config.rounds,
        identity=identity,
        log=self.log,
        client_metrics=self.evaluation.client_metrics,
        store=self.store,
        failed_rounds=rounds.failed_rounds,
        is_finite=lambda state: is_finite(
            model, process.get_model_weights(state)
        ),
        kept_rounds=self._best_rounds,
    )

  def _best_rounds(self) -> set[int]:
    """Returns the best round up to now, as the run's end may need it.

    If the number of rounds grows, the last one may no longer be evaluated.
    """
    if self.best is None:
      return set()
    every = self._config.evaluate_every
    regular = [
        row for row in self.log.rows if not int(row['round'] or 0) % every
    ]
    found = (self.best.find(rows) for rows in (self.log.rows, regular))
    return {round_num for round_num in found if round_num is not None}

  def best_round(self) -> Optional[int]:
    """Returns the best round; `None` if there is none, or it is not kept."""
    if self.best is None:
      return None
    found = self.best.find(self.log.rows)
    if found is None:
      logging.warning(
          'keep_best=%s: %s is not finite in any round, so no best round is'
          ' kept.',
          self.best.metric,
          self.best.column,
      )
    return found

  def save_latest(self) -> Optional[int]:
    """Saves the last round before the program ends, and returns its number."""
    try:
      return self.checkpoints.save_latest()
    # The run can continue from the previous checkpoint.
    except Exception as error:
      logging.warning('The last round could not be saved: %s', error)
      return None

  def _costs_until(
      self, round_num: int, correction_metrics: Mapping[str, Any]
  ) -> Mapping[str, Union[int, float]]:
    if self._sampler.train_on_union:
      return dict(exchanges=0, megabytes=0.0)
    if self._traffic is None:
      return {}
    try:
      return self._traffic.until(
          round_num, self._sampler.num_clients, correction_metrics
      )
    except (NotImplementedError, ValueError) as error:
      logging.warning(
          'The columns exchanges and megabytes stay empty: %s', error
      )
      self._traffic = None
      return {}


def is_finite(model: BatchNormModel, weights: ModelWeights) -> bool:
  """Whether all floats of a model that training can change are finite."""
  arrays = (
      np.asarray(value)
      for position, value in enumerate(model.from_model_weights(weights))
      if position not in model.constants
  )
  return all(
      np.all(np.isfinite(array)) for array in arrays if array.dtype.kind == 'f'
  )


def _correction_names(process: Process) -> Sequence[str]:
  """Returns the names of the metrics of a correction of the clients' drift."""
  return _metric_names(process, 'client_work', 'correction')


def _filter_columns(process: Process) -> metrics_log.RoundColumns:
  """Returns the column of a filter of the clients, if there is one."""
  name = columns.FILTERED_CLIENTS.name
  if name not in _metric_names(process, 'aggregator'):
    return {}
  return {name: lambda _, metrics: _filtered(metrics, name)}


def _filtered(metrics: Mapping[str, Any], name: str) -> Optional[int]:
  # There are no metrics before round 1.
  number = metrics.get('aggregator', {}).get(name)
  return None if number is None else int(number)


def _metric_names(process: Process, *path: str) -> Sequence[str]:
  """Returns the names of a part of a process's metrics."""
  try:
    part = process.next.type_signature.result.metrics.member
    for name in path:
      part = part[name]
  except (AttributeError, KeyError, TypeError):
    return ()  # The process of another package.
  return [name for name, _ in tff.structure.iter_elements(part) if name]
