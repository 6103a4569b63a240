"""Measures how long a deep model takes until its first round is done.

The floor is Keras: building the model and `fit` of one batch. Each measurement
has its own process, because TensorFlow keeps what it has compiled, and the
processes take turns.

The program writes a Markdown report and exits with 1 if a floor is not met.
"""

from collections.abc import Callable, Sequence
import dataclasses
import statistics
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import harness

# Decides on oneDNN, for Keras's processes as well.
import tff_bn  # noqa: F401

flags.adopt_module_key_flags(harness)

_SHAPE = (32, 32, 3)
_BATCH_SIZE = 8
_NUM_CLIENTS = 2
_LATER_ROUNDS = 5
_KERAS = 'Keras'


def _application(name: str) -> Callable[[], Any]:
  """Returns a function that builds a model of `keras.applications`."""

  def build():
    import keras

    return getattr(keras.applications, name)(
        input_shape=_SHAPE,
        weights=None,
        classes=harness.NUM_CLASSES,
        classifier_activation=None,
    )

  return build


def _frozen_resnet50() -> Any:
  """Builds a trained part with batch normalization on a frozen one."""
  import keras

  layers = keras.layers
  backbone = keras.applications.ResNet50(
      input_shape=_SHAPE, weights=None, include_top=False, pooling='avg'
  )
  backbone.trainable = False
  return keras.Sequential(
      [
          keras.Input(_SHAPE),
          backbone,
          layers.Dense(32),
          layers.BatchNormalization(),
          layers.ReLU(),
          layers.Dense(harness.NUM_CLASSES),
      ]
  )


_MODELS: dict[str, Callable[[], Any]] = {
    'mobilenet_v2': _application('MobileNetV2'),
    'efficientnet_b0': _application('EfficientNetB0'),
    'resnet50': _application('ResNet50'),
    'frozen_resnet50': _frozen_resnet50,
}
# By the name of a builder without `build_`: the largest ratio to Keras.
_MAX_FIRST_RATIOS = {'fed_avg': 2.0, 'fed_bn': 2.0, 'fbn': 2.0, 'fedtan': 3.0}
_MAX_LATER_RATIO = 1.3

_NAMES = flags.DEFINE_list(
    'models', list(_MODELS), f'Some of {", ".join(_MODELS)}.'
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 3, 'Number of processes of each kind.', lower_bound=1
)


class Seconds(NamedTuple):
  """What one process took.

  Attributes:
    first: Building, and the first round or batch.
    later: The fastest later round, or `fit` of a batch for each client.
    megabytes: The largest memory of the process.
  """

  first: float
  later: float
  megabytes: float


def _client_datasets() -> list[Any]:
  """Returns a batch of random images for each client."""
  import numpy as np
  import tensorflow as tf

  rng = np.random.default_rng(0)
  size = (_NUM_CLIENTS, _BATCH_SIZE)
  images = rng.normal(size=(*size, *_SHAPE)).astype(np.float32)
  labels = rng.integers(0, harness.NUM_CLASSES, size, np.int32)
  return [
      tf.data.Dataset.from_tensor_slices(client).batch(_BATCH_SIZE)
      for client in zip(images, labels)
  ]


def _time(build: Callable[[], Callable[[], None]]) -> Seconds:
  """Times a function that builds what makes a round."""
  import resource

  start = time.perf_counter()
  make_round = build()
  make_round()
  first = time.perf_counter() - start
  later = []
  for _ in range(_LATER_ROUNDS):
    start = time.perf_counter()
    make_round()
    later.append(time.perf_counter() - start)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return Seconds(first, min(later), peak / 1024)


def time_keras(name: str) -> Seconds:
  """Times Keras, whose first `fit` has the batch of one client."""
  import keras

  datasets = _client_datasets()

  def build():
    model = _MODELS[name]()
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=['accuracy'],
    )
    rounds = iter([datasets[:1]])

    def fit():
      for dataset in next(rounds, datasets):
        model.fit(dataset, verbose=0)

    return fit

  return _time(build)


def time_rounds(name: str, algorithm: str) -> Seconds:
  """Times the rounds of an algorithm."""
  import tensorflow_federated as tff

  from tff_bn import algorithms
  from tff_bn import runtime
  from tff_bn.processes import stateful_process

  # As the programs do. It comes before TensorFlow starts its threads.
  runtime.divide_cores(_NUM_CLIENTS)
  datasets = _client_datasets()

  def build():
    model = harness.build_classifier(_MODELS[name], datasets[0].element_spec)
    process = getattr(algorithms, f'build_{algorithm}')(
        model, tff.learning.optimizers.build_sgdm(0.01)
    )
    state = process.initialize()
    clients: list[Any] = []
    if isinstance(process, stateful_process.StatefulLearningProcess):
      clients = [process.initialize_client(state) for _ in datasets]

    def make_round():
      nonlocal state, clients
      output = process.next(state, *([clients] if clients else []), datasets)
      state = output.state
      clients = getattr(output, 'client_states', [])

    return make_round

  with runtime.in_process_runtime():
    return _time(build)


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    seconds: For each model, what the processes of each way took.
  """

  machine: Sequence[str]
  seconds: dict[str, dict[str, list[Seconds]]]


def measure(names: Sequence[str], repeats: int) -> Measurements:
  """Measures in new processes.

  Args:
    names: The models.
    repeats: The number of processes of each kind.

  Returns:
    The measurements.
  """
  found: dict[str, dict[str, list[Seconds]]] = {}
  for name in names:
    harness.progress(f'Timing {name} ...')
    found[name] = {way: [] for way in (_KERAS, *_MAX_FIRST_RATIOS)}
    for _ in range(repeats):
      for way, seconds in found[name].items():
        arguments = (time_keras, name)
        if way != _KERAS:
          arguments = (time_rounds, name, way)
        seconds.append(harness.in_new_process(*arguments))
  return Measurements(harness.in_new_process(harness.describe_machine), found)


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: The measurements.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()

  def rows(field: str, limits: dict[str, float]) -> list[list[str]]:
    cells = []
    for name, ways in measurements.seconds.items():
      of_keras = [getattr(seconds, field) for seconds in ways[_KERAS]]
      for way, limit in limits.items():
        values = [getattr(seconds, field) for seconds in ways[way]]
        ratios = [a / b for a, b in zip(values, of_keras)]
        cells.append(
            [
                f'{name}, {way}',
                f'{statistics.median(values):.2f}',
                f'{statistics.median(of_keras):.2f}',
                harness.spread(ratios),
                *floors.ratio_cells(ratios, limit),
            ]
        )
    return cells

  header = ['Round', 'tff_bn', _KERAS, f'tff_bn / {_KERAS}', 'floor', 'met']
  memory = [
      [name, *(f'{max(s.megabytes for s in ways[way]):,.0f}' for way in ways)]
      for name, ways in measurements.seconds.items()
  ]
  lines = [
      *harness.head('First rounds', 'first_round', measurements.machine),
      '',
      f'Each of {_NUM_CLIENTS} clients makes one step with a batch of'
      f' {_BATCH_SIZE} images of {"×".join(map(str, _SHAPE))}. The models are'
      ' from `keras.applications`. In `frozen_resnet50`, only a small head is'
      ' trained, on top of a frozen ResNet50. The numbers are medians of'
      f' {len(next(iter(measurements.seconds.values()))[_KERAS])} processes of'
      ' each kind, which take turns. The processes of tff_bn first call'
      ' `tff_bn.runtime.divide_cores`, as its programs do.',
      '',
      '## First round',
      '',
      'Seconds to build the model and the process and to make the first round;'
      ' in Keras to build the model and to `fit` one batch.',
      '',
      *harness.table(header, rows('first', _MAX_FIRST_RATIOS)),
      '',
      '## Later rounds',
      '',
      f'Seconds of a round, the fastest of {_LATER_ROUNDS}; in Keras of `fit`'
      ' on the batch of each client.',
      '',
      *harness.table(
          header,
          rows('later', dict.fromkeys(_MAX_FIRST_RATIOS, _MAX_LATER_RATIO)),
      ),
      '',
      '## Memory',
      '',
      'The largest memory of a process, in MB, with TensorFlow.',
      '',
      *harness.table(['Model', _KERAS, *_MAX_FIRST_RATIOS], memory),
  ]
  return '\n'.join(lines) + '\n', floors.are_met


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  names = _NAMES.value
  unknown = [name for name in names if name not in _MODELS]
  if unknown or not names:
    raise ValueError(
        f'--models is {",".join(names)!r}, but must be some of'
        f' {", ".join(_MODELS)}.'
    )
  return dict(names=names, repeats=_REPEATS.value)


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run('first_round', arguments, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
