"""Compares treatments of batch normalization under differential privacy.

A client's pictures are drawn with replacement from the training pictures, with
labels from a Dirichlet distribution. All clients take part in each round and
make one local step. The noise is chosen for ε after all rounds, at client
level. Without noise, the updates are clipped, too, so the columns differ in the
noise alone. On Fashion-MNIST, the clip norm of each method is the best one of a
search, with the smallest ε and a separate seed. All other settings are the
same.

The program continues where it was stopped: it keeps the accuracy of each run in
privacy.csv, in the report's folder. It writes a Markdown report.
"""

from collections.abc import Sequence
import concurrent.futures
import csv
import dataclasses
import math
import os
import pathlib
import statistics
import tempfile
from typing import Any, Optional

from absl import app
from absl import flags
import harness

flags.adopt_module_key_flags(harness)

_TASKS = flags.DEFINE_list(
    'tasks', ['digits', 'fashion_mnist'], 'Tasks that are compared.'
)
_EPSILONS = flags.DEFINE_list(
    'epsilons', ['10', '3'], 'Values of ε, besides no noise.'
)
_CLIENTS = flags.DEFINE_integer(
    'clients', 1000, 'Number of clients.', lower_bound=2
)
_ROUNDS = flags.DEFINE_integer(
    'rounds',
    None,
    "Number of rounds of a run; by default a task's own.",
    lower_bound=2,
)
_SEEDS = flags.DEFINE_integer(
    'seeds',
    None,
    "Number of seeds of the table; by default a task's own.",
    lower_bound=1,
)

_DELTA = 1e-5
_DIRICHLET_ALPHA = 0.5
# Of the runs that choose the clip norms.
_SEARCH_SEED = 1000
# β, the rate of the running statistics.
_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Task:
  """Pictures and a model.

  Attributes:
    title: What the clients have.
    model: See `tff-bn-train --model`.
    group_norm: The group normalization that fits the model's channels.
    num_pictures: How many pictures each client has.
    rounds: The number of rounds of a run.
    seeds: The number of seeds.
    learning_rate: The clients' learning rate. It is so large that most updates
      are clipped: the clip norm decides the step.
    clip_norms: The norms to which updates can be clipped. The best is chosen.
  """

  title: str
  model: str
  group_norm: str
  num_pictures: int
  rounds: int
  seeds: int
  learning_rate: float
  clip_norms: tuple[float, ...]


TASKS = {
    'digits': Task(
        *("scikit-learn's digits", 'small_cnn', 'group8', 10, 50, 2),
        learning_rate=0.5,
        clip_norms=(0.5,),
    ),
    'fashion_mnist': Task(
        *('Fashion-MNIST', 'mlp3', 'group6', 20, 50, 3),
        learning_rate=1.0,
        clip_norms=(0.5, 1.0),
    ),
}


@dataclasses.dataclass(frozen=True)
class Method:
  """A method of the comparison.

  Attributes:
    builder: The name of its builder.
    has_groups: Whether it has group instead of batch normalization.
    is_hybrid: Whether its layers are hybrid batch normalization.
  """

  builder: str
  has_groups: bool = False
  is_hybrid: bool = False


METHODS = {
    'FedAvg, batch norm': Method('build_fed_avg'),
    'FedAvg, group norm': Method('build_fed_avg', has_groups=True),
    'SiloBN': Method('build_silo_bn'),
    'FBN': Method('build_fbn'),
    'FixBN': Method('build_fixbn'),
    'HBN': Method('build_hbn', is_hybrid=True),
}


@dataclasses.dataclass(frozen=True)
class Run:
  """The test accuracy after a run.

  Attributes:
    task: The task's name.
    method: The method's name.
    epsilon: ε, or infinity without noise.
    clients: The number of clients.
    rounds: The number of rounds.
    clip_norm: The norm to which updates are clipped.
    seed: The seed.
    noise: The noise multiplier.
    accuracy: The accuracy in percent; NaN if the run failed.
  """

  task: str
  method: str
  epsilon: float
  clients: int
  rounds: int
  clip_norm: float
  seed: int
  noise: float
  accuracy: float


@dataclasses.dataclass(frozen=True)
class Measurements:
  """What the report shows."""

  machine: Sequence[str]
  tasks: Sequence[str]
  epsilons: Sequence[float]
  runs: Sequence[Run]


class Results:
  """The runs, in a CSV file."""

  _NAMES = tuple(field.name for field in dataclasses.fields(Run))

  def __init__(self, path: pathlib.Path):
    """Reads the file, if there is one."""
    self._path = path
    self.runs: list[Run] = []
    if path.exists():
      with path.open(encoding='utf-8', newline='') as file:
        self.runs = [
            Run(
                *(
                    field.type(row[field.name])
                    for field in dataclasses.fields(Run)
                )
            )
            for row in csv.DictReader(file)
        ]

  def has(self, *key: Any) -> bool:
    """Whether there is a run with these first fields."""
    return any(dataclasses.astuple(run)[: len(key)] == key for run in self.runs)

  def begin(self) -> None:
    """Makes the file if there is none."""
    self._path.parent.mkdir(parents=True, exist_ok=True)
    if not self._path.exists():
      self._append(self._NAMES)

  def add(self, run: Run) -> None:
    """Adds a run, to the file too."""
    self.runs.append(run)
    self._append(dataclasses.astuple(run))

  def _append(self, cells: Sequence[Any]) -> None:
    # Several processes add runs, each with one short write.
    with self._path.open('a', encoding='utf-8', newline='') as file:
      csv.writer(file, lineterminator='\n').writerow(cells)


def client_data(task: str, num_clients: int) -> Any:
  """Draws the clients' pictures; the first client has all test pictures."""
  import numpy as np

  from tff_bn import data

  dataset = data.load_dataset(task)
  rng = np.random.default_rng(0)
  x, y = dataset.x_train, dataset.y_train
  by_label = [np.flatnonzero(y == label) for label in np.unique(y)]
  clients = {}
  for number in range(num_clients):
    shares = rng.dirichlet([_DIRICHLET_ALPHA] * len(by_label))
    counts = rng.multinomial(TASKS[task].num_pictures, shares)
    chosen = np.concatenate(
        [rng.choice(own, n) for own, n in zip(by_label, counts, strict=True)]
    )
    clients[f'{number:05}'] = x[chosen], y[chosen]
  first = next(iter(clients))
  return data.from_clients(
      clients,
      test={first: (dataset.x_test, dataset.y_test)},
      num_classes=harness.NUM_CLASSES,
  )


def noise_multiplier(epsilon: float, num_clients: int, rounds: int) -> float:
  """Returns the noise of a run."""
  from tff_bn.analysis import privacy_accounting

  if math.isinf(epsilon):
    return 0.0
  return privacy_accounting.noise_multiplier(
      epsilon,
      privacy_accounting.Sampling(num_clients, num_clients),
      rounds,
      _DELTA,
  )


def train(
    task: str,
    method: str,
    epsilon: float,
    data: Any,
    rounds: int,
    clip_norm: float,
    seed: int,
) -> Run:
  """Trains a model in TFF's current context."""
  import keras
  import tensorflow_federated as tff

  from tff_bn import aggregators
  from tff_bn import algorithms
  from tff_bn import convert_batch_norm
  from tff_bn import models
  from tff_bn import training

  how = METHODS[method]
  normalization = TASKS[task].group_norm if how.has_groups else 'batch'
  num_clients = len(data.client_ids)
  noise = noise_multiplier(epsilon, num_clients, rounds)
  build_model = models.build_model_fn(
      TASKS[task].model,
      tuple(data.element_spec[0].shape[1:]),
      harness.NUM_CLASSES,
      normalization=normalization,
      batch_norm_momentum=None if how.has_groups else 1 - _RATE,
  )
  keras.utils.set_random_seed(seed)
  initial = build_model()
  if how.is_hybrid:
    initial = convert_batch_norm(initial, to='hybrid')

  def keras_model_fn():
    model = keras.models.clone_model(initial)
    model.set_weights(initial.get_weights())
    return model

  model = harness.build_classifier(keras_model_fn, data.element_spec)
  options: dict[str, Any] = {'client_weighting': 'uniform', 'seed': seed}
  if how.builder == 'build_fixbn':
    options['fixbn_rounds'] = max(1, rounds // 2)
  if how.builder == 'build_hbn':
    options['statistics_rate'] = _RATE
  options['sum_aggregator'] = aggregators.DpSums(
      noise, num_clients=num_clients, clip_norm=clip_norm, seed=seed
  )
  process = getattr(algorithms, how.builder)(
      model,
      tff.learning.optimizers.build_sgdm(TASKS[task].learning_rate),
      **options,
  )
  with tempfile.TemporaryDirectory() as folder:
    try:
      result = training.train(
          process,
          model,
          data,
          training.TrainingConfig(
              rounds=rounds,
              batch_size=TASKS[task].num_pictures,
              local_steps=1,
              seed=seed,
              evaluate_every=rounds,
              checkpoint_every=rounds,
          ),
          folder,
      )
      accuracy = 100 * float(result.rows[-1]['test_accuracy'])
    except training.TrainingFailedError:
      accuracy = math.nan
  return Run(
      *(task, method, epsilon, num_clients, rounds),
      *(clip_norm, seed, noise, accuracy),
  )


def _complete(
    task: str,
    method: str,
    epsilons: Sequence[float],
    num_clients: int,
    rounds: int,
    num_seeds: int,
    path: pathlib.Path,
) -> None:
  """Trains a method with all ε and seeds; what the file has is not repeated."""
  from tff_bn import runtime

  results = Results(path)
  data = client_data(task, num_clients)

  def run(epsilon: float, clip_norm: float, seed: int) -> None:
    key = task, method, epsilon, num_clients, rounds, clip_norm, seed
    if not results.has(*key):
      harness.progress(
          f'Training {task}, {method}, {_text(epsilon)}, norm'
          f' {clip_norm:g}, seed {seed} ...'
      )
      results.add(train(task, method, epsilon, data, rounds, clip_norm, seed))

  with runtime.in_process_runtime():
    if len(TASKS[task].clip_norms) > 1:
      for clip_norm in TASKS[task].clip_norms:
        run(min(epsilons), clip_norm, _SEARCH_SEED)
    clip_norm = best_clip_norm(results.runs, task, method)
    for epsilon in epsilons:
      for seed in range(num_seeds):
        run(epsilon, clip_norm, seed)


def best_clip_norm(runs: Sequence[Run], task: str, method: str) -> float:
  """Returns the clip norm of the best run of the search, or the only one."""
  norms = TASKS[task].clip_norms
  if len(norms) == 1:
    return norms[0]
  found = [
      run
      for run in runs
      if (run.task, run.method, run.seed) == (task, method, _SEARCH_SEED)
  ]
  # NaN is neither larger nor smaller.
  best = max(found, key=lambda run: (run.accuracy > 0, run.accuracy))
  return best.clip_norm


def measure(
    tasks: Sequence[str],
    epsilons: Sequence[float],
    num_clients: int,
    rounds: Optional[int],
    num_seeds: Optional[int],
    path: pathlib.Path,
) -> Measurements:
  """Trains every method with every ε, each method in its own process."""
  Results(path).begin()
  # A process computes the clients of a round mostly on one core.
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as executor:
    waiting = [
        executor.submit(
            harness.in_new_process,
            *(_complete, task, method, epsilons, num_clients),
            rounds or TASKS[task].rounds,
            num_seeds or TASKS[task].seeds,
            path,
        )
        for task in tasks
        for method in METHODS
    ]
    for future in waiting:
      future.result()
  runs = [
      run
      for run in Results(path).runs
      if run.task in tasks
      and run.clients == num_clients
      and run.rounds == (rounds or TASKS[run.task].rounds)
      and run.seed in (*range(num_seeds or TASKS[run.task].seeds), _SEARCH_SEED)
  ]
  return Measurements(
      harness.in_new_process(harness.describe_machine),
      tasks,
      epsilons,
      runs,
  )


def _text(epsilon: float) -> str:
  return 'no noise' if math.isinf(epsilon) else f'ε = {epsilon:g}'


def _cell(accuracies: Sequence[float]) -> str:
  finite = [value for value in accuracies if not math.isnan(value)]
  if not finite:
    return 'all failed'
  text = f'{statistics.mean(finite):.1f} ({min(finite):.1f}–{max(finite):.1f})'
  num_failed = len(accuracies) - len(finite)
  return text + (f', {num_failed} failed' if num_failed else '')


def _rows(measurements: Measurements, task: str) -> list[list[str]]:
  rows = []
  for method in METHODS:
    clip_norm = best_clip_norm(measurements.runs, task, method)
    accuracies = [
        [
            run.accuracy
            for run in measurements.runs
            if (run.task, run.method, run.epsilon, run.clip_norm)
            == (task, method, epsilon, clip_norm)
            and run.seed != _SEARCH_SEED
        ]
        for epsilon in measurements.epsilons
    ]
    rows.append([method, f'{clip_norm:g}', *map(_cell, accuracies)])
  return rows


def report(measurements: Measurements) -> tuple[str, bool]:
  """Returns the report in Markdown; there is no floor that could be missed."""
  first = measurements.runs[0]
  noisy = [e for e in measurements.epsilons if not math.isinf(e)]
  lines = [
      *harness.head(
          'Accuracy under differential privacy', 'privacy', measurements.machine
      ),
      '',
      f'{first.clients} clients with labels from Dir({_DIRICHLET_ALPHA:g}), all'
      ' in each round, one local step on all pictures; δ ='
      f' {_DELTA:g} at client level. Test accuracy in %, mean (range) of the'
      ' seeds.',
  ]
  for name in measurements.tasks:
    task = TASKS[name]
    runs = [run for run in measurements.runs if run.task == name]
    noise = {run.epsilon: run.noise for run in runs}
    seeds = {run.seed for run in runs if run.seed != _SEARCH_SEED}
    lines += [
        '',
        f'## {task.title}: {task.model}, {task.num_pictures} pictures,'
        f' {runs[0].rounds} rounds',
        '',
        f'{len(seeds)} seeds, learning rate'
        f' {task.learning_rate:g}, updates clipped to the norm'
        f' {" or ".join(f"{norm:g}" for norm in task.clip_norms)}.'
        ' The noise multiplier is '
        + ', '.join(f'{noise[e]:.2f} for {_text(e)}' for e in noisy)
        + '.',
        '',
        *harness.table(
            ['method', 'clip norm', *map(_text, measurements.epsilons)],
            _rows(measurements, name),
        ),
    ]
  lines.append('')
  return '\n'.join(lines), True


def _parse_flags() -> dict[str, Any]:
  try:
    epsilons = [float(text) for text in _EPSILONS.value]
  except ValueError:
    epsilons = [math.nan]
  if not epsilons or not all(0 < e < math.inf for e in epsilons):
    raise ValueError(
        f'--epsilons={",".join(_EPSILONS.value)}: use positive numbers.'
    )
  unknown = set(_TASKS.value).difference(TASKS)
  if unknown or not _TASKS.value:
    raise ValueError(
        f'--tasks={",".join(_TASKS.value)}: use some of {", ".join(TASKS)}.'
    )
  return dict(
      tasks=_TASKS.value,
      epsilons=[math.inf, *epsilons],
      num_clients=_CLIENTS.value,
      rounds=_ROUNDS.value,
      num_seeds=_SEEDS.value,
      path=harness.output_dir() / 'privacy.csv',
  )


def main(argv: Sequence[str]) -> int:
  """Runs the benchmark."""
  return harness.run('privacy', argv, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
