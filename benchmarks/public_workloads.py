"""Measures workloads that other frameworks publish, next to these frameworks.

*   `pfl_cifar10`: table 1 of pfl-research (Granqvist et al., 2024), a CNN
    without batch normalization; `pfl_cifar10_bn` adds batch normalization after
    each convolution.
*   `flute_lr`: logistic regression, FLUTE's comparison with Flower on a CPU.
*   `flute_femnist`: FLUTE's CNN for FEMNIST.

The images are generated, so nothing is downloaded. All frameworks start from
the same weights and train on the same clients' images:

*   tff_bn: FedAvg in the in-process runtime, with divided cores.
*   Keras: a loop over the clients that calls a `tf.function` for each step.
*   the peers that `--peer_python` has installed: plain PyTorch, pfl-research,
    Flower's simulation on Ray, and plain JAX in the form of FedJAX.

This command makes an interpreter with all peers:

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch pfl 'flwr[simulation]' jax
    python benchmarks/public_workloads.py --peer_python=/tmp/peers/bin/python

Each framework has its own process, and the processes take turns after each
round. Before, they train a small form of the workload without randomness; if
their losses differ, the program ends without a report. It writes a Markdown
report and exits with 1 if a floor is not met.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import harness
import workload_data

flags.adopt_module_key_flags(harness)

_PFL_CIFAR10: dict[str, Any] = dict(
    kind='cnn',
    image_shape=(32, 32, 3),
    num_classes=10,
    num_clients=1000,
    samples_per_client=50,
    clients_per_round=50,
    batch_size=10,
    learning_rate=0.1,
    test_samples=10_000,
    test_every=10,
    rounds=6,
)
# By name: the arguments of a `workload_data.Workload`.
_WORKLOADS: dict[str, dict[str, Any]] = {
    'pfl_cifar10': _PFL_CIFAR10,
    # With a learning rate of 0.1, training diverges.
    'pfl_cifar10_bn': dict(_PFL_CIFAR10, kind='cnn_bn', learning_rate=0.01),
    'flute_lr': dict(
        kind='linear',
        image_shape=(28, 28, 1),
        num_classes=10,
        num_clients=1000,
        samples_per_client=60,
        clients_per_round=10,
        batch_size=10,
        learning_rate=0.03,
        test_samples=10_000,
        test_every=20,
        rounds=100,
    ),
    'flute_femnist': dict(
        kind='cnn',
        image_shape=(28, 28, 1),
        num_classes=62,
        num_clients=3400,
        samples_per_client=200,
        clients_per_round=10,
        batch_size=20,
        learning_rate=0.1,
        test_samples=10_000,
        test_every=50,
        rounds=6,
    ),
}

_NAMES = flags.DEFINE_list(
    'workloads', list(_WORKLOADS), 'Workloads to time, by name.'
)
_ROUNDS = flags.DEFINE_integer(
    'rounds',
    None,
    'Number of rounds, including the first. Default: 100 of flute_lr, the whole'
    ' published run, and 6 of the others.',
    lower_bound=2,
)
_PEERS = flags.DEFINE_list(
    'peers',
    ['pytorch', 'pfl', 'pfl2', 'flower', 'jax'],
    'Peers to compare with; pfl2 is pfl in two processes.',
)
_PEER_PYTHON = flags.DEFINE_string(
    'peer_python',
    sys.executable,
    'Python interpreter that has the peers installed.',
)

TFF_BN, KERAS = OURS = ('tff_bn', 'keras')
PYTORCH, PFL, TWO_PFL = ('pytorch', 'pfl', 'pfl2')
FLOWER, JAX = ('flower', 'jax')
TITLES = {
    TFF_BN: 'tff_bn',
    KERAS: 'Keras',
    PYTORCH: 'PyTorch',
    PFL: 'pfl',
    TWO_PFL: 'pfl, 2 processes',
    FLOWER: 'Flower',
    JAX: 'JAX',
}
# The packages of each peer, as `pip` names them.
PACKAGES = {
    PYTORCH: ('torch',),
    PFL: ('pfl', 'torch'),
    TWO_PFL: ('pfl', 'torch'),
    FLOWER: ('flwr', 'ray', 'torch'),
    JAX: ('jax',),
}

# Largest ratio of the seconds of a round, by workload and peer.
_MAX_RATIOS = {
    (name, peer): 0.5
    for name in ('pfl_cifar10', 'pfl_cifar10_bn')
    for peer in (PFL, TWO_PFL)
}
# Before a workload is timed, the frameworks train a small form of it, in which
# nothing is random: all clients take part, each with one batch, without
# dropout. Its losses differ by rounding only, relative to the decrease.
_NUM_CHECKED = 4
_CHECKED_ROUNDS = 3
_TOLERANCE = 0.01

# Prints the versions of the packages that an interpreter has.
_VERSIONS_CODE = """
import importlib.metadata, json, sys
versions = {}
for name in sys.argv[1:]:
  try:
    versions[name] = importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    pass
print(json.dumps(versions))
"""


@dataclasses.dataclass(frozen=True)
class Run:
  """A framework's run of a workload.

  Attributes:
    rounds: The seconds of each round.
    tests: The seconds of each test; the first is of the initial model.
    losses: The loss of each test.
    accuracies: The accuracy of each test.
  """

  rounds: Sequence[float]
  tests: Sequence[float]
  losses: Sequence[float]
  accuracies: Sequence[float]

  @classmethod
  def of(cls, answers: Sequence[Mapping[str, Any]]) -> 'Run':
    """Returns the run with these answers of its process."""
    tests = [
        answer for answer in answers if answer['event'] == workload_data.TEST
    ]
    return cls(
        [a['seconds'] for a in answers if a['event'] == workload_data.ROUND],
        [a['seconds'] for a in tests],
        [a['loss'] for a in tests],
        [a['accuracy'] for a in tests],
    )

  @property
  def total(self) -> float:
    """The seconds of all rounds and tests."""
    return sum(self.rounds) + sum(self.tests)


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    missing: The titles of the peers that are not installed.
    workloads: The `Workload`s by name.
    num_weights: The number of weights of each workload's model.
    runs: For each workload, the run of each framework.
  """

  machine: Sequence[str]
  missing: Sequence[str]
  workloads: Mapping[str, workload_data.Workload]
  num_weights: Mapping[str, int]
  runs: Mapping[str, Mapping[str, Run]]


def peer_versions(peer_python: str) -> dict[str, str]:
  """Returns the versions of the peers' packages that are installed.

  Args:
    peer_python: The interpreter.

  Raises:
    ValueError: If the interpreter can't be run.
  """
  names = sorted(set(sum(PACKAGES.values(), ())))
  try:
    result = subprocess.run(
        [peer_python, '-c', _VERSIONS_CODE, *names],
        capture_output=True,
        check=True,
        text=True,
    )
  except (OSError, subprocess.CalledProcessError) as error:
    raise ValueError(
        f'--peer_python={peer_python} is no Python interpreter: {error}'
    ) from error
  return json.loads(result.stdout)


@contextlib.contextmanager
def _process(
    python: str, framework: str, workload: workload_data.Workload
) -> Iterator[Any]:
  """Starts a process, and yields a function that gives it a turn.

  Args:
    python: The interpreter.
    framework: A key of `workload_process.FRAMEWORKS`.
    workload: The workload.

  Yields:
    A function that returns the process's answer.
  """
  program = pathlib.Path(__file__).with_name('workload_process.py')
  with (
      tempfile.TemporaryFile('w+') as errors,
      subprocess.Popen(
          [python, str(program), framework, workload.to_json()],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=errors,
          text=True,
      ) as process,
  ):

    def read():
      line = process.stdout.readline()
      if not line:
        errors.seek(0)
        raise RuntimeError(
            f'{TITLES[framework]} failed with the workload {workload.name}:'
            f' {errors.read()[-2000:]}'
        )
      return json.loads(line)

    def take_turn():
      process.stdin.write('\n')
      process.stdin.flush()
      return read()

    try:
      read()  # It is ready.
      yield take_turn
      process.wait(timeout=60)
    finally:
      process.kill()


def time_workload(
    workload: workload_data.Workload,
    frameworks: Sequence[str],
    peer_python: str,
) -> dict[str, Run]:
  """Runs a workload with all frameworks in turn.

  Args:
    workload: The workload.
    frameworks: Keys of `TITLES`.
    peer_python: The interpreter of the peers.

  Returns:
    The run of each framework.
  """
  answers: dict[str, list[dict[str, Any]]] = {name: [] for name in frameworks}
  with contextlib.ExitStack() as stack:
    turns = {
        name: stack.enter_context(
            _process(
                sys.executable if name in OURS else peer_python, name, workload
            )
        )
        for name in frameworks
    }
    for event in workload.events():
      for name, take_turn in turns.items():
        answer = take_turn()
        if answer['event'] != event:
          raise RuntimeError(
              f'{TITLES[name]} made a {answer["event"]} instead of a {event}.'
          )
        answers[name].append(answer)
  return {name: Run.of(found) for name, found in answers.items()}


def without_randomness(
    workload: workload_data.Workload,
) -> workload_data.Workload:
  """Returns a small form of a workload, in which nothing is random."""
  return dataclasses.replace(
      workload,
      num_clients=_NUM_CHECKED,
      clients_per_round=_NUM_CHECKED,
      samples_per_client=workload.batch_size,
      test_samples=min(workload.test_samples, 300),
      test_every=1,
      rounds=_CHECKED_ROUNDS,
      learning_rate=0.01,
      has_dropout=False,
  )


def check_losses(
    workload: workload_data.Workload, runs: Mapping[str, Run]
) -> None:
  """Checks that all frameworks compute the same if nothing is random.

  Args:
    workload: What `without_randomness` returns.
    runs: The run of each framework.

  Raises:
    RuntimeError: If losses differ.
  """
  expected = runs[KERAS].losses
  decrease = abs(expected[0] - expected[-1])
  for name, run in runs.items():
    num_compared = len(expected)
    if workload.kind == 'cnn_bn' and name in (PFL, TWO_PFL):
      num_compared = 1  # Later tests use running statistics, not averaged.
    for loss, like in zip(run.losses[:num_compared], expected):
      # Not `>`: NaN must fail.
      if not abs(loss - like) <= _TOLERANCE * decrease:
        raise RuntimeError(
            f'{workload.name}: without randomness, the test losses of'
            f' {TITLES[name]} are {_format(run.losses)}, but with Keras they'
            f' are {_format(expected)}.'
        )


def _format(values: Sequence[float]) -> str:
  return ', '.join(f'{value:.5f}' for value in values)


def measure(
    workloads: Mapping[str, Mapping[str, Any]],
    peers: Sequence[str],
    peer_python: str,
) -> Measurements:
  """Takes all measurements.

  Args:
    workloads: The arguments of each `Workload`, by name.
    peers: The peers to compare with, keys of `PACKAGES`.
    peer_python: The interpreter of the peers.

  Returns:
    The measurements.
  """
  versions = peer_versions(peer_python)
  installed = [
      name
      for name in peers
      if all(package in versions for package in PACKAGES[name])
  ]
  frameworks = [*OURS, *installed]
  found, runs, num_weights = {}, {}, {}
  for name, arguments in workloads.items():
    harness.progress(f'Timing {name} ...')
    found[name] = workload_data.Workload(name, **arguments)
    small = without_randomness(found[name])
    check_losses(small, time_workload(small, frameworks, peer_python))
    runs[name] = time_workload(found[name], frameworks, peer_python)
    harness.progress(
        'Seconds per round: '
        + ', '.join(
            f'{TITLES[way]} {statistics.median(run.rounds[1:]):.3f}'
            for way, run in runs[name].items()
        )
    )
    num_weights[name] = sum(
        value.size for value in workload_data.initial_weights(found[name])
    )
  machine = harness.in_new_process(harness.describe_machine)
  shown = ', '.join(f'{name} {version}' for name, version in versions.items())
  return Measurements(
      [*machine, f'Peers: {shown or "none"}'],
      [TITLES[name] for name in peers if name not in installed],
      found,
      num_weights,
      runs,
  )


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: The measurements.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()
  lines = [
      *harness.head(
          'Public workloads', 'public_workloads', measurements.machine
      ),
      '',
      *_workload_lines(measurements),
      *_round_lines(measurements, floors),
      *_test_lines(measurements),
      *_run_lines(measurements),
      *_loss_lines(measurements),
  ]
  return '\n'.join(lines) + '\n', floors.are_met


def _frameworks(measurements: Measurements) -> list[str]:
  return list(next(iter(measurements.runs.values())))


def _workload_lines(measurements: Measurements) -> list[str]:
  rows = []
  for name, workload in measurements.workloads.items():
    rows.append(
        [
            name,
            {
                'linear': 'logistic regression',
                'cnn': 'CNN',
                'cnn_bn': 'CNN with BN',
            }[workload.kind],
            f'{measurements.num_weights[name]:,}',
            '×'.join(map(str, workload.image_shape)),
            str(workload.num_classes),
            f'{workload.num_clients:,}',
            str(workload.samples_per_client),
            str(workload.clients_per_round),
            str(workload.batch_size),
            str(workload.steps_per_round),
            f'{workload.learning_rate:g}',
        ]
    )
  missing = (
      [f'Not installed: {", ".join(measurements.missing)}.', '']
      if measurements.missing
      else []
  )
  return [
      '## Workloads',
      '',
      'FedAvg with SGD; each client trains for one epoch. `pfl_cifar10` is'
      ' table 1 of pfl-research, and `pfl_cifar10_bn` adds batch normalization'
      " after each convolution. `flute_lr` and `flute_femnist` are FLUTE's"
      ' comparisons with Flower and FedML. The CNN has two convolutions of 32'
      ' and 64 channels, max-pooling, dropout, a dense layer of 128 and'
      ' dropout. The images are generated, and the clients have random parts'
      ' of them. In FEMNIST, clients have different numbers of images; here,'
      ' each has their mean, rounded to 200. FLUTE passes the outputs of'
      ' logistic regression through a sigmoid before the softmax; here,'
      ' no framework does.',
      '',
      *harness.table(
          [
              *('Workload', 'model', 'weights', 'image', 'classes', 'clients'),
              *('images each', 'a round', 'batch', 'steps a round', 'rate'),
          ],
          rows,
      ),
      '',
      'All frameworks start from the same weights and train on the same'
      " clients' images. Before it was timed, each workload ran in a small form"
      ' without randomness, in which the test losses of all frameworks agreed'
      f' to {_TOLERANCE:.0%} of their decrease. tff_bn uses its in-process'
      ' runtime with divided cores, as its programs do, and data from'
      ' `data.from_clients`. Keras is a loop over the clients that calls a'
      ' `tf.function` for each step. PyTorch and JAX are such loops, too; the'
      ' one with JAX has the form of FedJAX. pfl runs as one process with'
      " PyTorch's default threads, and as two processes with one thread each."
      ' Flower runs its simulation on Ray with one core for each client. With'
      ' batch normalization, pfl averages no running statistics; the others'
      ' do.',
      '',
      *missing,
  ]


def _round_lines(
    measurements: Measurements, floors: harness.Floors
) -> list[str]:
  frameworks = _frameworks(measurements)
  titles = [TITLES[name] for name in frameworks]
  rows, first_rows, fastest_rows, ratio_rows = [], [], [], []
  for name, runs in measurements.runs.items():
    timing = harness.Timing.of({way: run.rounds for way, run in runs.items()})
    rows.append(
        [
            name,
            *timing.median_cells(frameworks),
            str(len(timing.later[TFF_BN])),
        ]
    )
    fastest_rows.append(
        [name, *(f'{min(timing.later[way]):.3f}' for way in frameworks)]
    )
    first_rows.append([name, *timing.first_cells(frameworks)])
    for peer in frameworks:
      if peer != TFF_BN:
        ratios = timing.ratios(TFF_BN, peer)
        ratio_rows.append(
            [
                name,
                TITLES[peer],
                harness.spread(ratios),
                *floors.ratio_cells(ratios, _MAX_RATIOS.get((name, peer))),
            ]
        )
  return [
      '## Seconds per round',
      '',
      'The frameworks take turns after each round. Medians of the rounds after'
      ' the first, without tests:',
      '',
      *harness.table(['Workload', *titles, 'rounds'], rows),
      '',
      'The fastest of these rounds:',
      '',
      *harness.table(['Workload', *titles], fastest_rows),
      '',
      'Ratios of successive rounds, median and range:',
      '',
      *harness.table(
          ['Workload', 'peer', 'tff_bn / peer', 'floor', 'met'], ratio_rows
      ),
      '',
      'The first round, with tracing and compilation. In the first round, pfl'
      " also tests the models on the users' data:",
      '',
      *harness.table(['Workload', *titles], first_rows),
      '',
  ]


def _test_lines(measurements: Measurements) -> list[str]:
  frameworks = _frameworks(measurements)
  rows = []
  for name, runs in measurements.runs.items():
    medians = [statistics.median(runs[way].tests[1:]) for way in frameworks]
    rows.append(
        [
            name,
            f'{measurements.workloads[name].test_samples:,}',
            str(measurements.workloads[name].test_every),
            *(f'{median:.3f}' for median in medians),
        ]
    )
  return [
      '## Seconds per test',
      '',
      'The published runs test the model every 10, 20 or 50 rounds. Median of'
      ' the tests after the first:',
      '',
      *harness.table(
          [
              *('Workload', 'images', 'every'),
              *(TITLES[name] for name in frameworks),
          ],
          rows,
      ),
      '',
  ]


def _run_lines(measurements: Measurements) -> list[str]:
  name = 'flute_lr'
  if name not in measurements.runs:
    return []
  runs, workload = measurements.runs[name], measurements.workloads[name]
  frameworks = _frameworks(measurements)
  ratios = [runs[TFF_BN].total / runs[way].total for way in frameworks]
  return [
      '## A whole run',
      '',
      f'Seconds of {workload.rounds} rounds of `flute_lr` with all tests,'
      ' including tracing but not the start of the processes. On their own'
      ' machine, the authors of FLUTE measured 3:20 minutes with FLUTE and'
      ' 30:14 minutes with Flower 1.0.0 for 100 rounds on the CPU.',
      '',
      *harness.table(
          ['', *(TITLES[way] for way in frameworks)],
          [
              ['seconds', *(f'{runs[way].total:.1f}' for way in frameworks)],
              ['tff_bn / peer', *(f'{ratio:.2f}' for ratio in ratios)],
          ],
      ),
      '',
  ]


def _loss_lines(measurements: Measurements) -> list[str]:
  frameworks = _frameworks(measurements)
  rows = []
  for name, runs in measurements.runs.items():
    rows.append(
        [
            name,
            str(measurements.workloads[name].rounds),
            f'{runs[KERAS].losses[0]:.3f}',
            *(
                f'{run.losses[-1]:.3f} ({100 * run.accuracies[-1]:.0f} %)'
                for run in runs.values()
            ),
        ]
    )
  return [
      '## Test losses',
      '',
      'The loss of the initial model, and the loss (and accuracy) after the'
      ' last round. The order of the samples and dropout differ between the'
      ' frameworks, and Flower samples other clients.',
      '',
      *harness.table(
          [
              *('Workload', 'rounds', 'initial'),
              *(TITLES[name] for name in frameworks),
          ],
          rows,
      ),
  ]


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  names = [name for name in _NAMES.value if name]
  if not names:
    raise ValueError('--workloads is empty; name at least one workload.')
  for name in names:
    if name not in _WORKLOADS:
      raise ValueError(
          f'--workloads: {name!r} is unknown; the workloads are'
          f' {", ".join(_WORKLOADS)}.'
      )
  peers = [name for name in _PEERS.value if name]
  for name in peers:
    if name not in PACKAGES:
      raise ValueError(
          f'--peers: {name!r} is unknown; the peers are {", ".join(PACKAGES)}.'
      )
  workloads = {name: dict(_WORKLOADS[name]) for name in names}
  if _ROUNDS.value is not None:
    for arguments in workloads.values():
      arguments['rounds'] = _ROUNDS.value
  peer_versions(_PEER_PYTHON.value)
  return dict(workloads=workloads, peers=peers, peer_python=_PEER_PYTHON.value)


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run(
      'public_workloads', arguments, _parse_flags, measure, report
  )


if __name__ == '__main__':
  app.run(main)
