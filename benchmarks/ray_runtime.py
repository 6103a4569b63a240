"""Measures the cost of computing clients on the workers of a Ray cluster.

The program measures three things on one machine:

*   Rounds of federated averaging with two workers of one core each, compared
    with the in-process runtime on the same two cores. The variants take turns.
    If results differ in any bit, the program ends without a report.
*   The overhead of a round and of a client: clients that only add a number to
    the server's state, with 1 to 16 workers. The floor is bare Ray, actors that
    do the same without TensorFlow and without code of this project.
*   The time to start the runtime.

From these figures the report estimates the overhead with a hundred machines. It
is written in Markdown; the program exits with 1 if a floor is not met.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import gc
import os
import statistics
import time
from typing import Any

from absl import app
from absl import flags
import fed_avg_rounds
from fed_avg_rounds import Row
import harness
from harness import Timing

flags.adopt_module_key_flags(harness)

_ROWS = flags.DEFINE_list(
    'rows',
    [
        'small_cnn:10x5x32',
        'small_cnn:100x5x32',
        'small_cnn:300x1x2',
        'resnet20:5x1x128',
        'resnet20:5x5x128',
    ],
    'Rounds to time, each as MODEL:CLIENTSxSTEPSxBATCH; the models are'
    ' small_cnn (on digits of 8x8 pixels) and resnet20 (on random images of'
    ' 32x32x3).',
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 7, 'Number of rounds to time after the first one.', lower_bound=1
)
_WORKERS = flags.DEFINE_list(
    'workers',
    ['1', '2', '4', '8', '16'],
    'Numbers of workers to measure the overhead with; empty: none.',
)
_CLIENTS = flags.DEFINE_integer(
    'clients',
    200,
    'Number of clients in the rounds that measure the overhead.',
    lower_bound=2,
)

IN_PROCESS, RAY = WAYS = ('in process', 'ray')
OURS, BARE = ('ours', 'bare Ray')

_NUM_CORES = 2
# Largest ratio of Ray to in process.
_MAX_RATIOS = {'resnet20:5x1x128': 1.2}
# Numbers of float32 values in the server's state and in a client's result.
_STATE_SIZES = (10, 250_000)
# Calls in flight per actor of bare Ray, as in `ray_clients`.
_CALLS_PER_WORKER = 2

_NUM_MACHINES = 100
_NETWORK_BYTES_PER_SECOND = 1.25e9  # 10 Gbit/s


@dataclasses.dataclass(frozen=True)
class Overhead:
  """The overhead of clients that compute next to nothing.

  Attributes:
    num_workers: The number of workers.
    state_size: The number of values in the state.
    round_seconds: The time of a round of one client, by variant.
    client_seconds: The time for each further client, by variant.
    program_seconds: The CPU time of the program's process for each further
      client, by variant.
  """

  num_workers: int
  state_size: int
  round_seconds: Mapping[str, float]
  client_seconds: Mapping[str, float]
  program_seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    timings: The times of each row.
    start_seconds: The time to start the runtime, by number of workers.
    overheads: For each number of workers and size of the state.
  """

  machine: Sequence[str]
  timings: Mapping[Row, Timing]
  start_seconds: Mapping[int, float]
  overheads: Sequence[Overhead]


def time_row(row: Row, repeats: int) -> Timing:
  """Times rounds of both variants in turn.

  Args:
    row: The kind of round.
    repeats: The number of rounds to time after the first.

  Returns:
    The times.

  Raises:
    RuntimeError: If results differ in any bit.
  """
  _use_few_cores()
  import tensorflow_federated as tff

  from tff_bn import runtime

  problem = fed_avg_rounds.FedAvgRounds(row)
  times = {way: [] for way in WAYS}
  with contextlib.ExitStack() as stack:
    contexts = {
        RAY: stack.enter_context(
            runtime.ray_runtime(
                'local', num_workers=_NUM_CORES, cpus_per_worker=1
            )
        ),
        IN_PROCESS: stack.enter_context(runtime.in_process_runtime()),
    }
    state = problem.process.initialize()
    for round_num in range(repeats + 1):
      results = {}
      for way in WAYS:
        datasets = problem.late_datasets(round_num)
        # Collect the other variant's garbage before this one is timed.
        gc.collect()
        tff.framework.set_default_context(contexts[way])
        start = time.perf_counter()
        results[way] = problem.compute(state, datasets)
        times[way].append(time.perf_counter() - start)
      check_same_bits(row, results)
  return Timing.of(times)


def check_same_bits(row: Row, results: Mapping[str, harness.Result]) -> None:
  """Checks that the results of a round are equal to the bit.

  Args:
    row: The kind of round.
    results: The result of each variant.

  Raises:
    RuntimeError: If they differ.
  """
  bits = {
      (tuple(w.tobytes() for w in result.weights), *map(str, result.metrics))
      for result in results.values()
  }
  if len(bits) > 1:
    raise RuntimeError(f'{row}: the results of {" and ".join(results)} differ.')


def _use_few_cores() -> None:
  """Restricts this process and its children to two cores."""
  cores = sorted(os.sched_getaffinity(0))[:_NUM_CORES]
  os.sched_setaffinity(0, cores)


def measure_overheads(
    num_workers: int, num_clients: int, repeats: int
) -> tuple[float, list[Overhead]]:
  """Measures the overhead of workers.

  Args:
    num_workers: The number of workers.
    num_clients: The number of clients in a large round, which is compared with
      a round of one client.
    repeats: The number of rounds to time.

  Returns:
    The seconds to start the runtime, and the overheads.
  """
  import numpy as np

  from tff_bn import runtime

  start = time.perf_counter()
  with runtime.ray_runtime('local', num_workers=num_workers, cpus_per_worker=1):
    start_seconds = time.perf_counter() - start
    found = []
    for size in _STATE_SIZES:
      state = np.ones(size, np.float32)
      ways = {OURS: _our_round(size), BARE: _bare_round(num_workers)}
      seconds, program_seconds = _time_rounds(ways, state, num_clients, repeats)
      found.append(
          Overhead(
              num_workers,
              size,
              {way: seconds[way, 1] for way in ways},
              _per_further_client(seconds, ways, num_clients),
              _per_further_client(program_seconds, ways, num_clients),
          )
      )
  return start_seconds, found


def _per_further_client(
    seconds: Mapping[tuple[str, int], float],
    ways: Iterable[str],
    num_clients: int,
) -> dict[str, float]:
  """Returns the time for each client after the first one, by variant."""
  return {
      way: (seconds[way, num_clients] - seconds[way, 1]) / (num_clients - 1)
      for way in ways
  }


def _time_rounds(
    ways: Mapping[str, Callable[[Any, Sequence[float]], Any]],
    state: Any,
    num_clients: int,
    repeats: int,
) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
  """Returns median seconds, and median CPU times of the program."""
  seconds, program_seconds = {}, {}
  for number in (1, num_clients):
    values = [float(client) for client in range(number)]
    expected = state * number + sum(values)
    times = {way: [] for way in ways}
    # The first round is not counted, because each worker traces in it.
    for repeat in range(-1, repeats):
      for way, compute in ways.items():
        gc.collect()
        start, program_start = time.perf_counter(), time.process_time()
        result = compute(state, values)
        taken = time.perf_counter() - start, time.process_time() - program_start
        if not (result == expected).all():
          raise RuntimeError(f'{way}: the sum of {number} clients is wrong.')
        if repeat >= 0:
          times[way].append(taken)
    for way, taken in times.items():
      seconds[way, number], program_seconds[way, number] = map(
          statistics.median, zip(*taken)
      )
  return seconds, program_seconds


def _our_round(size: int) -> Callable[[Any, Sequence[float]], Any]:
  """Returns a TFF round that sums state + value over the clients."""
  import numpy as np
  import tensorflow_federated as tff

  state_type = tff.TensorType(np.float32, [size])

  @tff.tensorflow.computation(state_type, np.float32)
  def add(state, value):
    return state + value

  @tff.federated_computation(
      tff.FederatedType(state_type, tff.SERVER),
      tff.FederatedType(np.float32, tff.CLIENTS),
  )
  def compute_round(state, values):
    at_clients = tff.federated_broadcast(state)
    return tff.federated_sum(tff.federated_map(add, (at_clients, values)))

  return compute_round


def _bare_round(num_workers: int) -> Callable[[Any, Sequence[float]], Any]:
  """Returns the same round written with Ray only."""
  import ray

  # Sent to the actors by value, because it is defined in a function.
  class Adder:

    def add(self, state, value):
      return state + state.dtype.type(value)

  actor_class = ray.remote(num_cpus=0)(Adder)
  actors = [actor_class.remote() for _ in range(num_workers)]

  def compute_round(state, values):
    reference = ray.put(state)
    waiting, total = [], 0
    for number, value in enumerate(values):
      if len(waiting) == num_workers * _CALLS_PER_WORKER:
        total = total + ray.get(waiting.pop(0))
      waiting.append(actors[number % num_workers].add.remote(reference, value))
    for result in waiting:
      total = total + ray.get(result)
    return total

  return compute_round


def measure(
    rows: Sequence[Row],
    repeats: int,
    numbers_of_workers: Sequence[int],
    num_clients: int,
) -> Measurements:
  """Takes all measurements, each in a new process.

  Args:
    rows: The rounds to time.
    repeats: The number of rounds to time.
    numbers_of_workers: The numbers of workers to measure overheads with.
    num_clients: The number of clients to measure overheads with.

  Returns:
    The measurements.
  """
  timings = {}
  for row in rows:
    harness.progress(f'Timing {row} ...')
    timings[row] = harness.in_new_process(time_row, row, repeats)
  start_seconds, overheads = {}, []
  for number in numbers_of_workers:
    harness.progress(f'Measuring overheads with {number} workers ...')
    start_seconds[number], found = harness.in_new_process(
        measure_overheads, number, num_clients, repeats
    )
    overheads += found
  return Measurements(
      harness.in_new_process(harness.describe_machine, 'ray'),
      timings,
      start_seconds,
      overheads,
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
      'Cost of clients on Ray', 'ray_runtime', measurements.machine
  )
  if measurements.timings:
    lines += _time_lines(measurements.timings, floors)
  if measurements.overheads:
    lines += _overhead_lines(measurements)
    lines += _paper_lines(measurements.overheads)
  return '\n'.join(lines) + '\n', floors.are_met


def _time_lines(
    timings: Mapping[Row, Timing], floors: harness.Floors
) -> list[str]:
  rows, first_rows = [], []
  limits = {Row.parse(text): limit for text, limit in _MAX_RATIOS.items()}
  for row, timing in timings.items():
    ratios = timing.ratios(RAY, IN_PROCESS)
    rows.append(
        [
            str(row),
            *timing.median_cells(WAYS),
            harness.spread(ratios),
            *floors.ratio_cells(ratios, limits.get(row)),
            str(len(ratios)),
        ]
    )
    first_rows.append([str(row), *timing.first_cells(WAYS)])
  return [
      '',
      '## Seconds per round',
      '',
      'Federated averaging, clients × steps × batch size, in process with two'
      ' cores and on two workers of one core each. The results are equal to the'
      ' bit. Seconds are medians. Ratios compare successive rounds; the table'
      ' shows their median and range.',
      '',
      *harness.table(
          ['Round', *WAYS, 'ray / in process', 'floor', 'met', 'rounds'], rows
      ),
      '',
      'The first round, in which each worker traces:',
      '',
      *harness.table(['Round', *WAYS], first_rows),
  ]


def _kilobytes(overhead: Overhead) -> str:
  return f'{4 * overhead.state_size / 1000:g} kB'


def _milliseconds(seconds: float) -> str:
  return f'{1000 * seconds:.2f}'


def _overhead_lines(measurements: Measurements) -> list[str]:
  rows = []
  for found in measurements.overheads:
    rows.append([str(found.num_workers), _kilobytes(found)])
    for values in (
        found.round_seconds,
        found.client_seconds,
        found.program_seconds,
    ):
      rows[-1] += [_milliseconds(values[way]) for way in (OURS, BARE)]
  starts = [
      [str(number), f'{seconds:.1f}']
      for number, seconds in measurements.start_seconds.items()
  ]
  return [
      '',
      '## Overhead',
      '',
      "Clients add a number to the server's state, and the server sums their"
      ' results. All workers share the cores of this machine. Medians in'
      ' milliseconds: a round of one client; each further client; the CPU time'
      " of the program's process for each further client.",
      '',
      *harness.table(
          [
              'Workers',
              'State',
              *(f'round, {way}' for way in (OURS, BARE)),
              *(f'client, {way}' for way in (OURS, BARE)),
              *(f'program, {way}' for way in (OURS, BARE)),
          ],
          rows,
      ),
      '',
      'Seconds to start the cluster and the workers, including the import of'
      ' TensorFlow:',
      '',
      *harness.table(['Workers', 'seconds'], starts),
  ]


def _paper_lines(overheads: Sequence[Overhead]) -> list[str]:
  most = max(found.num_workers for found in overheads)
  rows = []
  for found in overheads:
    if found.num_workers != most:
      continue
    size = 4 * found.state_size
    program = found.program_seconds[OURS]
    network = size / _NETWORK_BYTES_PER_SECOND
    client = max(program, network)
    rows.append(
        [
            _kilobytes(found),
            f'{1 / client:.0f}',
            f'{_NUM_MACHINES * client:.2f}',
            _milliseconds(_NUM_MACHINES * network),
            f'{1000 * client:.1f}',
        ]
    )
  return [
      '',
      f'## Estimate for {_NUM_MACHINES} machines',
      '',
      'Estimated, not measured. The program assigns every client to a machine'
      ' and adds its result. Its CPU time per client (above, with the most'
      ' workers) and its network (10 Gbit/s) limit the number of clients per'
      ' second. Machines with one worker each wait for the program only if a'
      ' client takes less than the time in the third column. The state is sent'
      ' to each machine once a round.',
      '',
      *harness.table(
          [
              'State',
              'clients per second',
              'seconds per client that keep all machines busy',
              'milliseconds to send the state',
              'CPU seconds of the program for a round of 1,000 clients',
          ],
          rows,
      ),
  ]


def _parse_workers(texts: Sequence[str]) -> list[int]:
  texts = [text for text in texts if text]
  if not all(text.isdecimal() and int(text) > 0 for text in texts):
    raise ValueError(
        f'--workers={",".join(texts)} must be numbers from 1, or empty.'
    )
  return sorted(set(map(int, texts)))


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  return dict(
      rows=[Row.parse(text) for text in _ROWS.value if text],
      repeats=_REPEATS.value,
      numbers_of_workers=_parse_workers(_WORKERS.value),
      num_clients=_CLIENTS.value,
  )


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run('ray_runtime', arguments, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
