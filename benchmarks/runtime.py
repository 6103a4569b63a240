"""Measures the time and memory of the in-process runtime.

These variants compute the same rounds of federated averaging in turn:

*   native: TFF's runtime, in its worker process.
*   in process: this project's runtime with its default settings.
*   bare: a Python loop over the clients and their batches, NumPy arrays, that
    calls one `tf.function` for each step of plain Keras and TensorFlow. It
    contains no code of TFF or this project, so it shows the cost of the
    computation itself.
*   PyTorch, if it is installed: the same loop with plain PyTorch.
*   JAX, if it is installed, for small_cnn: one compiled call with a scan over
    the clients and, in it, over their batches. (The convolutions of resnet20
    take minutes in it.)

Each round starts from the same model, with new batches. The time includes the
conversion of the result to NumPy arrays. In process, it also includes the
choice of the batches, as in `tff-bn-train`; the others get their datasets or
arrays ready. If results differ, the program ends without a report. All but
native run once more with divided cores, as the programs run.

The program also measures how the peak memory of a round grows with the number
of clients, and the time until `tff-bn-train` has finished its first round. It
writes a Markdown report and exits with 1 if a floor is not met.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import gc
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Optional

from absl import app
from absl import flags
import fed_avg_rounds
import harness
from harness import Result
from harness import Timing
import jax_scan
import pytorch_loop

flags.adopt_module_key_flags(harness)

_ROWS = flags.DEFINE_list(
    'rows',
    [
        'small_cnn:10x5x32',
        'small_cnn:100x1x2',
        'small_cnn:100x5x32',
        'small_cnn:1000x5x10',
        'small_cnn:1000x5x32',
        'resnet20:5x5x128',
    ],
    'Rounds to time, each as MODEL:CLIENTSxSTEPSxBATCH; the models are'
    ' small_cnn (on digits of 8x8 pixels) and resnet20 (on random images of'
    ' 32x32x3).',
)
_REPEATS = flags.DEFINE_integer(
    'repeats',
    None,
    'Number of rounds to time after the first one. Default: depends on the'
    ' length of a round.',
    lower_bound=1,
)
_MEMORY_CLIENTS = flags.DEFINE_list(
    'memory_clients',
    ['10', '1000'],
    'Two numbers of clients to compare the peak memory for; empty: none.',
)
_STARTS = flags.DEFINE_integer(
    'starts',
    3,
    'Number of times to start tff-bn-train.',
    lower_bound=0,
)

NATIVE, IN_PROCESS, BARE = WAYS = ('native', 'in process', 'bare')
PYTORCH, JAX = PEERS = ('PyTorch', 'JAX')

# Largest ratio of in process to bare, by model, clients, steps and batch size.
_MAX_BARE_RATIO = {
    ('small_cnn', 10, 5, 32): 1.05,
    ('small_cnn', 100, 1, 2): 1.2,
    ('small_cnn', 100, 5, 32): 1.05,
    ('resnet20', 5, 5, 128): 1.0,
}
# Largest ratio of in process to a peer, with divided cores.
_MAX_PEER_RATIO = {
    PYTORCH: {
        ('small_cnn', 10, 5, 32): 1.0,
        ('small_cnn', 100, 1, 2): 1.0,
        ('small_cnn', 100, 5, 32): 1.0,
    },
    JAX: {
        ('small_cnn', 100, 1, 2): 1.5,
        ('small_cnn', 1000, 5, 10): 1.5,
    },
}
_MAX_MEMORY_RATIO = 1.3
_MAX_STARTUP_SECONDS = 15.0
# Relative to the model's change in a round. Keras's batch normalization rounds
# differently, and ReLU and pooling amplify this from the second step on.
_TOLERANCE = 1e-2


class Row(fed_avg_rounds.Row):
  """A kind of round, with its floor."""

  @property
  def max_bare_ratio(self) -> Optional[float]:
    """The largest ratio of in process to bare, if there is a floor."""
    return _MAX_BARE_RATIO.get(dataclasses.astuple(self))

  def max_peer_ratio(self, peer: str) -> Optional[float]:
    """The largest ratio of in process, with divided cores, to a peer."""
    return _MAX_PEER_RATIO[peer].get(dataclasses.astuple(self))

  @property
  def default_repeats(self) -> int:
    """The number of rounds to time: fewer if they take long."""
    if self.model == 'resnet20':
      return 5
    if self.num_clients >= 1000:
      return 3
    return 15 if self.num_clients <= 10 else 7


@dataclasses.dataclass(frozen=True)
class Memory:
  """Peak memory of a round in megabytes, by number of clients."""

  datasets: str
  peaks: Mapping[int, float]

  @property
  def ratio(self) -> float:
    """The peak with most clients divided by the peak with fewest."""
    return self.peaks[max(self.peaks)] / self.peaks[min(self.peaks)]


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    timings: The times of each row.
    divided: The times of each row with divided cores, without TFF's worker.
    memory: One entry for each kind of datasets.
    startup: Seconds until the end of the first round of `tff-bn-train`, one
      for each start.
  """

  machine: Sequence[str]
  timings: Mapping[Row, Timing]
  divided: Mapping[Row, Timing]
  memory: Sequence[Memory]
  startup: Sequence[float]


def _build_bare_round(
    problem: fed_avg_rounds.FedAvgRounds,
) -> Callable[[Sequence[Any]], Result]:
  """Returns a function that computes a round with plain TensorFlow."""
  import numpy as np
  import tensorflow as tf

  keras_model = problem.model.to_keras()
  loss_fn = problem.model.loss_fn()
  (accuracy,) = problem.model.metrics_fn()
  variables = keras_model.weights
  trainable = keras_model.trainable_weights

  @tf.function(reduce_retracing=True)
  def step(x, y):
    with tf.GradientTape() as tape:
      output = keras_model(x, training=True)
      loss = loss_fn(y, output)
    gradients = tape.gradient(loss, trainable)
    for variable, gradient in zip(trainable, gradients):
      variable.assign_sub(problem.row.learning_rate * gradient)
    accuracy.update_state(y, output)
    return loss

  def compute_round(clients):
    totals = [np.zeros_like(value) for value in problem.initial]
    total_examples, total_loss = 0, 0.0
    accuracy.reset_state()
    for batches in clients:
      for variable, value in zip(variables, problem.initial):
        variable.assign(value)
      num_examples = 0
      for x, y in batches:
        total_loss += float(step(x, y)) * len(y)
        num_examples += len(y)
      for total, variable in zip(totals, variables):
        total += num_examples * variable.numpy()
      total_examples += num_examples
    return Result(
        [total / total_examples for total in totals],
        [total_loss / total_examples, accuracy.result().numpy()],
    )

  return compute_round


def time_row(row: Row, repeats: int, divides_cores: bool = False) -> Timing:
  """Times rounds of all variants in turn.

  Args:
    row: The kind of round.
    repeats: The number of rounds to time after the first.
    divides_cores: Whether to divide the cores among the clients, and to leave
      out TFF's worker.

  Returns:
    The times.

  Raises:
    RuntimeError: If results differ.
  """
  import tensorflow_federated as tff

  from tff_bn import runtime

  if divides_cores:
    runtime.divide_cores(row.num_clients)
  problem = fed_avg_rounds.FedAvgRounds(row)
  get_data = {} if divides_cores else {NATIVE: problem.client_datasets}
  get_data |= {
      IN_PROCESS: problem.late_datasets,
      BARE: problem.client_arrays,
  }
  loops = {BARE: _build_bare_round(problem)}
  if pytorch_loop.is_installed():
    loops[PYTORCH] = pytorch_loop.build_round(problem)
    get_data[PYTORCH] = problem.client_arrays
  if jax_scan.is_installed() and row.model == jax_scan.MODEL:
    loops[JAX] = jax_scan.build_round(problem)
    get_data[JAX] = lambda round_num: jax_scan.stack(
        problem.client_arrays(round_num)
    )
  times = {way: [] for way in get_data}
  with contextlib.ExitStack() as stack:
    contexts = {IN_PROCESS: runtime.in_process_runtime()}
    if NATIVE in get_data:
      contexts[NATIVE] = runtime.native_runtime()
    contexts = {
        way: stack.enter_context(context) for way, context in contexts.items()
    }
    state = problem.process.initialize()
    for round_num in range(repeats + 1):
      results = {}
      for way in get_data:
        clients = get_data[way](round_num)
        # Collect the other variants' garbage before this one is timed.
        gc.collect()
        start = time.perf_counter()
        if way in loops:
          results[way] = loops[way](clients)
        else:
          tff.framework.set_default_context(contexts[way])
          results[way] = problem.compute(state, clients)
        times[way].append(time.perf_counter() - start)
      if PYTORCH in results:
        # Its weights have another layout, but its loss must be the same.
        results[PYTORCH] = Result(
            results[BARE].weights, results[PYTORCH].metrics
        )
      harness.check_results(row, results, BARE, problem.initial, _TOLERANCE)
  return Timing.of(times)


def peak_memory(row: Row, is_shared: bool) -> float:
  """Measures the peak memory of a round that is computed in process.

  Args:
    row: The kind of round.
    is_shared: Whether all clients have the same dataset. Otherwise each
      client's dataset is built when the client is computed.

  Returns:
    The peak memory of this process in megabytes.
  """
  from tff_bn import runtime

  problem = fed_avg_rounds.FedAvgRounds(row)
  client_ids = problem.data.client_ids
  if is_shared:
    datasets = [problem.client_dataset(client_ids[0], 0)] * len(client_ids)
  else:
    datasets = problem.late_datasets(0)
  with runtime.in_process_runtime():
    problem.compute(problem.process.initialize(), datasets)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # Linux counts in kilobytes, macOS in bytes.
  return peak / (1e6 if sys.platform == 'darwin' else 1e3)


def _startup_seconds() -> float:
  """Returns the seconds that `tff-bn-train` takes for its first round."""
  lines, seconds = [], None
  with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    program = subprocess.Popen(
        [
            sys.executable,
            '-m',
            'tff_bn.programs.train',
            '--dataset=digits',
            '--algorithm=fedavg',
            '--rounds=1',
            f'--output_dir={folder}',
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with program:
      for line in program.stdout:
        lines.append(line)
        if line.startswith('round 1/1'):
          seconds = time.perf_counter() - start
  if program.returncode or seconds is None:
    raise RuntimeError(
        f'tff-bn-train ended with exit code {program.returncode}:'
        f' {"".join(lines)}'
    )
  return seconds


def measure(
    rows: Sequence[Row],
    repeats: Optional[int],
    memory_clients: Sequence[int],
    starts: int,
) -> Measurements:
  """Takes all measurements, each in a new process.

  Args:
    rows: The rounds to time.
    repeats: The number of rounds to time; `None`: each row's default.
    memory_clients: The numbers of clients to compare the peak memory for.
    starts: The number of times to start `tff-bn-train`.

  Returns:
    The measurements.
  """
  timings = {}
  for row in rows:
    harness.progress(f'Timing {row} ...')
    timings[row] = harness.in_new_process(
        time_row, row, repeats or row.default_repeats
    )
  divided = {}
  for row in rows:
    harness.progress(f'Timing {row}, with divided cores ...')
    divided[row] = harness.in_new_process(
        time_row, row, repeats or row.default_repeats, True
    )
  memory = []
  if memory_clients:
    for datasets, is_shared in (
        ('one for each client, built when it is computed', False),
        ('one for all clients', True),
    ):
      harness.progress(f'Measuring memory; datasets: {datasets} ...')
      peaks = {
          number: harness.in_new_process(
              peak_memory, Row('small_cnn', number, 5, 32), is_shared
          )
          for number in memory_clients
      }
      memory.append(Memory(datasets, peaks))
  startup = []
  for number in range(starts):
    harness.progress(f'Starting tff-bn-train, {number + 1} of {starts} ...')
    startup.append(_startup_seconds())
  return Measurements(
      harness.in_new_process(
          harness.describe_machine,
          *(['torch'] if pytorch_loop.is_installed() else []),
          *(['jax'] if jax_scan.is_installed() else []),
      ),
      timings,
      divided,
      memory,
      startup,
  )


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: The measurements.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()
  lines = harness.head(
      'Cost of the in-process runtime', 'runtime', measurements.machine
  )
  if measurements.timings:
    lines += _time_lines(measurements.timings, floors)
  if measurements.divided:
    lines += _divided_lines(measurements.divided, floors)
  if measurements.memory:
    lines += _memory_lines(measurements.memory, floors)
  if measurements.startup:
    lines += _startup_lines(measurements.startup, floors)
  return '\n'.join(lines) + '\n', floors.are_met


def _all_ways(timings: Mapping[Row, Timing]) -> list[str]:
  """Returns the variants of all rows."""
  return list(dict.fromkeys(way for t in timings.values() for way in t.later))


def _time_lines(
    timings: Mapping[Row, Timing], floors: harness.Floors
) -> list[str]:
  rows, first_rows = [], []
  ways = _all_ways(timings)
  peers = [way for way in ways if way in PEERS]
  for row, timing in timings.items():
    bare_ratios = timing.ratios(IN_PROCESS, BARE)
    native_ratios = timing.ratios(IN_PROCESS, NATIVE)
    rows.append(
        [
            str(row),
            *timing.median_cells(ways),
            harness.spread(bare_ratios),
            *floors.ratio_cells(bare_ratios, row.max_bare_ratio),
            harness.spread(native_ratios),
            '< 1',
            floors.check(statistics.median(native_ratios) < 1),
            *(
                harness.spread(timing.ratios(IN_PROCESS, peer))
                for peer in peers
            ),
            str(len(bare_ratios)),
        ]
    )
    first_rows.append([str(row), *timing.first_cells(ways)])
  return [
      '',
      '## Seconds per round',
      '',
      "Federated averaging, clients × steps × batch size. TFF's native runtime,"
      ' in process, and a bare loop over the clients and their NumPy batches'
      ' take turns. The bare loop calls one `tf.function` for each step. JAX'
      ' computes a round in one compiled call, a scan over the clients and, in'
      ' it, their steps.'
      f" Their results agree (to {_TOLERANCE:g} of the model's change)."
      ' In process, the time includes the choice of the batches. Seconds are'
      ' medians. Ratios compare successive rounds; the table shows their median'
      ' and range.',
      '',
      *harness.table(
          [
              'Round',
              *ways,
              'in process / bare',
              'floor',
              'met',
              'in process / native',
              'floor',
              'met',
              *(f'in process / {peer}' for peer in peers),
              'rounds',
          ],
          rows,
      ),
      '',
      'The first round, including tracing and the start of the native'
      " runtime's worker process:",
      '',
      *harness.table(['Round', *ways], first_rows),
  ]


def _divided_lines(
    timings: Mapping[Row, Timing], floors: harness.Floors
) -> list[str]:
  rows = []
  ways = _all_ways(timings)
  peers = [way for way in ways if way in PEERS]
  for row, timing in timings.items():
    cells = [
        str(row),
        *timing.median_cells(ways),
        harness.spread(timing.ratios(IN_PROCESS, BARE)),
    ]
    for peer in peers:
      ratios = timing.ratios(IN_PROCESS, peer)
      cells += [
          harness.spread(ratios),
          *floors.ratio_cells(ratios, row.max_peer_ratio(peer)),
      ]
    rows.append(cells)
  return [
      '',
      '## Seconds per round with divided cores',
      '',
      'As above, but after `tff_bn.runtime.divide_cores`, which the programs'
      ' call: an operation of TensorFlow uses one core if there are as many'
      ' clients as cores. The bare loop computes one client after another, so'
      ' it uses one core, too.',
      '',
      *harness.table(
          [
              'Round',
              *ways,
              'in process / bare',
              *(
                  name
                  for peer in peers
                  for name in (f'in process / {peer}', 'floor', 'met')
              ),
          ],
          rows,
      ),
  ]


def _memory_lines(
    memory: Sequence[Memory], floors: harness.Floors
) -> list[str]:
  numbers = sorted(memory[0].peaks)
  return [
      '',
      '## Peak memory',
      '',
      'Peak memory in MB of a process that computes one round of small_cnn.',
      '',
      *harness.table(
          [
              'Datasets',
              *(f'{number} clients' for number in numbers),
              'ratio',
              'floor',
              'met',
          ],
          [
              [
                  entry.datasets,
                  *(f'{entry.peaks[number]:.0f}' for number in numbers),
                  f'{entry.ratio:.2f}',
                  f'≤ {_MAX_MEMORY_RATIO:.2f}',
                  floors.check(entry.ratio <= _MAX_MEMORY_RATIO),
              ]
              for entry in memory
          ],
      ),
  ]


def _startup_lines(
    startup: Sequence[float], floors: harness.Floors
) -> list[str]:
  return [
      '',
      '## Startup',
      '',
      'Seconds from the start of the interpreter to the end of the first round'
      ' of `tff-bn-train --dataset=digits --algorithm=fedavg`, with the'
      ' evaluations before and after it; median (and range).',
      '',
      *harness.table(
          ['seconds', 'floor', 'met'],
          [
              [
                  harness.spread(startup),
                  f'≤ {_MAX_STARTUP_SECONDS:g}',
                  floors.check(
                      statistics.median(startup) <= _MAX_STARTUP_SECONDS
                  ),
              ]
          ],
      ),
  ]


def _parse_numbers(texts: Sequence[str]) -> list[int]:
  texts = [text for text in texts if text]
  if len(set(texts)) not in (0, 2) or not all(
      text.isdecimal() and int(text) > 0 for text in texts
  ):
    raise ValueError(
        f'--memory_clients={",".join(texts)} must be two different numbers of'
        ' clients, or empty.'
    )
  return sorted(map(int, texts))


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  rows = [Row.parse(text) for text in _ROWS.value if text]
  memory_clients = _parse_numbers(_MEMORY_CLIENTS.value)
  return dict(
      rows=rows,
      repeats=_REPEATS.value,
      memory_clients=memory_clients,
      starts=_STARTS.value,
  )


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run('runtime', arguments, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
