"""What the benchmarks have in common: rounds to time, checks and reports.

TensorFlow is imported inside of the functions that need it. It takes seconds to
import, and the process that starts the others has to stay small: a child's peak
memory on Linux counts from its parent's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import multiprocessing
import os
import pathlib
import platform
import statistics
import sys
from typing import Any, ClassVar, Self

from absl import app

NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Row:
  """A kind of round.

  Attributes:
    models: The names of the models that a benchmark knows.
    model: The model's name.
    num_clients: How many clients take part.
    num_steps: How many batches each of them trains on.
    batch_size: Samples in a batch.
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
      flag: The name of the flag that it was given by.

    Returns:
      The row.

    Raises:
      ValueError: If it is not understood.
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

  def __str__(self) -> str:
    clients = 'client' if self.num_clients == 1 else 'clients'
    return (
        f'{self.model}, {self.num_clients} {clients} × {self.num_steps} ×'
        f' {self.batch_size}'
    )


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds of a row's rounds, by way to compute them.

  Attributes:
    first: The first round, with everything that is only done once, like
      tracing.
    later: The later rounds, in their order.
  """

  first: Mapping[str, float]
  later: Mapping[str, Sequence[float]]

  @classmethod
  def of(cls, times: Mapping[str, Sequence[float]]) -> Self:
    """Makes it of the seconds of all rounds, the first one included."""
    return cls(
        {way: seconds[0] for way, seconds in times.items()},
        {way: seconds[1:] for way, seconds in times.items()},
    )

  def ratios(self, numerator: str, denominator: str) -> list[float]:
    """Of each later round, how much longer one way took than another."""
    return [
        a / b for a, b in zip(self.later[numerator], self.later[denominator])
    ]


@dataclasses.dataclass(frozen=True)
class Result:
  """A model after a round: arrays in some order; loss and accuracy."""

  weights: Sequence[Any]
  metrics: Sequence[float]


def check_results(
    row: Row,
    results: Mapping[str, Result],
    reference: str,
    initial: Sequence[Any],
    tolerance: float,
) -> None:
  """Checks that all ways to compute a round have the same results.

  Args:
    row: The kind of round.
    results: By way.
    reference: The way with which the others are compared.
    initial: The weights before the round.
    tolerance: How much may differ: of the model's change in the round, and in
      the metrics.

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
    # Not `>`: an error that is not a number is one.
    if not (error <= tolerance and metric_error <= tolerance):
      raise RuntimeError(
          f'{row}: the results of {way!r} differ from those of {reference!r} by'
          f" {error:.1e} of the model's change in a round, and in the metrics"
          f' by {metric_error:.1e}; at most {tolerance} is allowed.'
      )


def _norm(arrays: Iterable[Any]) -> float:
  # Not NumPy's: this module is imported without it.
  return sum(float((a.astype('float64') ** 2).sum()) for a in arrays) ** 0.5


def build_classifier(keras_model_fn: Callable[[], Any], element_spec: Any):
  """Makes a `BatchNormModel` that is the same in all processes."""
  # pylint: disable=g-import-not-at-top

  # pylint: enable=g-import-not-at-top
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
    parts: For each client, which samples it has.

  Returns:
    A `FederatedData`.
  """
  # pylint: disable=g-import-not-at-top
  import numpy as np

  from tff_bn import data

  # pylint: enable=g-import-not-at-top
  ids = [f'client_{number}' for number in range(len(parts))]
  none = np.zeros(0, np.int64)
  return data.FederatedData(
      dataset, dict(zip(ids, parts)), dict.fromkeys(ids, none)
  )


def unlike_clients(row: Row, image_shape: Sequence[int]) -> Any:
  """Random images; each client has its own brightness and two classes.

  Args:
    row: How many clients there are, and how many images each has.
    image_shape: The shape of an image.

  Returns:
    A `FederatedData`.
  """
  # pylint: disable=g-import-not-at-top
  import numpy as np

  from tff_bn import data

  # pylint: enable=g-import-not-at-top
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
  """Calls a function of a module in a process of its own."""
  with concurrent.futures.ProcessPoolExecutor(
      max_workers=1, mp_context=multiprocessing.get_context('spawn')
  ) as executor:
    return executor.submit(function, *args).result()


def describe_machine(*packages: str) -> list[str]:
  """Describes where a benchmark runs.

  Args:
    *packages: Packages whose versions matter, beside those that always do.

  Returns:
    Lines about the machine and versions.
  """
  import tensorflow as tf  # pylint: disable=g-import-not-at-top

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
  """Says what is measured now."""
  print(text, file=sys.stderr, flush=True)


class Floors:
  """Says whether floors are met, and remembers whether all are."""

  def __init__(self):
    self.are_met = True

  def check(self, is_met: bool) -> str:
    """Returns the table's cell for a floor."""
    self.are_met = self.are_met and is_met
    return 'yes' if is_met else '**no**'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  """Lines of a table in Markdown."""
  return [
      f'| {" | ".join(cells)} |'
      for cells in (header, ['---'] * len(header), *rows)
  ]


def spread(values: Sequence[float]) -> str:
  """The median, and the range."""
  return (
      f'{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})'
  )


def head(title: str, name: str, machine: Sequence[str]) -> list[str]:
  """Makes the first lines of a report.

  Args:
    title: Its title.
    name: The benchmark's name, that of its file.
    machine: Lines about the machine and versions.

  Returns:
    Lines in Markdown.
  """
  return [
      f'# {title}',
      '',
      f'Written by `python benchmarks/{name}.py`.',
      '',
      *(f'*   {line}' for line in machine),
  ]


def run(
    name: str,
    arguments: Sequence[str],
    output_dir: str,
    parse_flags: Callable[[], Mapping[str, Any]],
    measure: Callable[..., Any],
    report: Callable[[Any], tuple[str, bool]],
) -> int:
  """Runs a benchmark: measures, prints the report and writes it.

  Args:
    name: The benchmark's name, which the report's file gets.
    arguments: What `app.run` hands to the program.
    output_dir: The report's folder.
    parse_flags: Makes the keyword arguments of `measure`; raises a `ValueError`
      if a flag is wrong.
    measure: Measures.
    report: Makes the report of what `measure` returned: its text, and whether
      all floors are met.

  Returns:
    The program's exit code: 1 if a floor is not met.
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
  path = pathlib.Path(output_dir) / f'{name}.md'
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, encoding='utf-8')
  print(text)
  return 0 if are_floors_met else 1
