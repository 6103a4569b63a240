"""Measures the time and memory of robust aggregation.

Each rule aggregates a random float32 matrix with one row per client, in a graph
for any number of rows, imported as the in-process runtime does. It takes turns
with NumPy's mean, median and sort of the same matrix, and with the squared
distances between all rows, computed by one matrix product in NumPy and in
TensorFlow. If a result differs from NumPy's, the program ends without a report.
Rules that sort also aggregate small vectors, for which the overhead of
TensorFlow operations counts more.

If ByzFL is installed (`pip install byzfl torch`), its rules take turns, too, of
a NumPy array and of a PyTorch tensor. The faster of the two is compared.

The memory of a rule is the increase of a new process's memory during its first
aggregation. (TensorFlow keeps freed memory, so later aggregations show none.)

The program also times whole TFF aggregations in process, which gather all
clients' vectors and aggregate them. It writes a Markdown report and exits with
1 if a floor is not met.
"""

from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import importlib.util
import statistics
import threading
import time
from typing import Any, Optional

from absl import app
from absl import flags
import harness

flags.adopt_module_key_flags(harness)

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
    "Length of a client's vector (columns). Default: the number of"
    ' parameters of ResNet-20.',
    lower_bound=1,
)
_SMALL_SIZE = flags.DEFINE_integer(
    'small_size',
    10_000,
    'Length of the small vectors that rules that sort aggregate as well.',
    lower_bound=1,
)
_REPEATS = flags.DEFINE_integer(
    'repeats',
    None,
    'Number of times to time each rule. Default: depends on the number of'
    ' clients.',
    lower_bound=1,
)

NUMPY_MEAN, NUMPY_MEDIAN, NUMPY_SORT, NUMPY_DISTANCES = NUMPY = (
    'NumPy mean',
    'NumPy median',
    'NumPy sort',
    'NumPy distances',
)
TF_DISTANCES = 'TensorFlow distances'
MEDIAN, TRIMMED_MEAN, NNM = 'CoordinateMedian', 'TrimmedMean', 'NNM'
# Steps are followed by the mean, which shows the cost of the step alone.
RULES = (
    'Mean',
    MEDIAN,
    TRIMMED_MEAN,
    'MeaMed',
    'GeometricMedian',
    'Krum',
    'MultiKrum',
    'CenteredClipping',
    'MDA',
    'MoNNA',
    'CAF',
    'SMEA',
    'Bulyan',
    'Clipping',
    'ARC',
    NNM,
    'NNM + CoordinateMedian',
    'Bucketing + CoordinateMedian',
)
SORTING_RULES = (MEDIAN, TRIMMED_MEAN, 'MeaMed')
NUMPY_FORM, TORCH_FORM = FORMS = ('NumPy', 'PyTorch')
# ByzFL has no Bulyan.
_WITHOUT_PEER = ('Bulyan',)
# Rules that compare sets of clients, in ByzFL all of them.
_SET_RULES = ('MDA', 'SMEA')
# For more clients, only the faster form of ByzFL's rules is measured: SciPy's
# distances and PyTorch's order statistics would take minutes.
_MOST_CLIENTS_OF_ALL_FORMS = 10
_DISTANCE_RULES = (
    *('Krum', 'MultiKrum', 'MDA'),
    *(NNM, 'NNM + CoordinateMedian'),
)
_ORDER_RULES = (*SORTING_RULES, 'Bucketing + CoordinateMedian')
# The mean is no robust rule.
_PEER_LIMITS = {name: 1.0 for name in RULES if name != 'Mean'}
TFF_RULES = ('Mean', MEDIAN, TRIMMED_MEAN, NNM, 'NNM + CoordinateMedian')

# Largest ratio of a rule's time to a reference's time.
_FLOORS = {
    (MEDIAN, NUMPY_MEDIAN): 1.0,
    (MEDIAN, NUMPY_SORT): 1.0,
    (TRIMMED_MEAN, NUMPY_SORT): 1.0,
}
# With 100 clients.
_FLOOR_CLIENTS = 100
_DISTANCE_FLOOR = 2.0
_DISTANCE_COMPARISONS = ((NNM, NUMPY_DISTANCES), (NNM, TF_DISTANCES))
_SMALL_REPEATS = 15
# Absolute, in float32.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    size: The number of columns.
    seconds: The measured seconds, by number of clients and variant.
    megabytes: The memory in addition to the matrix, in 2^20 bytes, by number of
      clients and rule.
    small_size: The number of columns of small vectors.
    small_seconds: The measured seconds for small vectors.
    tff: The seconds of whole aggregations, by number of clients and rule.
      ByzFL's rules, if it is installed, are named by `peer`.
  """

  machine: Sequence[str]
  size: int
  seconds: Mapping[int, Mapping[str, Sequence[float]]]
  megabytes: Mapping[int, Mapping[str, float]]
  small_size: int
  small_seconds: Mapping[int, Mapping[str, Sequence[float]]]
  tff: Mapping[int, Mapping[str, Sequence[float]]]


def num_byzantine(num_clients: int, name: Optional[str] = None) -> int:
  """Returns the number of tolerated attackers.

  Args:
    num_clients: The number of clients.
    name: The rule.

  Returns:
    A fifth of the clients; for Bulyan, at most as many as it can tolerate. For
    rules that compare sets of clients, this is at most 1 if there are more than
    20 clients, and 0 if there are more than 200.
  """
  if name == 'Bulyan':
    return min(num_clients // 5, (num_clients - 3) // 4)
  if name in _SET_RULES and num_clients > 20:
    return 1 if num_clients <= 200 else 0
  return num_clients // 5


def build_rule(name: str, num_clients: int) -> Any:
  """Returns a rule for a number of clients."""
  from tff_bn import aggregators

  f = num_byzantine(num_clients, name)
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
      'MDA': lambda: aggregators.MinimumDiameterAveraging(f, **known),
      'MoNNA': lambda: aggregators.NearestNeighborAveraging(f, **known),
      'CAF': lambda: aggregators.CovarianceBoundAgnosticFilter(f, **known),
      'SMEA': lambda: aggregators.SmallestMaximumEigenvalueAveraging(
          f, **known
      ),
      'Bulyan': lambda: aggregators.Bulyan(f, **known),
      'Clipping': lambda: aggregators.StaticClipping(
          aggregators.Mean(), 2.0, **known
      ),
      'ARC': lambda: aggregators.AdaptiveRobustClipping(
          aggregators.Mean(), f, **known
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


def peer(name: str, form: str) -> str:
  """Returns the name of ByzFL's rule that computes the same as a rule."""
  return f'ByzFL {name}, {form}'


def is_byzfl_installed() -> bool:
  """Returns whether ByzFL's rules can be measured."""
  return all(importlib.util.find_spec(name) for name in ('byzfl', 'torch'))


def peer_forms(name: str, num_clients: int, size: int) -> list[str]:
  """Returns the forms of ByzFL's rule to measure; none without ByzFL."""
  import psutil

  if not is_byzfl_installed() or name in _WITHOUT_PEER:
    return []
  forms = list(FORMS)
  if num_clients > _MOST_CLIENTS_OF_ALL_FORMS:
    if name in _DISTANCE_RULES:
      forms.remove(NUMPY_FORM)
    if name in _ORDER_RULES:
      forms.remove(TORCH_FORM)
  if name.startswith(NNM):
    # ByzFL copies the neighbours of each row.
    num_near = num_clients - num_byzantine(num_clients)
    if 4 * num_clients * num_near * size > psutil.virtual_memory().total / 2:
      forms = []
  return forms


def build_peer(name: str, num_clients: int) -> Callable[[Any], Any]:
  """Returns ByzFL's rule with the parameters of `build_rule`.

  The rules are the same, but for some: GeometricMedian iterates 3 times, where
  ours iterates until it converges; Krum and MultiKrum count one more neighbour;
  CAF and SMEA estimate eigenvalues by one step of the power method.
  """
  import tensorflow  # PyTorch must not be imported first.  # noqa: F401

  import byzfl  # isort: skip

  f = num_byzantine(num_clients, name)
  median = byzfl.Median()
  chains = {
      'Mean': [byzfl.Average()],
      MEDIAN: [median],
      TRIMMED_MEAN: [byzfl.TrMean(f)],
      'MeaMed': [byzfl.Meamed(f)],
      'GeometricMedian': [byzfl.GeometricMedian()],
      'Krum': [byzfl.Krum(f)],
      'MultiKrum': [byzfl.MultiKrum(f)],
      # It keeps its center, so each call needs a new one.
      'CenteredClipping': [lambda x: byzfl.CenteredClipping(tau=1.0)(x)],
      'MDA': [byzfl.MDA(f)],
      'MoNNA': [byzfl.MoNNA(f)],
      'CAF': [byzfl.CAF(f)],
      'SMEA': [byzfl.SMEA(f)],
      # These two change their input.
      'Clipping': [copy.deepcopy, byzfl.Clipping(2.0), byzfl.Average()],
      'ARC': [copy.deepcopy, byzfl.ARC(f), byzfl.Average()],
      NNM: [byzfl.NNM(f), byzfl.Average()],
      'NNM + CoordinateMedian': [byzfl.NNM(f), median],
      'Bucketing + CoordinateMedian': [byzfl.Bucketing(2), median],
  }

  def aggregate(values):
    for step in chains[name]:
      values = step(values)
    return values

  return aggregate


def peer_input(values: Any, form: str) -> Any:
  """Returns a copy of a NumPy array in a form."""
  if form == NUMPY_FORM:
    return values.copy()
  import torch

  return torch.from_numpy(values.copy())


def random_matrix(num_clients: int, size: int) -> Any:
  """Returns normally distributed float32 values, a row per client."""
  import numpy as np

  rng = np.random.default_rng([num_clients, size])
  return rng.standard_normal((num_clients, size), np.float32)


def build_function(
    name: str, num_clients: int, size: int
) -> Callable[..., Any]:
  """Returns a rule as a function of a matrix, as it runs in process."""
  import numpy as np
  import tensorflow as tf
  import tensorflow_federated as tff

  from tff_bn.runtime import imported_graph

  rule = build_rule(name, num_clients)

  @tff.tensorflow.computation(tff.TensorType(np.float32, [None, size]))
  def aggregate(values):
    state = rule.initial_state(size, tf.float32)
    return rule.aggregate(values, tf.constant(0), state)[0]

  graph = imported_graph.GraphCache().of(aggregate)
  return tf.compat.v1.wrap_function(
      lambda values: graph([values])[0],
      [tf.TensorSpec([None, size], tf.float32)],
  )


def numpy_ways(values: Any) -> dict[str, Callable[[], Any]]:
  """Returns the NumPy functions that the rules are compared with."""
  import numpy as np

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
    results: The result of each rule.
    values: The matrix that was aggregated.

  Raises:
    RuntimeError: If a result differs.
  """
  import numpy as np

  f = num_byzantine(num_clients)
  ordered = np.sort(values, axis=0)
  expected = {
      'Mean': values.mean(axis=0),
      MEDIAN: np.median(values, axis=0),
      TRIMMED_MEAN: ordered[f : num_clients - f].mean(axis=0),
  }
  for name in expected.keys() & results.keys():
    right = expected[name]
    error = np.abs(results[name] - right).max()
    # Not `>`: NaN must fail.
    if not error <= _TOLERANCE:
      raise RuntimeError(
          f'{name} of {num_clients} clients differs from NumPy by {error:.1e};'
          f' at most {_TOLERANCE} is allowed.'
      )


def time_matrix(
    num_clients: int, size: int, repeats: int, rules: Sequence[str] = RULES
) -> dict[str, list[float]]:
  """Times rules and their references in turn.

  Args:
    num_clients: The number of rows.
    size: The number of columns.
    repeats: The number of times to time each.
    rules: The rules.

  Returns:
    The seconds, by variant.

  Raises:
    RuntimeError: If a result differs from NumPy's.
  """
  import tensorflow as tf

  values = random_matrix(num_clients, size)
  tensor = tf.constant(values)

  @tf.function(input_signature=[tf.TensorSpec([None, size], tf.float32)])
  def tf_distances(x):
    lengths = tf.reduce_sum(tf.math.square(x), axis=1)
    products = tf.matmul(x, x, transpose_b=True)
    return lengths[:, tf.newaxis] + lengths - 2 * products

  functions = {name: build_function(name, num_clients, size) for name in rules}
  ways = numpy_ways(values)
  if NNM in rules:
    functions[TF_DISTANCES] = tf_distances
  else:
    del ways[NUMPY_DISTANCES]
  for name, function in functions.items():
    function(tensor[:0])  # One-time work is not timed.
    ways[name] = lambda function=function: function(tensor).numpy()
  inputs = {}
  for name in rules:
    for form in peer_forms(name, num_clients, size):
      if form not in inputs:
        inputs[form] = peer_input(values, form)
      rule = build_peer(name, num_clients)
      ways[peer(name, form)] = lambda rule=rule, form=form: rule(inputs[form])
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
  """Returns the increase of this process's memory when it applies a rule.

  Args:
    name: The rule.
    num_clients: The number of rows.
    size: The number of columns.

  Returns:
    The peak during the aggregation minus the memory before, in 2^20 bytes.
  """
  import tensorflow as tf

  function = build_function(name, num_clients, size)
  tensor = tf.constant(random_matrix(num_clients, size))
  # Exclude the memory for TensorFlow's first call.
  build_function(name, num_clients, 10)(tensor[:, :10])
  function(tensor[:0])
  return rise_of_memory(lambda: function(tensor).numpy())


def memory_of_peer(name: str, form: str, num_clients: int, size: int) -> float:
  """Returns the same as `memory_of_rule` for a rule of ByzFL."""
  rule = build_peer(name, num_clients)
  values = peer_input(random_matrix(num_clients, size), form)
  rule(values[:, :10])  # Exclude the memory for the first call.
  return rise_of_memory(lambda: rule(values))


def rise_of_memory(function: Callable[[], Any]) -> float:
  """Returns the memory's increase during a call, in 2^20 bytes."""
  import psutil

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
  """Times whole aggregations in process, except the first one.

  Args:
    name: The rule.
    num_clients: The number of clients.
    size: The length of a client's vector.
    repeats: The number of rounds to time.

  Returns:
    The seconds of each round.
  """
  import numpy as np
  import tensorflow_federated as tff

  from tff_bn import runtime

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


def time_peer_of_list(
    name: str, form: str, num_clients: int, size: int, repeats: int
) -> list[float]:
  """Times ByzFL's rule of a list of vectors, which it copies to a matrix."""
  rule = build_peer(name, num_clients)
  vectors = list(peer_input(random_matrix(num_clients, size), form))
  rule(vectors)
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    rule(vectors)
    seconds.append(time.perf_counter() - start)
  return seconds


def default_repeats(num_clients: int) -> int:
  """Returns how often to time each rule: less often if it takes long."""
  return 15 if num_clients <= 10 else 7 if num_clients <= 100 else 1


def measure(
    clients: Sequence[int],
    memory_clients: Sequence[int],
    tff_clients: Sequence[int],
    size: int,
    small_size: int,
    repeats: Optional[int],
) -> Measurements:
  """Takes all measurements.

  Args:
    clients: The numbers of rows to time rules with.
    memory_clients: The numbers of rows to measure memory with.
    tff_clients: The numbers of clients of whole aggregations.
    size: The number of columns.
    small_size: The number of columns of small vectors.
    repeats: How often to time each rule; `None`: see `default_repeats`.

  Returns:
    The measurements.
  """
  seconds, small_seconds, megabytes, whole = {}, {}, {}, {}
  for number in clients:
    harness.progress(f'matrices with {number} rows')
    # A new process, because TensorFlow keeps the memory of larger matrices.
    seconds[number] = harness.in_new_process(
        time_matrix, number, size, repeats or default_repeats(number)
    )
    small_seconds[number] = harness.in_new_process(
        time_matrix,
        number,
        small_size,
        repeats or _SMALL_REPEATS,
        SORTING_RULES,
    )
  for number in memory_clients:
    harness.progress(f'memory of matrices with {number} rows')
    megabytes[number] = {
        name: harness.in_new_process(memory_of_rule, name, number, size)
        for name in RULES
    }
    for name in RULES:
      for form in peer_forms(name, number, size):
        megabytes[number][peer(name, form)] = harness.in_new_process(
            memory_of_peer, name, form, number, size
        )
  for number in tff_clients:
    harness.progress(f'aggregations of {number} clients')
    times = repeats or default_repeats(number)
    whole[number] = {
        name: time_tff(name, number, size, times) for name in TFF_RULES
    }
    for name in TFF_RULES:
      for form in peer_forms(name, number, size):
        whole[number][peer(name, form)] = harness.in_new_process(
            time_peer_of_list, name, form, number, size, times
        )
  return Measurements(
      harness.describe_machine(),
      size,
      seconds,
      megabytes,
      small_size,
      small_seconds,
      whole,
  )


def best_peer(name: str, measured: Mapping[str, Any]) -> Optional[str]:
  """Returns ByzFL's better form of a rule, or `None` if none was measured."""
  names = [peer(name, form) for form in FORMS if peer(name, form) in measured]
  return min(names, key=lambda key: _median(measured[key]), default=None)


def _median(value: Any) -> float:
  return value if isinstance(value, float) else statistics.median(value)


def _table_of_ways(
    ways: Sequence[str],
    measured: Mapping[int, Mapping[str, Any]],
    decimals: int,
    first_rows: Sequence[Sequence[str]] = (),
) -> list[str]:
  """Returns a table with a column for each number of clients.

  Args:
    ways: The variants, one in a row. ByzFL's follow.
    measured: A number, or numbers with a median, for each number of clients and
      variant.
    decimals: The number of decimals.
    first_rows: Further rows, above the others.
  """
  rows = [*first_rows]
  for way in ways:
    cells = [
        f'{_median(values[way]):.{decimals}f}' for values in measured.values()
    ]
    rows.append([way, *cells])
  for way in ways:
    best = [best_peer(way, values) for values in measured.values()]
    if any(best):
      rows.append(
          [
              f'ByzFL {way}',
              *(
                  f'{_median(values[key]):.{decimals}f}' if key else '–'
                  for key, values in zip(best, measured.values())
              ),
          ]
      )
  header = ['', *(f'{number} clients' for number in measured)]
  return harness.table(header, rows)


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: What was measured.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()
  ways = (*NUMPY, TF_DISTANCES, *RULES)

  def ratio_table(measured, rules):
    rows = []

    def add(number, name, reference, limit):
      times = measured[number]
      ratios = [a / b for a, b in zip(times[name], times[reference])]
      cells = floors.ratio_cells(ratios, limit)
      text = f'{name} / {reference}'
      rows.append([str(number), text, harness.spread(ratios), *cells])

    for number in measured:
      for (name, reference), limit in _FLOORS.items():
        add(number, name, reference, limit)
      for name, reference in _DISTANCE_COMPARISONS:
        if name in rules:
          has_floor = number == _FLOOR_CLIENTS and reference == NUMPY_DISTANCES
          add(number, name, reference, _DISTANCE_FLOOR if has_floor else None)
    for number, seconds in measured.items():
      for name in rules:
        if key := best_peer(name, seconds):
          add(number, name, key, _PEER_LIMITS.get(name))
    return harness.table(
        ['clients', 'ratio', 'median (range)', 'floor', 'met'], rows
    )

  ratios = ratio_table(measurements.seconds, RULES)
  small_ratios = ratio_table(measurements.small_seconds, SORTING_RULES)
  memory_rows = []
  # The result is one vector, which ByzFL's Krum does not copy.
  noise = 2 * 4 * measurements.size / 2**20
  for number, megabytes in measurements.megabytes.items():
    for name in RULES:
      if key := best_peer(name, megabytes):
        ratio = max(megabytes[name], noise) / max(megabytes[key], noise)
        memory_rows.append(
            [
                str(number),
                f'{name} / {key}',
                f'{ratio:.2f}',
                *floors.ratio_cells([ratio], _PEER_LIMITS.get(name)),
            ]
        )
  lines = [
      *harness.head(
          'Cost of robust aggregation', 'aggregators', measurements.machine
      ),
      '',
      f'Random float32 matrices with one row per client and'
      f' {measurements.size:,} columns. The rules tolerate a fifth of the'
      ' clients as attackers; MDA and SMEA tolerate 1 of 100 clients and 0 of'
      ' 1000. Clipping, ARC and NNM alone are followed by the mean. Buckets'
      ' have 2 clients. NumPy distances are the squared distances between all'
      ' rows, computed by one matrix product. NumPy uses one core, except for'
      ' this product.',
      '',
      "ByzFL's rules, if it is installed (`pip install byzfl torch`), have the"
      ' same parameters, and a NumPy array or a PyTorch tensor as input: the'
      ' tables show the better form. NNM is missing where ByzFL would need more'
      ' than half of the memory of the machine. Its GeometricMedian iterates 3'
      ' times, ours until it converges. Its CAF and SMEA estimate eigenvalues'
      ' by one step of the power method, ours compute them. It has no Bulyan.',
      '',
      '## Seconds',
      '',
      'Medians. The variants take turns.',
      '',
      *_table_of_ways(ways, measurements.seconds, 4),
      '',
      'Ratios of successive times: median and range.',
      '',
      *ratios,
      '',
      '## Small vectors',
      '',
      f'Median seconds for vectors with {measurements.small_size:,} columns.',
      '',
      *_table_of_ways(
          (NUMPY_MEDIAN, NUMPY_SORT, *SORTING_RULES),
          measurements.small_seconds,
          5,
      ),
      '',
      *small_ratios,
      '',
      '## Memory',
      '',
      'Increase of the memory of a new process when it aggregates, in MB of'
      ' 2^20 bytes, without the matrix itself. Less than two vectors counts as'
      ' two vectors in the ratios.',
      '',
      *_table_of_ways(
          RULES,
          measurements.megabytes,
          0,
          [
              [
                  'the matrix',
                  *(
                      f'{4 * number * measurements.size / 2**20:.0f}'
                      for number in measurements.megabytes
                  ),
              ]
          ],
      ),
      '',
      *(
          harness.table(
              ['clients', 'ratio', 'value', 'floor', 'met'], memory_rows
          )
          if memory_rows
          else ['ByzFL was not installed.']
      ),
      '',
      '## Whole aggregations',
      '',
      'Median seconds of a TFF round in process, which gathers one vector from'
      " each client and aggregates them. ByzFL's rules aggregate a list of"
      ' vectors.',
      '',
      *_table_of_ways(TFF_RULES, measurements.tff, 4),
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
      small_size=_SMALL_SIZE.value,
      repeats=_REPEATS.value,
  )


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run('aggregators', arguments, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
