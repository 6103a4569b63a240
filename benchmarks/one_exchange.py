"""Compares algorithms with one exchange a round with centralized training.

Ten clients have one class of scikit-learn's digits each and make one local step
with 32 examples in a round. Centralized training makes the same number of steps
with 320 examples of all clients. The test accuracy after the last round is
compared, with the settings that suit each method best: the candidates are
trained with another seed than the seeds of the table, and the best is taken.

The program continues where it was stopped: it keeps the accuracy of each run in
one_exchange.csv, in the report's folder. It writes a Markdown report and exits
with 1 if a floor is not met.
"""

from collections.abc import Iterable, Mapping, Sequence
import csv
import dataclasses
import math
import pathlib
import statistics
from typing import Any, Optional

from absl import app
from absl import flags
import harness

flags.adopt_module_key_flags(harness)

MODELS = ('small_cnn', 'mlp3', 'digits_cnn', 'fbn_cnn', 'resnet20')

_MODELS = flags.DEFINE_list(
    'models', list(MODELS), 'Models of `tff-bn-train --model` to train.'
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 300, 'Number of rounds of a run.', lower_bound=1
)
_SEEDS = flags.DEFINE_integer(
    'seeds', 5, 'Number of seeds of the table.', lower_bound=1
)

_NUM_CLIENTS = 10
_BATCH_SIZE = 32
# The candidates are compared with this seed; the seeds of the table are 0, 1, …
_SEARCH_SEED = 100

CENTRALIZED = 'centralized'
RESTARTING = 'FBN, running, restart'
RECOMMENDED = 'FBN, recommended'


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of a run.

  Attributes:
    learning_rate: The learning rate.
    clip_norm: The largest norm of the mean gradient; `None`: any.
    rate: β, the rate of the running statistics.
  """

  learning_rate: float
  clip_norm: Optional[float] = None
  rate: float = 0.1

  def __str__(self) -> str:
    clip = 'no clipping'
    if self.clip_norm is not None:
      clip = f'norm ≤ {self.clip_norm:g}'
    return f'{self.learning_rate:g}; {clip}; {self.rate:g}'


@dataclasses.dataclass(frozen=True)
class Method:
  """A method of the comparison.

  Attributes:
    builder: The name of its builder.
    options: The builder's options.
    candidates: The settings that are tried.
    runs_of: The method with the same builder and options, in whose name the
      runs are kept. Default: the method itself.
    max_behind: The floor: how many points its mean accuracy may be behind
      centralized training's.
  """

  builder: str
  candidates: Sequence[Settings]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  runs_of: Optional[str] = None
  max_behind: Optional[float] = None


_UNCLIPPED = (Settings(0.1), Settings(0.3))
_WITH_RESTART = dict(backward='running', backward_restart=1.5)

METHODS = {
    CENTRALIZED: Method('build_centralized', _UNCLIPPED),
    'FedTAN': Method('build_fedtan', _UNCLIPPED),
    'FixBN': Method(
        'build_fixbn',
        (Settings(0.03), Settings(0.03, 1.0), Settings(0.1, 1.0)),
    ),
    'FBN': Method(
        'build_fbn',
        (
            Settings(0.1),
            Settings(0.3, 1.0, rate=0.01),
            Settings(1.0, 1.0),
            Settings(1.0, 1.0, rate=0.01),
        ),
    ),
    'FBN, mean': Method(
        'build_fbn',
        (Settings(0.1, 1.0), Settings(0.3, 1.0)),
        dict(backward='mean'),
    ),
    'FBN, running': Method(
        'build_fbn',
        (Settings(0.03, 1.0), Settings(0.1, 1.0), Settings(0.3, 1.0)),
        dict(backward='running'),
    ),
    RESTARTING: Method(
        'build_fbn',
        (
            Settings(0.03, 3.0),
            Settings(0.1, 3.0),
            Settings(0.3, 1.0),
            Settings(1.0, 1.0),
        ),
        _WITH_RESTART,
    ),
    RECOMMENDED: Method(
        'build_fbn',
        (Settings(0.1, 3.0),),
        _WITH_RESTART,
        runs_of=RESTARTING,
        max_behind=2.0,
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
  """A run, as a row of the CSV file.

  Attributes:
    model: The model's name.
    method: The method's name.
    settings: Its settings as text.
    rounds: The number of rounds.
    seed: Determines the initial weights and the batches.
    accuracy: The test accuracy in percent; NaN if training diverged.
  """

  model: str
  method: str
  settings: str
  rounds: int
  seed: int
  accuracy: float


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What a method exchanges in its first round.

  Attributes:
    exchanges: The number of exchanges.
    megabytes: All clients' traffic, see `tff_bn.analysis.ProcessTraffic`.
  """

  exchanges: int
  megabytes: float


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    num_seeds: The number of seeds of the table.
    runs: All runs with this number of rounds.
    traffic: The traffic by model and method.
  """

  machine: Sequence[str]
  num_seeds: int
  runs: Sequence[Run]
  traffic: Mapping[tuple[str, str], Traffic]


class Results:
  """The finished runs, kept in a CSV file."""

  _FIELDS = tuple(field.name for field in dataclasses.fields(Run))

  def __init__(self, path: pathlib.Path):
    self._path = path
    self.runs = []
    if path.exists():
      with path.open(encoding='utf-8', newline='') as file:
        self.runs = [
            Run(
                **{
                    **row,
                    'rounds': int(row['rounds']),
                    'seed': int(row['seed']),
                    'accuracy': float(row['accuracy']),
                }
            )
            for row in csv.DictReader(file)
        ]

  def has(self, *key: Any) -> bool:
    """Whether there is a run with these first fields."""
    return any(dataclasses.astuple(run)[:-1] == key for run in self.runs)

  def add(self, run: Run) -> None:
    """Adds a run, to the file too."""
    self.runs.append(run)
    is_new = not self._path.exists()
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with self._path.open('a', encoding='utf-8', newline='') as file:
      writer = csv.DictWriter(file, self._FIELDS, lineterminator='\n')
      if is_new:
        writer.writeheader()
      writer.writerow(dataclasses.asdict(run))


def _runs_of(method: str) -> str:
  return METHODS[method].runs_of or method


def best_settings(runs: Iterable[Run], model: str, method: str) -> Settings:
  """Returns the candidate with the best accuracy with the search's seed."""
  accuracy = {
      run.settings: run.accuracy
      for run in runs
      if (run.model, run.method, run.seed)
      == (model, _runs_of(method), _SEARCH_SEED)
  }
  candidates = METHODS[method].candidates
  if len(candidates) == 1:
    return candidates[0]

  def quality(settings: Settings) -> float:
    value = accuracy[str(settings)]
    return -1.0 if math.isnan(value) else value

  return max(candidates, key=quality)


class _Training:
  """A method's process for a model, without its initial weights."""

  def __init__(self, model: str, method: str, settings: Settings, rounds: int):
    import numpy as np
    import tensorflow_federated as tff

    from tff_bn import algorithms
    from tff_bn import data
    from tff_bn import models

    digits = data.load_dataset('digits')
    self.data = harness.federated_data(
        digits,
        [np.flatnonzero(digits.y_train == c) for c in range(_NUM_CLIENTS)],
    )
    self._keras_model_fn = models.build_model_fn(
        model,
        digits.input_shape,
        harness.NUM_CLASSES,
        batch_norm_momentum=1 - settings.rate,
    )
    self.model = harness.build_classifier(
        self._keras_model_fn, self.data.element_spec
    )
    self.is_centralized = method == CENTRALIZED
    options = dict(METHODS[method].options, local_steps=1)
    if METHODS[method].builder == 'build_fixbn':
      options['fixbn_rounds'] = max(1, rounds // 2)
    if settings.clip_norm is not None:
      # The clients' mean change is the mean gradient times the learning rate.
      options['server_clip_norm'] = settings.learning_rate * settings.clip_norm
    self.process = getattr(algorithms, METHODS[method].builder)(
        self.model,
        tff.learning.optimizers.build_sgdm(settings.learning_rate),
        **options,
    )

  def initial_weights(self, seed: int) -> Any:
    """Returns the weights of a new model."""
    import keras

    keras.utils.set_random_seed(seed)
    return self.model.to_model_weights(
        [v.numpy() for v in self._keras_model_fn().weights]
    )

  def client_datasets(self, seed: int, round_num: int) -> list[Any]:
    """Returns the datasets of a round."""
    groups = [[client_id] for client_id in self.data.client_ids]
    batch_size = _BATCH_SIZE
    if self.is_centralized:
      groups = [list(self.data.client_ids)]
      batch_size *= _NUM_CLIENTS
    return [
        self.data.client_dataset(
            group,
            seed=seed,
            round_num=round_num,
            batch_size=batch_size,
            local_steps=1,
        )
        for group in groups
    ]


def train(training: _Training, rounds: int, seed: int) -> float:
  """Trains a model in TFF's current context.

  Args:
    training: The training.
    rounds: The number of rounds.
    seed: Determines the initial weights and the batches.

  Returns:
    The test accuracy in percent; NaN if a round failed.
  """
  from tff_bn.training import evaluation

  process = training.process
  state = process.set_model_weights(
      process.initialize(), training.initial_weights(seed)
  )
  for round_num in range(rounds):
    output = process.next(state, training.client_datasets(seed, round_num))
    state = output.state
    if output.metrics['finalizer']['failed_rounds'] > 0:
      return math.nan
  metrics = evaluation.Evaluator(training.model).evaluate(
      process.get_model_weights(state), training.data.test_dataset(1000)
  )
  return float(100 * metrics['accuracy'])


def compare_settings(
    model: str, method: str, rounds: int, num_seeds: int, path: pathlib.Path
) -> Traffic:
  """Trains a model with all candidates, and with all seeds with the best one.

  Args:
    model: The model's name.
    method: The method's name.
    rounds: The number of rounds.
    num_seeds: The number of seeds.
    path: The CSV file of the runs. What it has is not repeated.

  Returns:
    The traffic of a round.
  """
  from tff_bn import analysis
  from tff_bn import runtime

  runtime.divide_cores(_NUM_CLIENTS)
  results = Results(path)
  name = _runs_of(method)

  def complete(settings, seeds):
    seeds = [
        seed
        for seed in seeds
        if not results.has(model, name, str(settings), rounds, seed)
    ]
    if not seeds:
      return
    harness.progress(f'Training {model} by {method} ({settings}) ...')
    training = _Training(model, method, settings, rounds)
    for seed in seeds:
      accuracy = train(training, rounds, seed)
      results.add(Run(model, name, str(settings), rounds, seed, accuracy))

  candidates = METHODS[method].candidates
  with runtime.in_process_runtime():
    if len(candidates) > 1:
      for settings in candidates:
        complete(settings, [_SEARCH_SEED])
    runs = [run for run in results.runs if run.rounds == rounds]
    complete(best_settings(runs, model, method), range(num_seeds))
    process = _Training(model, method, candidates[-1], rounds).process
    found = analysis.ProcessTraffic(process).until(
        round_num=1, num_clients=_NUM_CLIENTS
    )
  return Traffic(found['exchanges'], found['megabytes'])


def measure(
    models: Sequence[str], rounds: int, num_seeds: int, path: pathlib.Path
) -> Measurements:
  """Trains every model with every method.

  Args:
    models: The models' names.
    rounds: The number of rounds.
    num_seeds: The number of seeds.
    path: The CSV file of the runs.

  Returns:
    The measurements.
  """
  traffic = {
      (model, method): harness.in_new_process(
          compare_settings, model, method, rounds, num_seeds, path
      )
      for model in models
      for method in METHODS
  }
  return Measurements(
      harness.in_new_process(harness.describe_machine),
      num_seeds,
      [
          run
          for run in Results(path).runs
          if run.rounds == rounds and run.model in models
      ],
      traffic,
  )


def _accuracies(
    measurements: Measurements, model: str, method: str
) -> list[float]:
  """Returns the accuracies of the table's seeds with the best settings."""
  settings = str(best_settings(measurements.runs, model, method))
  return [
      run.accuracy
      for run in measurements.runs
      if (run.model, run.method, run.settings)
      == (model, _runs_of(method), settings)
      and run.seed < measurements.num_seeds
  ]


def _cell(accuracies: Sequence[float]) -> str:
  """Formats the mean and the range, without runs that diverged."""
  finite = [value for value in accuracies if not math.isnan(value)]
  if not finite:
    return 'all diverged'
  text = f'{statistics.mean(finite):.1f} ({min(finite):.1f}–{max(finite):.1f})'
  num_diverged = len(accuracies) - len(finite)
  return text + (f', {num_diverged} diverged' if num_diverged else '')


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: The measurements.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()
  models = list(dict.fromkeys(model for model, _ in measurements.traffic))
  rounds = measurements.runs[0].rounds
  accuracy_rows, setting_rows, traffic_rows, floor_rows = [], [], [], []
  for method, how in METHODS.items():
    found = {m: _accuracies(measurements, m, method) for m in models}
    accuracy_rows.append([method, *(_cell(found[m]) for m in models)])
    setting_rows.append(
        [
            method,
            *(str(best_settings(measurements.runs, m, method)) for m in models),
        ]
    )
    if method != CENTRALIZED:
      traffic = [measurements.traffic[m, method] for m in models]
      traffic_rows.append(
          [
              method,
              *(f'{t.exchanges}; {t.megabytes:.4f}' for t in traffic),
          ]
      )
    if how.max_behind is not None:
      for model in models:
        central = _accuracies(measurements, model, CENTRALIZED)
        behind = statistics.mean(central) - statistics.mean(found[model])
        floor_rows.append(
            [
                model,
                f'{behind:.2f}',
                f'≤ {how.max_behind:.1f}',
                # Not `>`: NaN must fail.
                floors.check(behind <= how.max_behind),
            ]
        )
  lines = [
      *harness.head(
          'Accuracy with one exchange', 'one_exchange', measurements.machine
      ),
      '',
      "Ten clients with one class of scikit-learn's digits each, one local step"
      f' with {_BATCH_SIZE} examples, {rounds} rounds; test accuracy in %, mean'
      f' (range) of {measurements.num_seeds} seeds.',
      '',
      '## Accuracy, each method with its best settings',
      '',
      *harness.table(['method', *models], accuracy_rows),
      '',
      '`FBN, mean` and `FBN, running` are FBN with `backward`; `restart` means'
      ' `backward_restart=1.5`. The last line has the same settings for all'
      ' models. A run that diverged has no accuracy. All candidates and runs'
      ' are in one_exchange.csv.',
      '',
      '## Settings: learning rate; clipping of the mean gradient; β',
      '',
      *harness.table(['method', *models], setting_rows),
      '',
      f'Chosen by the accuracy with seed {_SEARCH_SEED}.',
      '',
      '## Exchanges; megabytes of a round',
      '',
      *harness.table(['method', *models], traffic_rows),
      '',
      'Counted from the computation of the first round, with ten clients.',
      '',
      '## FBN, recommended: points behind centralized training',
      '',
      *harness.table(['model', 'points', 'floor', 'met'], floor_rows),
      '',
  ]
  return '\n'.join(lines), floors.are_met


def _parse_flags() -> dict[str, Any]:
  unknown = set(_MODELS.value) - set(MODELS)
  if unknown or not _MODELS.value:
    raise ValueError(
        f'--models={",".join(_MODELS.value)}: use models of'
        f' {", ".join(MODELS)}.'
    )
  return dict(
      models=_MODELS.value,
      rounds=_ROUNDS.value,
      num_seeds=_SEEDS.value,
      path=harness.output_dir() / 'one_exchange.csv',
  )


def main(argv: Sequence[str]) -> int:
  """Runs the benchmark."""
  return harness.run('one_exchange', argv, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
