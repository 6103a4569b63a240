"""Shared parts of the benchmarks: rounds to time, checks and reports.

TensorFlow is imported inside the functions that need it, because the process
that starts the others has to stay small: on Linux, a child's peak memory starts
at its parent's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import multiprocessing
import os
import pathlib
import platform
import re
import statistics
import sys
from typing import Any, ClassVar, Optional, Self

from absl import app
from absl import flags

_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir',
    str(pathlib.Path(__file__).resolve().parent / 'results'),
    'Folder for the report.',
)

NUM_CLASSES = 10

# The cell of a variant that a row was not timed with.
NOT_TIMED = '–'
# The page with all floors, in the folder of the reports.
_OVERVIEW = 'README.md'
# A measured value, with decimals, in a table.
_NUMBER = re.compile(r'\d+\.\d')


@dataclasses.dataclass(frozen=True)
class Row:
  """A kind of round.

  Attributes:
    models: The names of the benchmark's models.
    model: The model's name.
    num_clients: The number of clients.
    num_steps: The number of batches that each client trains on.
    batch_size: The number of examples in a batch.
  """

  models: ClassVar[Sequence[str]] = ()
  model: str
  num_clients: int
  num_steps: int
  batch_size: int

  @classmethod
  def parse(cls, text: str, flag: str = 'rows') -> Self:
    """Reads `MODEL:CLIENTSxSTEPSxBATCH`.

    Args:
      text: The text.
      flag: The flag's name, for the error message.

    Returns:
      The row.

    Raises:
      ValueError: If the text has another form.
    """
    model, _, numbers = text.partition(':')
    parts = numbers.split('x')
    if (
        model not in cls.models
        or len(parts) != 3
        or not all(part.isdecimal() and int(part) > 0 for part in parts)
    ):
      raise ValueError(
          f'--{flag}: {text!r} is not understood; write'
          ' MODEL:CLIENTSxSTEPSxBATCH with a model of'
          f' {", ".join(cls.models)}, like small_cnn:10x5x32.'
      )
    return cls(model, *map(int, parts))

  @classmethod
  def parse_all(cls, texts: Sequence[str]) -> list[Self]:
    """Reads the value of `--rows`, at least one row; see `parse`."""
    rows = [cls.parse(text) for text in texts if text]
    if not rows:
      raise ValueError('--rows is empty; name at least one round.')
    return rows

  def __str__(self) -> str:
    clients = 'client' if self.num_clients == 1 else 'clients'
    return (
        f'{self.model}, {self.num_clients} {clients} × {self.num_steps} ×'
        f' {self.batch_size}'
    )


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds of a row's rounds, by variant.

  Attributes:
    first: The first round, including one-time work such as tracing.
    later: The later rounds in order.
  """

  first: Mapping[str, float]
  later: Mapping[str, Sequence[float]]

  @classmethod
  def of(cls, times: Mapping[str, Sequence[float]]) -> Self:
    """Returns the timing for the seconds of all rounds, including the first."""
    return cls(
        {way: seconds[0] for way, seconds in times.items()},
        {way: seconds[1:] for way, seconds in times.items()},
    )

  def ratios(self, numerator: str, denominator: str) -> list[float]:
    """Returns the ratios of two variants' times, one for each later round.

    There are none if the row was not timed with one of the variants.
    """
    above, below = (self.later.get(way, ()) for way in (numerator, denominator))
    return [a / b for a, b in zip(above, below)]

  def first_cells(self, ways: Sequence[str]) -> list[str]:
    """Formats the seconds of the variants' first rounds."""
    return [
        f'{self.first[way]:.2f}' if way in self.first else NOT_TIMED
        for way in ways
    ]

  def median_cells(self, ways: Sequence[str]) -> list[str]:
    """Formats the median seconds of the variants' later rounds."""
    return [
        f'{statistics.median(self.later[way]):.3f}'
        if way in self.later
        else NOT_TIMED
        for way in ways
    ]


@dataclasses.dataclass(frozen=True)
class Result:
  """The weights of a model after a round, and its loss and accuracy."""

  weights: Sequence[Any]
  metrics: Sequence[float]


def check_results(
    row: Row,
    results: Mapping[str, Result],
    reference: str,
    initial: Sequence[Any],
    tolerance: float,
) -> None:
  """Checks that the results of all variants agree.

  Args:
    row: The kind of round.
    results: The result of each variant.
    reference: The variant that the others are compared with.
    initial: The weights before the round.
    tolerance: The largest difference between weights, relative to the model's
      change in the round, and between metrics.

  Raises:
    RuntimeError: If results differ.
  """
  expected = results[reference]
  change = _norm(a - b for a, b in zip(expected.weights, initial))
  for way, result in results.items():
    differences = (a - b for a, b in zip(result.weights, expected.weights))
    error = _norm(differences) / change
    # An accuracy may be 0.
    metric_error = sum(
        abs(a - b) / max(abs(b), 1.0)
        for a, b in zip(result.metrics, expected.metrics)
    )
    # Not `>`: NaN must fail.
    if not (error <= tolerance and metric_error <= tolerance):
      raise RuntimeError(
          f'{row}: the results of {way!r} differ from {reference!r} by'
          f" {error:.1e} of the model's change in a round, and in the metrics"
          f' by {metric_error:.1e}; at most {tolerance} is allowed.'
      )


def _norm(arrays: Iterable[Any]) -> float:
  # Not np.linalg.norm, because this module doesn't import NumPy.
  return sum(float((a.astype('float64') ** 2).sum()) for a in arrays) ** 0.5


def build_classifier(keras_model_fn: Callable[[], Any], element_spec: Any):
  """Returns a `BatchNormModel` with the same weights in all processes."""
  import keras

  from tff_bn import BatchNormModel

  keras.utils.set_random_seed(0)
  return BatchNormModel(
      keras_model_fn,
      input_spec=element_spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )


def federated_data(dataset: Any, parts: Sequence[Any]) -> Any:
  """Splits the training data of a `Dataset`.

  Args:
    dataset: The dataset.
    parts: The indices of each client's examples.

  Returns:
    A `FederatedData`.
  """
  import numpy as np

  from tff_bn import data

  ids = [f'client_{number}' for number in range(len(parts))]
  none = np.zeros(0, np.int64)
  return data.FederatedData(
      dataset, dict(zip(ids, parts)), dict.fromkeys(ids, none)
  )


def unlike_clients(row: Row, image_shape: Sequence[int]) -> Any:
  """Random images; each client has its own brightness and two classes.

  Args:
    row: Determines the numbers of clients and of images per client.
    image_shape: The shape of an image.

  Returns:
    A `FederatedData`.
  """
  import numpy as np

  from tff_bn import data

  rng = np.random.default_rng([0, row.num_clients])
  num_samples = row.num_steps * row.batch_size
  shape = (num_samples, *image_shape)
  images, labels = [], []
  for client in range(row.num_clients):
    start = 128 * client // row.num_clients
    images.append(rng.integers(start, start + 128, shape, np.uint8))
    first_class = 2 * client % NUM_CLASSES
    labels.append(first_class + rng.integers(0, 2, num_samples, np.int32))
  x, y = np.concatenate(images), np.concatenate(labels)
  dataset = data.Dataset('random', x, y, x[:0], y[:0], NUM_CLASSES)
  return federated_data(dataset, np.split(np.arange(len(y)), row.num_clients))


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function in a new process and returns its result."""
  with concurrent.futures.ProcessPoolExecutor(
      max_workers=1, mp_context=multiprocessing.get_context('spawn')
  ) as executor:
    return executor.submit(function, *args).result()


def describe_machine(*packages: str) -> list[str]:
  """Describes the machine and the versions of the packages.

  Args:
    *packages: Further packages whose versions the report shows.

  Returns:
    Lines about the machine and versions.
  """
  import tensorflow as tf

  processor = platform.processor() or platform.machine()
  with contextlib.suppress(OSError):
    for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
      if line.startswith('model name'):
        processor = line.partition(':')[2].strip()
        break
  gpus = [
      tf.config.experimental.get_device_details(gpu).get('device_name', 'GPU')
      for gpu in tf.config.list_physical_devices('GPU')
  ]
  versions = [
      f'{name} {importlib.metadata.version(name)}'
      for name in ('tensorflow', 'tensorflow-federated', 'tff-bn', *packages)
  ]
  return [
      f'{os.cpu_count()} CPU cores ({processor}); GPUs:'
      f' {", ".join(gpus) or "none"}',
      f'Python {platform.python_version()}, {", ".join(versions)}',
  ]


def progress(text: str) -> None:
  """Prints what is being measured."""
  print(text, file=sys.stderr, flush=True)


class Floors:
  """Records whether all floors are met."""

  def __init__(self):
    self.are_met = True

  def check(self, is_met: bool) -> str:
    """Returns the table's cell for a floor."""
    self.are_met = self.are_met and is_met
    return 'yes' if is_met else '**no**'

  def ratio_cells(
      self, ratios: Sequence[float], limit: Optional[float]
  ) -> list[str]:
    """Returns the cells for the largest median ratio; `None`: no floor."""
    if limit is None:
      return ['–', '–']
    is_met = statistics.median(ratios) <= limit
    return [f'≤ {limit:.2f}', self.check(is_met)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns the lines of a Markdown table."""
  return [
      f'| {" | ".join(cells)} |'
      for cells in (header, ['---'] * len(header), *rows)
  ]


def spread(values: Sequence[float]) -> str:
  """Formats the median and the range of values, if there are any."""
  if not values:
    return NOT_TIMED
  return (
      f'{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})'
  )


def head(title: str, name: str, machine: Sequence[str]) -> list[str]:
  """Returns the first lines of a report.

  Args:
    title: Its title.
    name: The name of the benchmark's file, without `.py`.
    machine: Lines about the machine and versions.
  """
  return [
      f'# {title}',
      '',
      f'Written by `python benchmarks/{name}.py`.',
      '',
      *(f'*   {line}' for line in machine),
  ]


def overview(folder: pathlib.Path) -> str:
  """Returns a page with all floors and what was measured.

  Args:
    folder: The folder of the reports.
  """
  rows = []
  for path in sorted(folder.glob('*.md')):
    if path.name != _OVERVIEW:
      rows += [
          [f'[{path.stem}]({path.name})', *cells] for cells in _floors_in(path)
      ]
  return '\n'.join(
      [
          '# Benchmarks: what was measured, and its limit',
          '',
          'Each row compares a measured time, memory or ratio of a report with'
          ' the limit that it must keep, its floor. `1.20 (1.1–1.4)` is the'
          ' median and the range of ratios within one run. The programs in'
          ' benchmarks/ write this page from the reports in this folder.',
          '',
          *table(
              ['report', 'part', 'of', 'what', 'measured', 'floor', 'met'], rows
          ),
          '',
      ]
  )


def _floors_in(path: pathlib.Path) -> Iterator[list[str]]:
  """Yields the cells of `overview` for each floor in a report."""
  part, header = '', None
  for line in path.read_text(encoding='utf-8').splitlines():
    if not line.startswith('|'):
      header = None
      if line.startswith('## '):
        part = line.removeprefix('## ')
      continue
    cells = [cell.strip() for cell in line.strip('|').split('|')]
    if header is None:
      header = cells
      continue
    numbers = [i for i, cell in enumerate(cells) if _NUMBER.match(cell)]
    labels = cells[: min(numbers, default=0)]
    for column, name in enumerate(header):
      if name == 'floor' and cells[column][0] in '≤<':
        yield [
            part,
            ', '.join(labels),
            header[column - 1],
            cells[column - 1],
            *cells[column : column + 2],
        ]


def output_dir() -> pathlib.Path:
  """Returns the folder of the reports."""
  return pathlib.Path(_OUTPUT_DIR.value)


def run(
    name: str,
    arguments: Sequence[str],
    parse_flags: Callable[[], Mapping[str, Any]],
    measure: Callable[..., Any],
    report: Callable[[Any], tuple[str, bool]],
) -> int:
  """Runs a benchmark: measures, prints the report and writes it.

  Args:
    name: The name of the report's file, without `.md`.
    arguments: The arguments of `main`; none may follow the program's name.
    parse_flags: Returns the keyword arguments of `measure`; raises a
      `ValueError` if a flag is wrong.
    measure: Takes the measurements.
    report: Returns the report of the measurements, and whether all floors are
      met.

  Returns:
    The exit code: 1 if a floor is not met.
  """
  try:
    if len(arguments) > 1:
      raise ValueError(f'{arguments[1]!r} is not understood; see --help.')
    parsed = parse_flags()
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  # TensorFlow's C++ code reports missing GPU libraries as errors.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  text, are_floors_met = report(measure(**parsed))
  path = output_dir() / f'{name}.md'
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, encoding='utf-8')
  (path.parent / _OVERVIEW).write_text(overview(path.parent), encoding='utf-8')
  print(text)
  return 0 if are_floors_met else 1
