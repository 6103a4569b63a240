"""Measures what robust aggregation costs.

Each rule aggregates random float32 matrices with one client in a row, as a
`tf.function` for any number of rows. It takes turns with NumPy's mean, median
and sort of the same matrix, and with the squared distances between all rows by
one matrix product, in NumPy and in TensorFlow. The result is compared with
NumPy's where there is one; if it differs, the program ends without a report.

The memory is by how much that of a new process rises when it aggregates for the
first time. (TensorFlow keeps what it has freed, so later times don't show it.)

The program also times whole aggregations of TFF, in process: all clients'
vectors are gathered, then aggregated. It writes a Markdown report and exits
with 1 if a floor is not met.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import pathlib
import statistics
import threading
import time
from typing import Any, Optional

from absl import app
from absl import flags
import harness

_CLIENTS = flags.DEFINE_list(
    'clients', ['10', '100', '1000'], 'Numbers of clients (rows).'
)
_MEMORY_CLIENTS = flags.DEFINE_list(
    'memory_clients',
    ['10', '100', '1000'],
    'Numbers of clients for which the memory of each rule is measured.',
)
_TFF_CLIENTS = flags.DEFINE_list(
    'tff_clients',
    ['10', '100'],
    'Numbers of clients of whole aggregations in TFF.',
)
_SIZE = flags.DEFINE_integer(
    'size',
    271_098,
    'How many numbers a client sends (columns). Default: as many as ResNet-20'
    ' has.',
    lower_bound=1,
)
_REPEATS = flags.DEFINE_integer(
    'repeats',
    None,
    'How often each rule is timed, after a first time. Default: the more, the'
    ' fewer clients there are.',
    lower_bound=1,
)
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir',
    str(pathlib.Path(__file__).resolve().parent / 'results'),
    'Folder for the report, aggregators.md.',
)

NUMPY_MEAN, NUMPY_MEDIAN, NUMPY_SORT, NUMPY_DISTANCES = NUMPY = (
    'NumPy mean',
    'NumPy median',
    'NumPy sort',
    'NumPy distances',
)
TF_DISTANCES = 'TensorFlow distances'
MEDIAN, TRIMMED_MEAN, NNM = 'CoordinateMedian', 'TrimmedMean', 'NNM'
# NNM with the mean of what it mixes: what it costs itself.
RULES = (
    'Mean',
    MEDIAN,
    TRIMMED_MEAN,
    'MeaMed',
    'GeometricMedian',
    'Krum',
    'MultiKrum',
    'CenteredClipping',
    NNM,
    'NNM + CoordinateMedian',
    'Bucketing + CoordinateMedian',
)
TFF_RULES = ('Mean', MEDIAN, TRIMMED_MEAN, NNM, 'NNM + CoordinateMedian')

# With 100 clients, how much longer a rule may take than something else.
_FLOOR_CLIENTS = 100
_FLOORS = {
    (MEDIAN, NUMPY_MEDIAN): 1.5,
    (TRIMMED_MEAN, NUMPY_SORT): 1.5,
    (NNM, NUMPY_DISTANCES): 2.0,
}
_COMPARISONS = (*_FLOORS, (NNM, TF_DISTANCES))
# Of NumPy's result, in float32.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Measurements:
  """All that is reported.

  Attributes:
    machine: Lines about the machine and versions.
    size: The number of columns.
    seconds: By number of clients and way, the seconds of each time.
    megabytes: By number of clients and rule, the memory beyond the matrix, in
      2^20 bytes.
    tff: By number of clients and rule, the seconds of whole aggregations.
  """

  machine: Sequence[str]
  size: int
  seconds: Mapping[int, Mapping[str, Sequence[float]]]
  megabytes: Mapping[int, Mapping[str, float]]
  tff: Mapping[int, Mapping[str, Sequence[float]]]


def num_byzantine(num_clients: int) -> int:
  """How many attackers are tolerated: a fifth."""
  return num_clients // 5


def build_rule(name: str, num_clients: int) -> Any:
  """Makes a rule for a number of clients."""
  from tff_bn import aggregators  # pylint: disable=g-import-not-at-top

  f = num_byzantine(num_clients)
  known = dict(num_clients=num_clients)
  median = aggregators.CoordinateMedian(f, **known)
  build = {
      'Mean': aggregators.Mean,
      MEDIAN: lambda: median,
      TRIMMED_MEAN: lambda: aggregators.TrimmedMean(f, **known),
      'MeaMed': lambda: aggregators.MeaMed(f, **known),
      'GeometricMedian': lambda: aggregators.GeometricMedian(f, **known),
      'Krum': lambda: aggregators.Krum(f, **known),
      'MultiKrum': lambda: aggregators.MultiKrum(f, **known),
      'CenteredClipping': lambda: aggregators.CenteredClipping(
          1.0, num_byzantine=f, **known
      ),
      NNM: lambda: aggregators.NearestNeighborMixing(
          aggregators.Mean(), f, **known
      ),
      'NNM + CoordinateMedian': lambda: aggregators.NearestNeighborMixing(
          median, f, **known
      ),
      'Bucketing + CoordinateMedian': lambda: aggregators.Bucketing(
          aggregators.CoordinateMedian(f, num_clients=-(-num_clients // 2)),
          2,
          **known,
      ),
  }
  return build[name]()


def random_matrix(num_clients: int, size: int) -> Any:
  """The clients' values: normal, float32."""
  import numpy as np  # pylint: disable=g-import-not-at-top

  rng = np.random.default_rng([num_clients, size])
  return rng.standard_normal((num_clients, size), np.float32)


def build_function(
    name: str, num_clients: int, size: int
) -> Callable[..., Any]:
  """A rule as a `tf.function` of a matrix."""
  import tensorflow as tf  # pylint: disable=g-import-not-at-top

  rule = build_rule(name, num_clients)

  @tf.function(input_signature=[tf.TensorSpec([None, size], tf.float32)])
  def aggregate(values):
    state = rule.initial_state(size, tf.float32)
    return rule.aggregate(values, tf.constant(0), state)[0]

  return aggregate.get_concrete_function()


def numpy_ways(values: Any) -> dict[str, Callable[[], Any]]:
  """What the rules are compared with."""
  import numpy as np  # pylint: disable=g-import-not-at-top

  def distances():
    lengths = np.einsum('ij,ij->i', values, values)
    return lengths[:, np.newaxis] + lengths - 2 * (values @ values.T)

  return {
      NUMPY_MEAN: lambda: np.mean(values, axis=0),
      NUMPY_MEDIAN: lambda: np.median(values, axis=0),
      NUMPY_SORT: lambda: np.sort(values, axis=0),
      NUMPY_DISTANCES: distances,
  }


def check_results(
    num_clients: int, results: Mapping[str, Any], values: Any
) -> None:
  """Checks rules against NumPy.

  Args:
    num_clients: The number of clients.
    results: By rule.
    values: What was aggregated.

  Raises:
    RuntimeError: If a result differs.
  """
  import numpy as np  # pylint: disable=g-import-not-at-top

  f = num_byzantine(num_clients)
  ordered = np.sort(values, axis=0)
  expected = {
      'Mean': values.mean(axis=0),
      MEDIAN: np.median(values, axis=0),
      TRIMMED_MEAN: ordered[f : num_clients - f].mean(axis=0),
  }
  for name, right in expected.items():
    error = np.abs(results[name] - right).max()
    # Not `>`: an error that is not a number is one.
    if not error <= _TOLERANCE:
      raise RuntimeError(
          f'{name} of {num_clients} clients differs from NumPy by {error:.1e};'
          f' at most {_TOLERANCE} is allowed.'
      )


def time_matrix(
    num_clients: int, size: int, repeats: int
) -> dict[str, list[float]]:
  """Times all ways to aggregate a matrix; they take turns.

  Args:
    num_clients: The number of rows.
    size: The number of columns.
    repeats: How often to time each.

  Returns:
    The seconds by way.

  Raises:
    RuntimeError: If a result differs from NumPy's.
  """
  import tensorflow as tf  # pylint: disable=g-import-not-at-top

  values = random_matrix(num_clients, size)
  tensor = tf.constant(values)

  @tf.function(input_signature=[tf.TensorSpec([None, size], tf.float32)])
  def tf_distances(x):
    lengths = tf.reduce_sum(tf.math.square(x), axis=1)
    products = tf.matmul(x, x, transpose_b=True)
    return lengths[:, tf.newaxis] + lengths - 2 * products

  functions = {name: build_function(name, num_clients, size) for name in RULES}
  functions[TF_DISTANCES] = tf_distances
  ways = numpy_ways(values)
  for name, function in functions.items():
    function(tensor[:0])  # What is only done once.
    ways[name] = lambda function=function: function(tensor).numpy()
  seconds = {name: [] for name in ways}
  results = {}
  for _ in range(repeats):
    for name, way in ways.items():
      start = time.perf_counter()
      results[name] = way()
      seconds[name].append(time.perf_counter() - start)
  check_results(num_clients, results, values)
  return seconds


def memory_of_rule(name: str, num_clients: int, size: int) -> float:
  """By how much this process's memory rises when a rule is applied.

  Args:
    name: The rule.
    num_clients: The number of rows.
    size: The number of columns.

  Returns:
    The peak while a matrix is aggregated, above the memory before, in 2^20
    bytes.
  """
  import tensorflow as tf  # pylint: disable=g-import-not-at-top

  function = build_function(name, num_clients, size)
  tensor = tf.constant(random_matrix(num_clients, size))
  function(tensor[:0])  # What TensorFlow needs for its first call is not meant.
  return rise_of_memory(lambda: function(tensor).numpy())


def rise_of_memory(function: Callable[[], Any]) -> float:
  """By how much this process's memory rises during a call, in 2^20 bytes."""
  import psutil  # pylint: disable=g-import-not-at-top

  process = psutil.Process()
  sizes = [process.memory_info().rss]
  is_done = threading.Event()

  def watch():
    while not is_done.wait(0.001):
      sizes.append(process.memory_info().rss)

  watcher = threading.Thread(target=watch)
  watcher.start()
  result = function()
  is_done.set()
  watcher.join()
  sizes.append(process.memory_info().rss)
  del result
  return (max(sizes) - sizes[0]) / 2**20


def time_tff(
    name: str, num_clients: int, size: int, repeats: int
) -> list[float]:
  """Times whole aggregations in process, the first one left out.

  Args:
    name: The rule.
    num_clients: The number of clients.
    size: How many numbers each of them sends.
    repeats: How many rounds to time.

  Returns:
    The seconds of each round.
  """
  # pylint: disable=g-import-not-at-top
  import numpy as np
  import tensorflow_federated as tff

  from tff_bn import runtime

  # pylint: enable=g-import-not-at-top
  values = list(random_matrix(num_clients, size))
  process = build_rule(name, num_clients).create(
      tff.TensorType(np.float32, [size])
  )
  with runtime.in_process_runtime():
    state = process.next(process.initialize(), values).state
    seconds = []
    for _ in range(repeats):
      start = time.perf_counter()
      state = process.next(state, values).state
      seconds.append(time.perf_counter() - start)
  return seconds


def default_repeats(num_clients: int) -> int:
  """How often rules are timed: less often where they take long."""
  return 15 if num_clients <= 10 else 7 if num_clients <= 100 else 1


def measure(
    clients: Sequence[int],
    memory_clients: Sequence[int],
    tff_clients: Sequence[int],
    size: int,
    repeats: Optional[int],
) -> Measurements:
  """Measures all that is reported.

  Args:
    clients: The numbers of rows of the matrices to time.
    memory_clients: The same for those whose memory is measured.
    tff_clients: The numbers of clients of whole aggregations.
    size: The number of columns.
    repeats: How often to time each rule; if None, as `default_repeats`.

  Returns:
    The measurements.
  """
  seconds, megabytes, whole = {}, {}, {}
  for number in clients:
    harness.progress(f'matrices with {number} rows')
    # What TensorFlow keeps of larger matrices would be there for smaller ones.
    seconds[number] = harness.in_new_process(
        time_matrix, number, size, repeats or default_repeats(number)
    )
  for number in memory_clients:
    harness.progress(f'memory of matrices with {number} rows')
    megabytes[number] = {
        name: harness.in_new_process(memory_of_rule, name, number, size)
        for name in RULES
    }
  for number in tff_clients:
    harness.progress(f'aggregations of {number} clients')
    whole[number] = {
        name: time_tff(name, number, size, repeats or default_repeats(number))
        for name in TFF_RULES
    }
  return Measurements(
      harness.describe_machine(), size, seconds, megabytes, whole
  )


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: What was measured.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()
  ways = (*NUMPY, TF_DISTANCES, *RULES)
  ratio_rows = []
  for number, seconds in measurements.seconds.items():
    for name, reference in _COMPARISONS:
      ratios = [a / b for a, b in zip(seconds[name], seconds[reference])]
      limit = _FLOORS.get((name, reference))
      cells = ['–', '–']
      if number == _FLOOR_CLIENTS and limit is not None:
        is_met = statistics.median(ratios) <= limit
        cells = [f'≤ {limit:.2f}', floors.check(is_met)]
      ratio_rows.append(
          [str(number), f'{name} / {reference}', harness.spread(ratios), *cells]
      )
  lines = [
      *harness.head(
          'What robust aggregation costs', 'aggregators', measurements.machine
      ),
      '',
      f'Random float32 matrices with one client in a row and'
      f' {measurements.size:,} columns. A fifth of the clients are tolerated as'
      ' attackers. NNM alone is with the mean of what it mixes. Buckets have 2'
      ' clients. NumPy distances are the squared distances between all rows, by'
      ' one matrix product; NumPy uses one core, but for that product.',
      '',
      '## Seconds',
      '',
      'Medians; times of ways that take turns.',
      '',
      *harness.table(
          ['', *(f'{number} clients' for number in measurements.seconds)],
          [
              [
                  way,
                  *(
                      f'{statistics.median(seconds[way]):.4f}'
                      for seconds in measurements.seconds.values()
                  ),
              ]
              for way in ways
          ],
      ),
      '',
      'How much longer one takes than the other: medians (and ranges) of the'
      ' ratios of times that followed one another.',
      '',
      *harness.table(
          ['clients', 'ratio', 'median (range)', 'floor', 'met'], ratio_rows
      ),
      '',
      '## Memory',
      '',
      'By how much the memory of a new process rises when it aggregates, in MB'
      ' of 2^20 bytes, above the matrix itself.',
      '',
      *harness.table(
          ['', *(f'{number} clients' for number in measurements.megabytes)],
          [
              [
                  'the matrix',
                  *(
                      f'{4 * number * measurements.size / 2**20:.0f}'
                      for number in measurements.megabytes
                  ),
              ],
              *(
                  [
                      name,
                      *(
                          f'{m[name]:.0f}'
                          for m in measurements.megabytes.values()
                      ),
                  ]
                  for name in RULES
              ),
          ],
      ),
      '',
      '## Whole aggregations',
      '',
      'Seconds of a round of TFF in process: the clients send one vector each;'
      ' they are gathered and aggregated. Medians.',
      '',
      *harness.table(
          ['', *(f'{number} clients' for number in measurements.tff)],
          [
              [
                  name,
                  *(
                      f'{statistics.median(seconds[name]):.4f}'
                      for seconds in measurements.tff.values()
                  ),
              ]
              for name in TFF_RULES
          ],
      ),
  ]
  return '\n'.join(lines) + '\n', floors.are_met


def _numbers(flag: str, texts: Sequence[str]) -> list[int]:
  texts = [text for text in texts if text]
  for text in texts:
    if not text.isdecimal() or int(text) < 3:
      raise ValueError(
          f'--{flag}: {text!r} is not understood; write numbers of clients of'
          ' at least 3, like 10,100.'
      )
  return [int(text) for text in texts]


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  return dict(
      clients=_numbers('clients', _CLIENTS.value),
      memory_clients=_numbers('memory_clients', _MEMORY_CLIENTS.value),
      tff_clients=_numbers('tff_clients', _TFF_CLIENTS.value),
      size=_SIZE.value,
      repeats=_REPEATS.value,
  )


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run(
      'aggregators', arguments, _OUTPUT_DIR.value, _parse_flags, measure, report
  )


if __name__ == '__main__':
  app.run(main)
