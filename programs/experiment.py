"""Data, model and process of a run, built from its settings.

Importing this module imports TensorFlow Federated, so programs do it after they
have checked their flags.
"""

from collections.abc import Callable, Sequence
import dataclasses
import importlib.util
import os
import pathlib
import sys
import types
from typing import Any, NamedTuple, Optional

import keras
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import models
from tff_bn import training
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.models import names as model_names
from tff_bn.processes import stateful_process
from tff_bn.programs import aggregation
from tff_bn.programs import parsers
from tff_bn.programs import registry
from tff_bn.programs import run_folder
from tff_bn.programs import settings as settings_lib
from tff_bn.training import folder_lock
from tff_bn.training import round_data
from tff_bn.training import saved_models

# Reddi et al. 2021 (FedOpt) recommend this adaptivity.
_SERVER_EPSILON = 1e-3


# Settings that are arguments of those builders that know them.
_ARGUMENTS = {
    'moments': 'moments',
    'sync_rounds': 'sync_rounds',
    'fixbn_rounds': 'fixbn_rounds',
    'pooled': 'pooled',
    'proximal_strength': 'proximal_strength',
    'fedbs_epsilon': 'epsilon',
    'moon_weight': 'contrastive_weight',
    'moon_temperature': 'temperature',
    'moon_feature_layer': 'feature_layer',
}


def load_dataset(settings: settings_lib.RunSettings) -> tff_bn_data.Dataset:
  """Loads the dataset.

  Args:
    settings: The run's settings.

  Returns:
    The dataset.

  Raises:
    ValueError: If the dataset can't be used.
  """
  image_size = None
  if settings.image_size is not None:
    image_size = parsers.parse_image_size(settings.image_size)
  return tff_bn_data.load_dataset(
      settings.dataset, data_dir=settings.data_dir, image_size=image_size
  )


def split_dataset(
    settings: settings_lib.RunSettings, dataset: tff_bn_data.Dataset
) -> tff_bn_data.FederatedData:
  """Splits the dataset over the clients.

  Args:
    settings: The run's settings.
    dataset: The dataset.

  Returns:
    The clients' data.

  Raises:
    ValueError: If the dataset can't be split so.
  """
  data = tff_bn_data.split_dataset(
      dataset,
      settings.split,
      settings.num_clients,
      settings.seed,
      classes_per_client=settings.classes_per_client,
      dirichlet_alpha=settings.dirichlet_alpha,
      gamma=settings.gamma,
      imbalance=settings.imbalance,
  )
  if (
      settings.clients_per_round is not None
      and settings.clients_per_round > len(data.client_ids)
  ):
    raise ValueError(
        f'--clients_per_round={settings.clients_per_round} asks for more'
        f' clients than the {len(data.client_ids)} that there are; use at most'
        f' {len(data.client_ids)}.'
    )
  if settings.attack == 'label_flip':
    data = tff_bn_data.with_flipped_labels(data, settings.num_attackers)
  return dataclasses.replace(data, recipe=DataRecipe.of(settings))


@dataclasses.dataclass(frozen=True)
class DataRecipe:
  """Makes data of flags, see `tff_bn.data.FederatedData.recipe`.

  Attributes:
    settings: Those settings of a run on which its data depends.
  """

  settings: tuple[tuple[str, Any], ...]

  @classmethod
  def of(cls, settings: settings_lib.RunSettings) -> 'DataRecipe':
    """The recipe of the data of a run."""
    return cls(
        tuple(
            (name, getattr(settings, name)) for name in settings_lib.DATA_FIELDS
        )
    )

  def __call__(self) -> tff_bn_data.FederatedData:
    """Makes the data.

    Returns:
      The data.

    Raises:
      ValueError: If the dataset can't be used on this machine.
    """
    settings = types.SimpleNamespace(**dict(self.settings))
    return split_dataset(settings, load_dataset(settings))


def build_model(
    settings: settings_lib.RunSettings, data: tff_bn_data.FederatedData
) -> BatchNormModel:
  """Builds the model; its initial weights depend on `--seed` alone.

  Args:
    settings: The run's settings.
    data: The clients' data.

  Returns:
    The model, for cross-entropy of logits and integer labels.
  """
  return _build_model(settings, data.dataset.input_shape, data.num_classes)


def _build_model(
    settings: settings_lib.RunSettings,
    input_shape: tuple[int, ...],
    num_classes: int,
) -> BatchNormModel:
  if model_names.is_other_model(settings.model):
    _import_from_working_folder()
  keras_model_fn = models.build_model_fn(
      settings.model,
      input_shape,
      num_classes,
      settings.normalization,
      settings.precision,
      settings.batch_norm_momentum,
      settings.pan,
      settings.pan_amplitude,
      settings.pan_period,
      settings.pan_personal_share or 0.0,
  )
  # Keras's initializers draw from the global generators.
  keras.utils.set_random_seed(settings.seed)
  return BatchNormModel(
      keras_model_fn,
      input_spec=(
          tf.TensorSpec((None, *input_shape), tf.float32),
          tf.TensorSpec((None,), tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [
          keras.metrics.SparseCategoricalAccuracy(name='accuracy')
      ],
  )


def _import_from_working_folder():
  """As with `python -m`: a module in the working folder can be imported."""
  folder = os.getcwd()
  if folder not in sys.path:
    sys.path.insert(0, folder)


def load_models(
    settings: settings_lib.RunSettings, folder: pathlib.Path
) -> tuple[saved_models.SavedModels, BatchNormModel]:
  """Opens the models of a finished run.

  No code of the run's folder is run, because the run may be somebody else's:
  the model is built from the flags, and its weights are plain arrays.

  Args:
    settings: The run's settings.
    folder: The run's folder.

  Returns:
    The saved weights, all of them intact, and the model that they are for.

  Raises:
    ValueError: If a file is damaged or missing, or the model's function is in
      the run's folder.
  """
  if model_names.is_other_model(settings.model):
    _import_from_working_folder()
    _check_is_elsewhere(settings.model, folder)
  saved = saved_models.SavedModels(folder / run_folder.MODEL)
  saved.check()
  model = _build_model(
      settings,
      tuple(saved.manifest['input_shape']),
      saved.manifest['num_classes'],
  )
  return saved, model


def _check_is_elsewhere(model_name: str, folder: pathlib.Path):
  """Checks that a user's model is not code in a run's folder."""
  package = model_name.partition(':')[0].partition('.')[0]
  spec = importlib.util.find_spec(package)
  if spec is None:
    return  # It will be said that there is no such module.
  places = [*(spec.submodule_search_locations or ()), spec.origin]
  for place in places:
    if place and folder.resolve() in pathlib.Path(place).resolve().parents:
      raise ValueError(
          f'--model={model_name} of the run is code in its own folder {folder},'
          " which is not run, because the run may be somebody else's. If you"
          ' trust it, move the module to another folder.'
      )


def build_process(
    settings: settings_lib.RunSettings, model: BatchNormModel, num_clients: int
) -> Any:
  """Builds the algorithm's process.

  Args:
    settings: The run's settings.
    model: The model.
    num_clients: The number of all clients.

  Returns:
    A `LearningProcess`, or a `StatefulLearningProcess` if the algorithm's
    clients keep something.

  Raises:
    ValueError: If the algorithm can't train this model.
  """
  arguments = _local_training_arguments(settings)
  if settings.client_weighting is not None:
    arguments['client_weighting'] = settings.client_weighting
  if settings.server_optimizer is not None:
    arguments['server_optimizer'] = _server_optimizer(settings)
  if settings.model_aggregator is not None:
    arguments['model_aggregator'] = aggregation.build_rule(settings, 'model')
  rule = aggregation.build_rule(settings, 'statistics')
  if rule is not None:
    arguments['statistics_aggregator'] = rule
  if settings.statistics is not None:
    arguments['statistics_aggregator'] = {
        'naive': aggregators.NaiveMomentsFactory,
        'pooled': aggregators.PooledMomentsFactory,
    }[settings.statistics](rule)
  for flag, name in _ARGUMENTS.items():
    if getattr(settings, flag) is not None:
      arguments[name] = getattr(settings, flag)
  algorithm = registry.find(settings.algorithm)
  if algorithm.needs_num_clients:
    arguments['num_clients'] = num_clients
  return algorithm.builder()(model, _client_optimizer(settings), **arguments)


def build_local_training(
    settings: settings_lib.RunSettings, model: BatchNormModel
) -> stateful_process.StatefulLearningProcess:
  """Builds the clients' local training of a run, without any averaging.

  What the algorithm itself does in it, such as a correction of the clients'
  drift, is left out.

  Args:
    settings: The run's settings.
    model: The model.

  Returns:
    The process, see `tff_bn.algorithms.build_single`.
  """
  return algorithms.build_single(
      model,
      _client_optimizer(settings),
      **_local_training_arguments(settings),
  )


def _client_optimizer(
    settings: settings_lib.RunSettings,
) -> tff.learning.optimizers.Optimizer:
  return tff.learning.optimizers.build_sgdm(
      settings.client_learning_rate, settings.client_momentum or None
  )


def _local_training_arguments(
    settings: settings_lib.RunSettings,
) -> dict[str, Any]:
  """The arguments of all builders."""
  # The clients' datasets are as long as --local_steps or --local_epochs says,
  # so that the process goes through them once. That there is a single step lets
  # some algorithms do without the code for more.
  return dict(
      local_steps=settings.local_steps,
      client_weight_decay=settings.client_weight_decay,
      client_learning_rate_schedule=_learning_rate_schedule(settings),
      client_warmup_steps=settings.client_warmup_steps,
      client_gradient_clip_norm=settings.client_gradient_clip_norm,
      seed=settings.seed,
      jit_compile=settings.jit_compile,
  )


def _learning_rate_schedule(
    settings: settings_lib.RunSettings,
) -> Optional[Callable[[tf.Tensor], tf.Tensor]]:
  """The learning rate as a function of the number of finished rounds."""
  changes = []
  if settings.client_learning_rate_schedule is not None:
    changes.append(
        # Rounds count from 1, so round `start` is the one after start - 1.
        [
            (start - 1, factor)
            for start, factor in parsers.parse_schedule(
                settings.client_learning_rate_schedule
            )
        ]
    )
  if settings.after_sync_factor is not None:
    changes.append([(settings.sync_rounds, settings.after_sync_factor)])
  if not changes:
    return None

  def learning_rate(num_finished_rounds):
    rate = settings.client_learning_rate
    for schedule in changes:
      factor = 1.0
      for start, later_factor in schedule:
        factor = tf.where(num_finished_rounds >= start, later_factor, factor)
      rate *= factor
    return rate

  return learning_rate


def _server_optimizer(
    settings: settings_lib.RunSettings,
) -> tff.learning.optimizers.Optimizer:
  learning_rate = settings.server_learning_rate
  match settings.server_optimizer:
    case 'sgd':
      return tff.learning.optimizers.build_sgdm(learning_rate)
    case 'sgdm':
      return tff.learning.optimizers.build_sgdm(
          learning_rate, settings.server_momentum
      )
    case 'adam':
      return tff.learning.optimizers.build_adam(
          learning_rate, epsilon=_SERVER_EPSILON
      )
    case 'yogi':
      return tff.learning.optimizers.build_yogi(
          learning_rate, epsilon=_SERVER_EPSILON
      )
  raise ValueError(
      f'--server_optimizer={settings.server_optimizer} is unknown.'
  )


def training_config(
    settings: settings_lib.RunSettings,
) -> training.TrainingConfig:
  """The training loop's part of the settings."""
  return training.TrainingConfig(
      rounds=settings.rounds,
      clients_per_round=settings.clients_per_round,
      batch_size=settings.batch_size,
      local_steps=settings.local_steps,
      local_epochs=settings.local_epochs,
      seed=settings.seed,
      evaluate_every=settings.evaluate_every,
      checkpoint_every=settings.checkpoint_every,
      max_failed_rounds=settings.max_failed_rounds,
  )


@dataclasses.dataclass(frozen=True)
class Job:
  """A run that is ready to start.

  Attributes:
    settings: The run's settings.
    folder: The run's folder.
    data: The clients' data.
    model: The model with its initial weights.
    process: The algorithm's process; None if the run is finished and skipped.
  """

  settings: settings_lib.RunSettings
  folder: pathlib.Path
  data: tff_bn_data.FederatedData
  model: BatchNormModel
  process: Any


def prepare(
    runs: Sequence[settings_lib.RunSettings],
    folders: Sequence[pathlib.Path],
    *,
    skip_finished: bool,
) -> list[Job]:
  """Builds all that runs on one dataset need.

  Args:
    runs: The runs' settings; those with the same seed get the same split and
      initial weights.
    folders: The runs' folders.
    skip_finished: Whether to take the files of a run that is finished as they
      are, instead of checking its last checkpoint.

  Returns:
    The jobs, in the same order.

  Raises:
    ValueError: If a run can't be made as its settings say.
  """
  dataset = load_dataset(runs[0])
  made = {}
  jobs = []
  for settings, folder in zip(runs, folders, strict=True):
    recipe = DataRecipe.of(settings)
    if recipe not in made:
      data = split_dataset(settings, dataset)
      round_data.check_workers(data)
      made[recipe] = data, build_model(settings, data)
    data, model = made[recipe]
    process = None
    if not (skip_finished and training.is_finished(folder)):
      process = build_process(settings, model, len(data.client_ids))
    jobs.append(Job(settings, folder, data, model, process))
  return jobs


def describe_data(job: Job) -> str:
  """The data and its split in a few words, for titles."""
  num_clients = len(job.data.client_ids)
  clients = 'client' if num_clients == 1 else 'clients'
  return (
      f'{job.settings.dataset}, {num_clients} {clients},'
      f' --split={job.settings.split}'
  )


class Failure(NamedTuple):
  """A run that did not come to a model that can be used."""

  job: Job
  error: training.TrainingFailedError


def train(jobs: Sequence[Job]) -> list[Failure]:
  """Trains, or continues to train, runs one after another.

  To be called inside of a runtime, see `runtime_flags.RuntimeSettings.enter`.

  Args:
    jobs: The runs.

  Returns:
    The runs that failed; the others go on in spite of them.
  """
  failures = []
  for job in jobs:
    if job.process is None:
      folder_lock.let_others_read(job.folder)
  for number, job in enumerate(jobs, start=1):
    settings = job.settings
    if len(jobs) > 1:
      print(
          f'[{number}/{len(jobs)}] {settings.algorithm}, seed'
          f' {settings.seed}',
          flush=True,
      )
    if job.process is None:
      print('This run is finished.', flush=True)
      continue
    try:
      _train(job)
    except training.TrainingFailedError as error:
      failures.append(Failure(job, error))
      if len(jobs) > 1:
        print(error, file=sys.stderr, flush=True)
    if len(jobs) > 1:  # While the others go on.
      folder_lock.let_others_read(job.folder)
  return failures


def _train(job: Job):
  algorithm = registry.find(job.settings.algorithm)
  training.train(
      job.process,
      job.model,
      job.data,
      training_config(job.settings),
      job.folder,
      train_on_union=algorithm.trains_on_union,
      settings={
          name: text
          for name, text in job.settings.to_flags().items()
          if name not in training.MAY_CHANGE
      },
  )
