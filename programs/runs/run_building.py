"""Builds the model and the process of a run from its settings.

Importing this module imports TensorFlow Federated, so programs do it after they
have checked their flags.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any, Optional

import keras
import tensorflow as tf

import tff_bn
from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import runtime
from tff_bn import training
from tff_bn.catalog import algorithms as algorithms_lib
from tff_bn.catalog import models
from tff_bn.common import cores
from tff_bn.data import labels
from tff_bn.data import table_encoding
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.models import initial_model
from tff_bn.processes import personal_phases
from tff_bn.processes import stateful_process
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import held_out_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.flags import training_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_data
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_privacy
from tff_bn.training import finished
from tff_bn.training import saved_models


def split_dataset(
    settings: settings_lib.RunSettings, dataset: tff_bn_data.Dataset
) -> tff_bn_data.FederatedData:
  """Splits the dataset of a run; a ValueError says why it is impossible."""
  return run_data.DataRecipe.of(settings).split(dataset)


def build_model(
    settings: settings_lib.RunSettings, data: tff_bn_data.FederatedData
) -> BatchNormModel:
  """Builds the model, whose initial weights depend on `--seed` alone.

  Raises:
    ValueError: If the loss or a metric does not fit the task of the data, or if
      the algorithm needs other BN layers, and the model's layers can't be
      replaced, or if `--initial_model` scales its samples in another way.
  """
  if settings.initial_model is not None:
    try:
      initial_model.check_scaling(settings.initial_model, data.dataset.scaling)
    except ValueError as error:
      text = parsers.name_flags(
          str(error), ('initial_model', 'pixel_scaling', 'export')
      )
      raise ValueError(text) from error
  return _build_model(
      settings,
      data.dataset.input_shape,
      data.task,
      data.num_outputs,
      data.dataset.table,
      # Weights of classes are for the training only.
      **settings.class_weights(data),
  )


def _build_model(
    settings: settings_lib.RunSettings,
    input_shape: tuple[int, ...],
    task: str,
    num_outputs: int,
    table: Optional[table_encoding.TableEncoding],
    **more: Any,
) -> BatchNormModel:
  """Builds a model; `more` are further arguments of `BatchNormModel`."""
  keras_model_fn = settings.build_model_fn(
      input_shape,
      num_outputs,
      task,
      None if table is None else table.category_counts,
  )
  batch_norm = algorithms_lib.find(settings.algorithm).batch_norm
  if batch_norm is not None:
    keras_model_fn = functools.partial(
        _converted, settings, keras_model_fn, batch_norm
    )
  # Keras's initializers draw from the global generators.
  keras.utils.set_random_seed(settings.seed)
  option = models.MODEL
  if settings.initial_model is not None:
    option = models.INITIAL_MODEL
  with settings.naming_flags(keras_model_fn=option.name):
    return BatchNormModel(
        keras_model_fn,
        input_spec=(
            tf.TensorSpec((None, *input_shape), tf.float32),
            labels.label_spec(task, input_shape, num_outputs),
        ),
        loss_fn=settings.build_loss_fn(task),
        metrics_fn=settings.build_metrics_fn(task, num_outputs),
        **more,
    )


def _converted(
    settings: settings_lib.RunSettings,
    keras_model_fn: Callable[[], keras.Model],
    batch_norm: str,
) -> keras.Model:
  """Builds a model and replaces its BN layers."""
  keras_model = keras_model_fn()
  try:
    return tff_bn.convert_batch_norm(keras_model, to=batch_norm)
  except ValueError as error:
    raise ValueError(
        f'{settings.algorithm} is impossible with'
        f' {settings.describe_model()}: {error}'
    ) from error


def load_models(
    settings: settings_lib.RunSettings,
    folder: pathlib.Path,
    which: Optional[str] = None,
) -> tuple[saved_models.SavedModels, BatchNormModel]:
  """Opens the models of a finished run; a ValueError names a damaged file.

  The run may be somebody else's, so only arrays are read: the model is built
  from the settings. `which` says which round's models, see
  `run_folder.models_folder`.

  Returns:
    The saved weights, whose checksums are right, and the model.
  """
  saved = saved_models.SavedModels(run_folder.models_folder(folder, which))
  saved.check()
  finished.check_results(folder, saved.manifest)
  model = _build_model(
      settings,
      tuple(saved.manifest['input_shape']),
      saved.manifest['task'],
      saved.manifest['num_outputs'],
      table_encoding.of_manifest(saved.manifest),
  )
  return saved, model


def client_weights(
    settings: settings_lib.RunSettings,
    saved: saved_models.SavedModels,
    model: BatchNormModel,
    client_id: str,
    client_number: int,
) -> ModelWeights:
  """Returns the weights of the model that a client uses after a run.

  For a client that took no part in a round, these are the weights of the global
  model, with the client's personal phases. The phases depend on the client's
  position among all clients, `client_number`.
  """
  if client_id in saved.client_ids:
    return saved.weights(model, client_id)
  phases = personal_phases.draw(model, settings.seed, client_number)
  values = model.from_model_weights(saved.weights(model))
  return model.to_model_weights(
      [
          phases.get(info.name, value)
          for info, value in zip(model.variables, values)
      ]
  )


def build_process(
    settings: settings_lib.RunSettings,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
) -> stateful_process.Process:
  """Builds the algorithm's process, for the clients of this data.

  Clients keep a state if it is a `StatefulLearningProcess`.

  Raises:
    ValueError: If the algorithm can't train this model.
  """
  algorithm = algorithms_lib.find(settings.algorithm)
  num_clients = len(data.client_ids)
  # A builder has arguments only for the features of its algorithm.
  choices = {
      'server_optimizer': settings.build_server_optimizer(),
      'statistics_aggregator': _statistics_aggregator(settings, num_clients),
      'exchange_aggregator': _rule(settings, 'exchange', num_clients),
      'client_filter': settings.client_filter,
      'num_clients': num_clients if algorithm.needs_num_clients else None,
  }
  arguments = {
      **_local_training_arguments(settings, algorithm),
      **settings.arguments(
          algorithm_flags.AlgorithmFlags, training_flags.ServerFlags
      ),
      **{name: value for name, value in choices.items() if value is not None},
  }
  sums = run_privacy.build_sums(settings, model, data)
  if sums is not None:
    arguments['sum_aggregator'] = sums
  elif settings.model_aggregator is not None:
    arguments['model_aggregator'] = _rule(settings, 'model', num_clients)
  try:
    return algorithm.builder()(
        model, settings.build_client_optimizer(), **arguments
    )
  except ValueError as error:
    raise ValueError(settings.name_flags(str(error))) from error


def _rule(
    settings: settings_lib.RunSettings, target: str, num_clients: int
) -> Optional[aggregators.Rule]:
  """Builds the rule for a target of `build_rule`; None: a weighted mean."""
  num_in_round = (
      settings.clients_per_round
      or held_out_flags.num_training_clients(settings)
      # The data decides the number of clients.
      or num_clients
  )
  return settings.build_rule(target, settings.seed, num_in_round)


def _statistics_aggregator(
    settings: settings_lib.RunSettings, num_clients: int
) -> Any:
  """Builds the aggregator of the BN statistics; None: the builder's own."""
  rule = _rule(settings, 'statistics', num_clients)
  match settings.statistics:
    case 'naive':
      return aggregators.NaiveMomentsFactory(rule)
    case 'pooled':
      return aggregators.PooledMomentsFactory(rule)
  return rule


def build_local_training(
    settings: settings_lib.RunSettings, model: BatchNormModel
) -> stateful_process.StatefulLearningProcess:
  """Builds the clients' local training of a run, without any averaging.

  What the algorithm itself adds to it, such as a correction of the clients'
  drift, is left out, and so are random permutations of units. See
  `tff_bn.algorithms.build_single`.
  """
  settings = settings.replaced(
      client_weighting=None, shuffle_times=None, shuffle_probability=None
  )
  algorithm = algorithms_lib.find(settings.algorithm)
  return algorithms.build_single(
      model,
      settings.build_client_optimizer(),
      **_local_training_arguments(settings, algorithm),
  )


def build_epoch_training(
    settings: settings_lib.RunSettings, model: BatchNormModel
) -> stateful_process.StatefulLearningProcess:
  """Builds `build_local_training`, whose clients use all their data in a round.

  See `tff_bn.training.later_clients`.
  """
  return build_local_training(settings.replaced(local_steps=None), model)


def _local_training_arguments(
    settings: settings_lib.RunSettings, algorithm: algorithms_lib.Algorithm
) -> dict[str, Any]:
  """Returns the arguments that the builders of all algorithms take."""
  later_rates = []
  if algorithm.later_rate is not None and algorithm.first_phase is not None:
    num_rounds = getattr(settings, algorithm.first_phase.name)
    factor = getattr(settings, algorithm.later_rate.name)
    later_rates.append(((num_rounds + 1, factor),))
  # The clients' datasets are as long as --local_steps or --local_epochs says,
  # so that the process goes through them once. With one local step, some
  # algorithms need no loop.
  return dict(
      settings.arguments(training_flags.TrainingFlags, run_flags.RunFlags),
      client_learning_rate_schedule=settings.build_learning_rate_schedule(
          *later_rates
      ),
  )


def training_config(
    settings: settings_lib.RunSettings,
) -> training.TrainingConfig:
  """Returns the settings of the training loop."""
  names = {field.name for field in dataclasses.fields(training.TrainingConfig)}
  return training.TrainingConfig(
      **{
          name: getattr(settings, name)
          for name in names & set(settings.specs())
          # None: the flag has no effect on the algorithm.
          if getattr(settings, name) is not None
      }
  )


def divide_cores(runs: Sequence[settings_lib.RunSettings]) -> None:
  """Divides the cores among the clients of a round, if TensorFlow is unused.

  Training on the union of the clients' data counts as one client.
  """
  numbers = [
      1 if algorithms_lib.find(run.algorithm).trains_on_union
      # The data decides how many clients there are, usually many.
      else run.clients_per_round
      or held_out_flags.num_training_clients(run)
      or cores.num_cores()
      for run in runs
  ]
  # In a notebook, the program shares TensorFlow with the other cells.
  with contextlib.suppress(RuntimeError):
    runtime.divide_cores(
        max(numbers), jit_compile=any(run.jit_compile for run in runs)
    )
