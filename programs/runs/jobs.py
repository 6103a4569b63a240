"""Builds runs, one after another, and trains them.

Importing this module imports TensorFlow Federated, so programs do it after they
have checked their flags.
"""

from collections.abc import Collection, Iterable, Sequence
import dataclasses
import functools
import gc
import pathlib
import sys
import time
from typing import Any, NamedTuple, Optional
import warnings

from absl import logging

from tff_bn import data as tff_bn_data
from tff_bn import training
from tff_bn.catalog import algorithms
from tff_bn.catalog import datasets
from tff_bn.catalog import local_training
from tff_bn.common import progress
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.processes import stateful_process
from tff_bn.programs.flags import data_flags
from tff_bn.programs.flags import model_flags
from tff_bn.programs.flags import objective_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_building
from tff_bn.programs.runs import run_data
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_privacy
from tff_bn.programs.runs import run_timing
from tff_bn.programs.testing import detailed_evaluation
from tff_bn.programs.testing import held_out
from tff_bn.programs.testing import model_evaluation
from tff_bn.training import best_round
from tff_bn.training import finished
from tff_bn.training import folder_lock
from tff_bn.training import kept_statistics
from tff_bn.training import metrics_hook as metrics_hook_lib
from tff_bn.training import round_data

# Flags that can make updates, and so the model, not finite.
_CAUSES = (
    'attack',
    'attack_strength',
    'client_learning_rate',
    'server_learning_rate',
)


@dataclasses.dataclass(frozen=True)
class Task:
  """A run that is to be trained in a folder with its `flags.txt`.

  `title` is its name in messages.
  """

  settings: settings_lib.RunSettings
  folder: pathlib.Path
  title: str
  is_finished: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
  """A run that is ready to start: `model` has its initial weights.

  `held_out` is the data of the clients that are tested after the training.
  """

  settings: settings_lib.RunSettings
  folder: pathlib.Path
  data: tff_bn_data.FederatedData
  model: BatchNormModel
  process: stateful_process.Process
  build_seconds: float
  held_out: Optional[tff_bn_data.FederatedData] = None


# The flags on which a model depends, besides its data.
_ModelFlags = tuple[model_flags.ModelFlags, objective_flags.ObjectiveFlags]


class _Split(NamedTuple):
  """The data of some runs, and the models that were built for it.

  `models` has the model, and its flags, for each kind of BN layers.
  """

  recipe: run_data.DataRecipe
  data: tff_bn_data.FederatedData
  held_out: Optional[tff_bn_data.FederatedData]
  models: dict[Optional[str], tuple[_ModelFlags, BatchNormModel]]


class Builder:
  """Builds runs one after another.

  It keeps the dataset, the split and the models of the previous run, because
  the next run often needs the same. Runs with the same seed get the same split
  and initial weights.
  """

  def __init__(self) -> None:
    self._dataset: Optional[tuple[Any, tff_bn_data.Dataset]] = None
    self._split: Optional[_Split] = None

  def data(
      self, settings: settings_lib.RunSettings
  ) -> tff_bn_data.FederatedData:
    """Returns the data of a run; a ValueError says why that is impossible."""
    return self._split_of(settings).data

  def build(
      self, settings: settings_lib.RunSettings, folder: pathlib.Path
  ) -> Job:
    """Builds a run; a ValueError says what can't be built."""
    start = time.monotonic()
    split = self._split_of(settings)
    flags = _model_flags(settings)
    batch_norm = algorithms.find(settings.algorithm).batch_norm
    with progress.saying(
        f'Building the model {settings.model or settings.initial_model} and'
        f' tracing {settings.algorithm}'
    ):
      built_flags, model = split.models.get(batch_norm, (None, None))
      if model is None or built_flags != flags:
        model = run_building.build_model(settings, split.data)
        split.models[batch_norm] = flags, model
      held_out.check_model(settings, model)
      _check_best_round(settings, model)
      process = run_building.build_process(settings, model, split.data)
    seconds = time.monotonic() - start
    return Job(
        settings, folder, split.data, model, process, seconds, split.held_out
    )

  def _split_of(self, settings: settings_lib.RunSettings) -> _Split:
    recipe = run_data.DataRecipe.of(settings)
    if self._split is None or self._split.recipe != recipe:
      self._split = None  # Frees its memory.
      key = settings.dataset_key
      if self._dataset is None or self._dataset[0] != key:
        self._dataset = None
        self._dataset = key, settings.load()
      dataset = self._dataset[1]
      settings.check_task(dataset.task, dataset.num_outputs)
      data = recipe.split_and_hold_out(dataset)
      round_data.check_workers(data.training)
      self._split = _Split(recipe, data.training, data.held_out, {})
    return self._split


def check(builder: Builder, tasks: Iterable[Task]) -> None:
  """Finds mistakes in all runs before the first one starts.

  This builds the data of each run, then the models, then the processes, which
  take much longer; a ValueError says what can't be built. Runs that differ only
  in the seed, or only in the split over the same number of clients, have the
  same process, which is built once.
  """
  progress.say('Checking all runs before the first one starts …')
  by_dataset: dict[tuple[Any, ...], list[Task]] = {}
  for task in tasks:
    if not task.is_finished:
      by_dataset.setdefault(task.settings.dataset_key, []).append(task)
  processes = []
  for group in by_dataset.values():
    processes.append(_check_data(builder, group))
    # If all runs have the same model, the first process checks it at once.
    models = {_model_flags(task.settings) for task in group}
    if len(by_dataset) > 1 or len(models) > 1:
      _check_models(builder, group)
  # The dataset of the last group is still in memory.
  for group in reversed(processes):
    for task in group:
      builder.build(task.settings, task.folder)
      _free_memory()


def _check_data(builder: Builder, tasks: Sequence[Task]) -> list[Task]:
  """Checks the data of runs with the same dataset.

  Returns, for each of the processes, the first of the runs that needs it.
  """
  processes: dict[tuple[Any, ...], Task] = {}
  for task in tasks:
    num_clients = len(builder.data(task.settings).client_ids)
    processes.setdefault((_without_split(task.settings), num_clients), task)
  return list(processes.values())


def _check_models(builder: Builder, tasks: Sequence[Task]) -> None:
  """Checks the models of runs with the same dataset."""
  for task in {_model_flags(task.settings): task for task in tasks}.values():
    run_building.build_model(task.settings, builder.data(task.settings))
    _free_memory()


def _model_flags(settings: settings_lib.RunSettings) -> _ModelFlags:
  return (
      settings.part(model_flags.ModelFlags),
      settings.part(objective_flags.ObjectiveFlags),
  )


def _without_split(
    settings: settings_lib.RunSettings,
) -> settings_lib.RunSettings:
  """Returns settings without the seed and the flags of the split."""
  kept = ('dataset', 'data_dir', 'image_size', 'task', 'num_clients')
  changes: dict[str, Any] = {
      name: None for name in data_flags.DataFlags.specs() if name not in kept
  }
  return settings.replaced(seed=0, **changes)


def describe_data(
    settings: settings_lib.RunSettings,
    data: tff_bn_data.FederatedData,
    varied: Collection[str] = (),
) -> str:
  """Describes the data and its split in a few words, for titles.

  Flags with other values in other runs (`varied`) are left out.
  """
  num_clients = len(data.client_ids)
  words = {
      'dataset': datasets.short_name(settings.dataset),
      'num_clients': f'{num_clients} client{"s" if num_clients > 1 else ""}',
      'split': f'--split={settings.split}',
  }
  if {'dataset', 'split'} & set(varied):
    del words['num_clients']
  return ', '.join(text for name, text in words.items() if name not in varied)


def train(
    builder: Builder,
    tasks: Sequence[Task],
    metrics_hook: Optional[metrics_hook_lib.MetricsHook] = None,
) -> list[Task]:
  """Trains, or continues to train, runs one after another.

  Call it inside of a runtime, see `runtime_flags.RuntimeFlags.enter`.

  Returns:
    The runs that failed; a failure does not stop the other runs.
  """
  failures = []
  announce_finished(tasks)
  for number, task in enumerate(tasks, start=1):
    if task.is_finished:
      continue
    progress.say(f'[{number}/{len(tasks)}] {task.title}')
    if not train_next(builder, task.settings, task.folder, metrics_hook):
      failures.append(task)
    folder_lock.let_others_read(task.folder)  # The next runs may take long.
  return failures


def train_next(
    builder: Builder,
    settings: settings_lib.RunSettings,
    folder: pathlib.Path,
    metrics_hook: Optional[metrics_hook_lib.MetricsHook],
) -> bool:
  """Trains, or continues to train, the next of several runs.

  Returns:
    Whether the run has a usable model; if not, the reason is printed.
  """
  has_model = True
  try:
    train_one(builder.build(settings, folder), metrics_hook)
  except training.TrainingFailedError as error:
    has_model = False
    print(error, file=sys.stderr, flush=True)
  _free_memory()
  return has_model


def _free_memory() -> None:
  """Frees the memory of a run before the next run.

  Models and TensorFlow's functions refer to each other, so that only Python's
  garbage collector frees them. By itself it would start after many runs. A run
  of a small model takes more than 100 MB.
  """
  gc.collect()
  _leave_out_modules()


@functools.cache
def _leave_out_modules() -> None:
  """Lets later collections ignore what is left of the first run: the modules.

  To search their objects takes a third of a second.
  """
  gc.freeze()


def announce_finished(tasks: Sequence[Task]) -> None:
  """Lists the finished runs, and lets other programs read them."""
  for number, task in enumerate(tasks, start=1):
    if task.is_finished:
      folder_lock.let_others_read(task.folder)
      progress.say(f'[{number}/{len(tasks)}] {task.title}: finished')


def train_one(
    job: Job, metrics_hook: Optional[metrics_hook_lib.MetricsHook] = None
) -> None:
  """Trains a run, or continues it, and records how long that took.

  Then it evaluates the final models by class, label or target, and tests the
  clients that the run holds out.

  Raises:
    MetricsHookError: If the metrics hook fails.
    TrainingFailedError: If the run has no usable model.
  """
  warn_of_small_clients(job)
  warn_of_no_memory(job.settings)
  warn_of_kept_statistics(job)
  start = time.monotonic()
  try:
    result = _train(job, metrics_hook)
  except training.TrainingFailedError as error:
    # The files are about an earlier model.
    detailed_evaluation.remove(job.folder)
    (job.folder / run_folder.HELD_OUT_CSV).unlink(missing_ok=True)
    raise type(error)(f'{error} {likely_causes(job.settings)}') from error
  except BaseException:
    run_folder.undo_growth(job.folder)
    raise
  seconds = job.build_seconds + time.monotonic() - start
  # The run may have ended early.
  num_rounds = int(result.rows[-1]['round'] or 0) - (result.resumed_from or 0)
  if num_rounds:
    run_timing.write(job.folder, seconds, num_rounds)
  finished.add_result(
      job.folder,
      *detailed_evaluation.evaluate_final_models(
          job.model, job.data, job.folder
      ),
  )
  if job.held_out is not None:
    held_out.test_clients(
        job.settings,
        job.model,
        job.held_out,
        job.folder,
        functools.partial(run_building.build_epoch_training, job.settings),
    )
    finished.add_result(job.folder, run_folder.HELD_OUT_CSV)


def _check_best_round(
    settings: settings_lib.RunSettings, model: BatchNormModel
) -> None:
  """Raises a `ValueError` if a model lacks the metric of --keep_best."""
  if settings.keep_best is not None:
    with settings.naming_flags():
      best_round.BestRound(settings.keep_best).check(
          model_evaluation.numbers(model), has_validation=True
      )


def _train(
    job: Job, metrics_hook: Optional[metrics_hook_lib.MetricsHook]
) -> training.TrainingResult:
  with warnings.catch_warnings():
    # `warn_of_kept_statistics` has shown the warning with the names of flags.
    warnings.simplefilter('ignore', training.KeptStatisticsWarning)
    return training.train(
        job.process,
        job.model,
        job.data,
        run_building.training_config(job.settings),
        job.folder,
        train_on_union=algorithms.find(job.settings.algorithm).trains_on_union,
        settings=job.settings.to_flags(),
        metrics_hook=metrics_hook,
        round_columns=run_privacy.round_columns(job.settings, job.data),
    )


def warn_of_small_clients(job: Job) -> None:
  """Warns if batches are larger than the training data of clients."""
  settings = job.settings
  sizes = sorted(map(len, job.data.train_indices.values()))
  option = local_training.BATCH_SIZE
  if algorithms.find(settings.algorithm).trains_on_union:
    # The smallest union of the clients of a round.
    sizes = [sum(sizes[: settings.clients_per_round])]
    if settings.centralized_batch_size is not None:
      option = algorithms.CENTRALIZED_BATCH_SIZE
  batch_size = getattr(settings, option.name)
  small = [size for size in sizes if size < batch_size]
  if settings.local_steps is not None and small:
    logging.warning(
        '--%s=%d is larger than the training data of %d of %d clients'
        ' (%d to %d examples). With --local_steps, their batches repeat'
        ' examples; use a smaller --%s, or --local_epochs.',
        option.name,
        batch_size,
        len(small),
        len(sizes),
        small[0],
        small[-1],
        option.name,
    )


def warn_of_no_memory(settings: settings_lib.RunSettings) -> None:
  """Warns if the moving statistics keep nothing of earlier batches."""
  if settings.batch_norm_momentum == 0:
    logging.warning(
        '--batch_norm_momentum=0 keeps nothing of earlier batches: the moving'
        " statistics describe the last batch alone. Keras's default is 0.99;"
        ' the models of this package use 0.9.'
    )


def warn_of_kept_statistics(job: Job) -> None:
  """Warns if the moving statistics stay close to their initial values."""
  kept = kept_statistics.find(
      job.process,
      job.model,
      job.data,
      run_building.training_config(job.settings),
      train_on_union=algorithms.find(job.settings.algorithm).trains_on_union,
  )
  if kept is not None and kept.is_much:
    logging.warning(
        '%s',
        kept.describe(
            '--batch_norm_momentum', 'tff-bn-evaluate --reestimate_statistics'
        ),
    )


def likely_causes(settings: settings_lib.RunSettings) -> str:
  """Returns a sentence on the flags that can make a model not finite."""
  texts = settings.to_flags()
  flags = [f'--{name}={texts[name]}' for name in _CAUSES if name in texts]
  return (
      f'Likely causes: {", ".join(flags)}. A smaller learning rate, or'
      ' --client_gradient_clip_norm, may help.'
  )
