"""Measures the time of FedTAN.

Four variants train on the same batches in turn:

*   FedAvg: a round of federated averaging.
*   two_pass, fused: a round of FedTAN with this value of `moments`.
*   centralized: the same number of steps on the unions of the clients' batches,
    NumPy arrays. It calls one `tf.function` for each step of plain Keras and
    TensorFlow and contains no code of TFF or this project.

The rounds run in process, with default settings. Each round starts from the
same model, with new batches. With one step, FedTAN must have the result of the
centralized step; otherwise the program ends without a report. (Further steps
are local to each client.) The time includes the conversion of the result to
NumPy arrays, but not the building of the datasets and batches.

In new processes, the program also measures the time to build FedTAN and to
compute its first round, for models with up to 55 batch normalization layers,
and counts the traffic. It writes a Markdown report and exits with 1 if a floor
is not met.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import gc
import time
from typing import Any, Optional

from absl import app
from absl import flags
import harness
from harness import Result
from harness import Timing

flags.adopt_module_key_flags(harness)

_ROWS = flags.DEFINE_list(
    'rows',
    [
        'small_cnn:5x1x32',
        'digits_cnn:5x1x32',
        'resnet20:5x1x128',
        'resnet20:5x5x128',
    ],
    'Rounds to time, each as MODEL:CLIENTSxSTEPSxBATCH; see the report'
    ' for the models. The data are random images.',
)
_REPEATS = flags.DEFINE_integer(
    'repeats',
    None,
    'Number of rounds to time after the first one. Default: depends on the'
    ' length of a round.',
    lower_bound=1,
)
_FIRST_ROUNDS = flags.DEFINE_list(
    'first_rounds',
    [
        'mlp3:2x1x8',
        'resnet8:2x1x8',
        'resnet20:2x1x8',
        'resnet38:2x1x8',
        'resnet56:2x1x8',
        'resnet20:5x1x128',
        'keras_resnet50:2x1x8',
    ],
    'Rounds for which to measure, in a new process, the time to build FedTAN'
    ' and to compute the first round; written as --rows.',
)

FED_AVG, TWO_PASS, FUSED, CENTRALIZED = WAYS = (
    'FedAvg',
    'two_pass',
    'fused',
    'centralized',
)
# FedTAN's values of `moments`.
MOMENTS = (TWO_PASS, FUSED)

# Largest ratio of FedTAN to FedAvg, by model, number of clients and number of
# steps.
_MAX_FED_AVG_RATIO = {('resnet20', 5, 1): 1.5}
# Largest ratio of FedTAN to centralized.
_MAX_CENTRALIZED_RATIO = {('resnet20', 5, 1): 1.2}
# Seconds until the end of the first round, by model and number of clients.
_MAX_FIRST_SECONDS = {('resnet20', 5): 15.0, ('keras_resnet50', 2): 60.0}
# Largest ratio of the larger to the smaller model, in seconds per batch
# normalization layer.
_MAX_LAYER_RATIO = 1.5
_LAYER_MODELS = ('resnet20', 'resnet56')
# Relative to the model's change in a round. If rounding decides which of two
# pixels max pooling takes, FedTAN differs by a thousandth. FedAvg differs by a
# tenth or more.
_TOLERANCE = 1e-2

_LEARNING_RATE = 0.01

# Blocks per stage (n) of the residual networks of He et al. for small images:
# 6n + 2 layers, 6n + 1 of them with batch normalization.
_BLOCKS = {'resnet8': 1, 'resnet38': 6, 'resnet56': 9}
_IMAGE_SHAPES = {
    'mlp3': (8, 8, 1),
    'small_cnn': (8, 8, 1),
    'digits_cnn': (8, 8, 1),
    'resnet20': (32, 32, 3),
    **dict.fromkeys(_BLOCKS, (32, 32, 3)),
    'keras_resnet50': (32, 32, 3),
}


class Row(harness.Row):
  """A kind of round."""

  models = tuple(_IMAGE_SHAPES)

  @property
  def max_fed_avg_ratio(self) -> Optional[float]:
    """The largest ratio of FedTAN to FedAvg, if there is a floor."""
    return _MAX_FED_AVG_RATIO.get(
        (self.model, self.num_clients, self.num_steps)
    )

  @property
  def max_centralized_ratio(self) -> Optional[float]:
    """The largest ratio of FedTAN to centralized, if there is a floor."""
    return _MAX_CENTRALIZED_RATIO.get(
        (self.model, self.num_clients, self.num_steps)
    )

  @property
  def max_first_seconds(self) -> Optional[float]:
    """The most seconds until the end of the first round."""
    return _MAX_FIRST_SECONDS.get((self.model, self.num_clients))

  @property
  def default_repeats(self) -> int:
    """The number of rounds to time: fewer if they take long."""
    if _IMAGE_SHAPES[self.model] == (8, 8, 1):
      return 15
    return 7 if self.num_steps == 1 else 3


@dataclasses.dataclass(frozen=True)
class Sent:
  """The traffic of a round: exchanges, and megabytes of 2^20 bytes."""

  exchanges: int
  megabytes: float


@dataclasses.dataclass(frozen=True)
class Rounds:
  """A row's times, and the traffic of each federated variant."""

  timing: Timing
  sent: Mapping[str, Sent]


@dataclasses.dataclass(frozen=True)
class FirstRound:
  """The time of FedTAN's first round in a new process.

  Attributes:
    num_layers: The number of batch normalization layers.
    build: Seconds to build the model and the process: tracing.
    first: Seconds of the first round: planning, compiling and computing.
    second: Seconds of the second round: computing.
    sent: The traffic of a round.
  """

  num_layers: int
  build: float
  first: float
  second: float
  sent: Sent

  @property
  def total(self) -> float:
    """Seconds until the end of the first round."""
    return self.build + self.first

  @property
  def per_layer(self) -> float:
    """Seconds per batch normalization layer."""
    return self.total / self.num_layers


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    rounds: The times and traffic of each row.
    first_rounds: The first rounds of each row.
  """

  machine: Sequence[str]
  rounds: Mapping[Row, Rounds]
  first_rounds: Mapping[Row, FirstRound]


class _Problem:
  """A row's data, model and processes."""

  def __init__(self, row: Row, data: Any):
    self.row = row
    self.data = data
    self.model = harness.build_classifier(
        _keras_model_fn(row.model), data.element_spec
    )
    self.initial = self.model.initial_weights

  def build_process(self, way: str) -> Any:
    """Builds a federated algorithm."""
    import tensorflow_federated as tff

    from tff_bn import algorithms

    build = algorithms.build_fed_avg
    if way != FED_AVG:
      build = functools.partial(algorithms.build_fedtan, moments=way)
    return build(
        self.model,
        tff.learning.optimizers.build_sgdm(_LEARNING_RATE),
        local_steps=self.row.num_steps,
    )

  def client_datasets(self, round_num: int) -> list[Any]:
    """Returns a dataset of batches for each client."""
    return [
        self._dataset([client_id], round_num, self.row.batch_size)
        for client_id in self.data.client_ids
    ]

  def union_dataset(self, round_num: int) -> Any:
    """Returns the unions of the clients' batches."""
    client_ids = self.data.client_ids
    return self._dataset(
        client_ids, round_num, len(client_ids) * self.row.batch_size
    )

  def _dataset(self, client_ids, round_num, batch_size):
    return self.data.client_dataset(
        client_ids,
        seed=0,
        round_num=round_num,
        batch_size=batch_size,
        local_steps=self.row.num_steps,
    )

  def federated_round(
      self, process: Any, state: Any, datasets: Sequence[Any]
  ) -> Result:
    """Computes a round in TFF's current context."""
    output = process.next(state, datasets)
    train = output.metrics['client_work']['train']
    return Result(
        self.model.from_model_weights(process.get_model_weights(output.state)),
        [train['loss'], train['accuracy']],
    )

  def sent(self, process: Any) -> Sent:
    """Returns the traffic of a round."""
    from tff_bn import analysis

    traffic = analysis.computation_traffic(process.next)
    return Sent(traffic.exchanges, traffic.megabytes(self.row.num_clients))

  def check(self, results: Mapping[str, Result]) -> None:
    """Raises a `RuntimeError` unless FedTAN equals the centralized step."""
    if self.row.num_steps > 1:
      return
    results = {way: results[way] for way in (*MOMENTS, CENTRALIZED)}
    initial = self.model.from_model_weights(self.initial)
    # Checked apart, because statistics change more than trainable variables and
    # would hide their errors.
    for is_trainable in (True, False):
      harness.check_results(
          self.row,
          {
              way: Result(self._group(r.weights, is_trainable), r.metrics)
              for way, r in results.items()
          },
          CENTRALIZED,
          self._group(initial, is_trainable),
          _TOLERANCE,
      )

  def _group(self, weights, is_trainable):
    return [
        value
        for value, info in zip(weights, self.model.variables)
        if info.trainable == is_trainable
    ]


def _keras_model_fn(name: str) -> Callable[[], Any]:
  import keras

  from tff_bn import models

  if name in _BLOCKS:
    return functools.partial(_build_resnet, _BLOCKS[name])
  if name == 'keras_resnet50':
    return functools.partial(
        keras.applications.ResNet50,
        weights=None,
        input_shape=_IMAGE_SHAPES[name],
        classes=harness.NUM_CLASSES,
        classifier_activation=None,
    )
  return models.build_model_fn(name, _IMAGE_SHAPES[name], harness.NUM_CLASSES)


def _build_resnet(num_blocks: int) -> Any:
  """Builds a `tff_bn.models.resnet20` with other numbers of blocks."""
  import keras

  layers = keras.layers

  def convolve(x, channels, strides):
    if strides > 1:
      x = layers.ZeroPadding2D(1)(x)
    x = layers.Conv2D(
        channels,
        3,
        strides=strides,
        padding='same' if strides == 1 else 'valid',
        use_bias=False,
        kernel_initializer='he_normal',
    )(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

  inputs = keras.Input((32, 32, 3))
  x = layers.ReLU()(convolve(inputs, 16, 1))
  for stage, channels in enumerate((16, 32, 64)):
    for block in range(num_blocks):
      strides, shortcut = 1, x
      if stage and not block:
        strides = 2
        shortcut = layers.AveragePooling2D(pool_size=1, strides=strides)(x)
        padding = (channels - x.shape[-1]) // 2
        # These axes are width and channels.
        shortcut = layers.ZeroPadding2D(
            ((0, 0), (padding, padding)), data_format='channels_first'
        )(shortcut)
      x = layers.ReLU()(convolve(x, channels, strides))
      x = layers.Add()([convolve(x, channels, 1), shortcut])
      x = layers.ReLU()(x)
  x = layers.GlobalAveragePooling2D()(x)
  outputs = layers.Dense(harness.NUM_CLASSES, kernel_initializer='he_normal')(x)
  return keras.Model(inputs, outputs)


def _build_centralized_steps(problem: _Problem) -> Callable[[Any], Result]:
  """Returns a function that trains on batches with plain TensorFlow."""
  import keras
  import tensorflow as tf

  keras_model = problem.model.to_keras()
  loss_fn = problem.model.loss_fn()
  (accuracy,) = problem.model.metrics_fn()
  mean_loss = keras.metrics.Mean()
  initial = problem.model.from_model_weights(problem.initial)
  variables = keras_model.trainable_weights

  @tf.function
  def make_step(x, y):
    with tf.GradientTape() as tape:
      output = keras_model(x, training=True)
      loss = loss_fn(y, output)
    gradients = tape.gradient(loss, variables)
    for variable, gradient in zip(variables, gradients):
      variable.assign_sub(_LEARNING_RATE * gradient)
    accuracy.update_state(y, output)
    mean_loss.update_state(loss)  # All batches have the same size.

  def train(batches):
    keras_model.set_weights(initial)
    accuracy.reset_state()
    mean_loss.reset_state()
    for x, y in batches:
      make_step(x, y)
    return Result(
        keras_model.get_weights(),
        [mean_loss.result().numpy(), accuracy.result().numpy()],
    )

  return train


def time_row(row: Row, repeats: int) -> Rounds:
  """Times rounds of all variants in turn.

  Args:
    row: The kind of round.
    repeats: The number of rounds to time after the first.

  Returns:
    The times and the traffic.

  Raises:
    RuntimeError: If results differ.
  """
  from tff_bn import runtime

  problem = _Problem(row, harness.unlike_clients(row, _IMAGE_SHAPES[row.model]))
  centralized_steps = _build_centralized_steps(problem)
  processes = {way: problem.build_process(way) for way in (FED_AVG, *MOMENTS)}
  times = {way: [] for way in WAYS}
  with runtime.in_process_runtime():
    states = {way: process.initialize() for way, process in processes.items()}
    for round_num in range(repeats + 1):
      results = {}
      for way in WAYS:
        if way == CENTRALIZED:
          data = list(problem.union_dataset(round_num).as_numpy_iterator())
        else:
          data = problem.client_datasets(round_num)
        # Collect the other variants' garbage before this one is timed.
        gc.collect()
        start = time.perf_counter()
        if way == CENTRALIZED:
          results[way] = centralized_steps(data)
        else:
          results[way] = problem.federated_round(
              processes[way], states[way], data
          )
        times[way].append(time.perf_counter() - start)
      problem.check(results)
    sent = {way: problem.sent(process) for way, process in processes.items()}
  timing = Timing.of(times)
  return Rounds(timing, sent)


def time_first_round(row: Row) -> FirstRound:
  """Times FedTAN's first round. Call it in a new process.

  Args:
    row: The kind of round.

  Returns:
    The times, without imports and the building of the data.
  """
  from tff_bn import algorithms
  from tff_bn import runtime

  del algorithms  # Imported before the timing starts.
  data = harness.unlike_clients(row, _IMAGE_SHAPES[row.model])
  with runtime.in_process_runtime():
    start = time.perf_counter()
    problem = _Problem(row, data)
    process = problem.build_process(TWO_PASS)
    build = time.perf_counter() - start
    seconds = []
    for round_num in range(2):
      datasets = problem.client_datasets(round_num)
      start = time.perf_counter()
      if round_num == 0:
        state = process.initialize()
      problem.federated_round(process, state, datasets)
      seconds.append(time.perf_counter() - start)
    sent = problem.sent(process)
  num_layers = len({v.batch_norm for v in problem.model.variables} - {None})
  return FirstRound(num_layers, build, *seconds, sent)


def measure(
    rows: Sequence[Row], repeats: Optional[int], first_rounds: Sequence[Row]
) -> Measurements:
  """Takes all measurements, each in a new process.

  Args:
    rows: The rounds to time.
    repeats: The number of rounds to time; `None`: each row's default.
    first_rounds: The rounds to compute in a new process.

  Returns:
    The measurements.
  """
  rounds = {}
  for row in rows:
    harness.progress(f'Timing {row} ...')
    rounds[row] = harness.in_new_process(
        time_row, row, repeats or row.default_repeats
    )
  times = {}
  for row in first_rounds:
    harness.progress(f'Timing the first round of {row} ...')
    times[row] = harness.in_new_process(time_first_round, row)
  return Measurements(
      harness.in_new_process(harness.describe_machine), rounds, times
  )


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: The measurements.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()
  lines = harness.head('Cost of FedTAN', 'fedtan', measurements.machine)
  if measurements.rounds:
    lines += _round_lines(measurements.rounds, floors)
  if measurements.first_rounds:
    lines += _first_round_lines(measurements.first_rounds, floors)
    lines += _layer_lines(measurements.first_rounds, floors)
  return '\n'.join(lines) + '\n', floors.are_met


def _round_lines(
    rounds: Mapping[Row, Rounds], floors: harness.Floors
) -> list[str]:
  rows, first_rows, ratio_rows, sent_rows = [], [], [], []
  for row, entry in rounds.items():
    timing = entry.timing
    rows.append(
        [
            str(row),
            *timing.median_cells(WAYS),
            str(len(timing.later[FED_AVG])),
        ]
    )
    first_rows.append([str(row), *timing.first_cells(WAYS)])
    for moments in MOMENTS:
      ratios = timing.ratios(moments, FED_AVG)
      centralized_ratios = timing.ratios(moments, CENTRALIZED)
      ratio_rows.append(
          [
              str(row),
              moments,
              harness.spread(ratios),
              *floors.ratio_cells(ratios, row.max_fed_avg_ratio),
              harness.spread(centralized_ratios),
              *floors.ratio_cells(
                  centralized_ratios, row.max_centralized_ratio
              ),
          ]
      )
    for way, sent in entry.sent.items():
      sent_rows.append([str(row), way, *_sent_cells(sent)])
  return [
      '',
      '## Seconds per round',
      '',
      'Clients × steps × batch size, on random images of'
      f' {_shapes_text(rounds)} pixels. Four variants take turns: FedAvg;'
      ' FedTAN with `moments` two_pass (the default) and fused; and'
      ' centralized, the same number of plain TensorFlow steps on the unions of'
      ' the batches.'
      ' Rounds run in process, with default settings. With one step, FedTAN'
      f" equals centralized training (to {_TOLERANCE:g} of the model's change)."
      ' Seconds are medians.',
      '',
      *harness.table(['Round', *WAYS, 'rounds'], rows),
      '',
      'Ratios of successive rounds: median and range.',
      '',
      *harness.table(
          [
              'Round',
              'moments',
              'FedTAN / FedAvg',
              'floor',
              'met',
              'FedTAN / centralized',
              'floor',
              'met',
          ],
          ratio_rows,
      ),
      '',
      'The first round, without building the process:',
      '',
      *harness.table(['Round', *WAYS], first_rows),
      '',
      'Traffic of a round in MB of 2^20 bytes. A broadcast counts once, uploads'
      ' count for each client.',
      '',
      *harness.table(['Round', 'algorithm', 'exchanges', 'MB'], sent_rows),
  ]


def _shapes_text(rows: Mapping[Row, Any]) -> str:
  shapes = dict.fromkeys(_IMAGE_SHAPES[row.model] for row in rows)
  return ' or '.join('×'.join(map(str, shape)) for shape in shapes)


def _sent_cells(sent: Sent) -> list[str]:
  return [str(sent.exchanges), f'{sent.megabytes:.3f}']


def _first_round_lines(
    first_rounds: Mapping[Row, FirstRound], floors: harness.Floors
) -> list[str]:
  rows = []
  for row, entry in first_rounds.items():
    limit = row.max_first_seconds
    floor_cells = ['–', '–']
    if limit is not None:
      floor_cells = [f'≤ {limit:g}', floors.check(entry.total <= limit)]
    rows.append(
        [
            str(row),
            str(entry.num_layers),
            f'{entry.build:.2f}',
            f'{entry.first:.2f}',
            f'{entry.total:.2f}',
            *floor_cells,
            f'{entry.second:.2f}',
            *_sent_cells(entry.sent),
        ]
    )
  return [
      '',
      '## First round',
      '',
      'Seconds in a new process, after imports: building the model and FedTAN'
      ' (two_pass), and the first round. The second round shows the time for'
      ' computing alone.',
      '',
      *harness.table(
          [
              'Round',
              'BN layers',
              'build',
              'first round',
              'together',
              'floor',
              'met',
              'second round',
              'exchanges',
              'MB',
          ],
          rows,
      ),
  ]


def _layer_lines(
    first_rounds: Mapping[Row, FirstRound], floors: harness.Floors
) -> list[str]:
  """Compares the two models of different depth, if both were measured."""
  small_model, large_model = _LAYER_MODELS
  rows = []
  for row, small in first_rounds.items():
    large = first_rounds.get(dataclasses.replace(row, model=large_model))
    if row.model != small_model or large is None:
      continue
    ratio = large.per_layer / small.per_layer
    rows.append(
        [
            f'{large_model} / {row}',
            f'{small.per_layer:.3f}',
            f'{large.per_layer:.3f}',
            f'{ratio:.2f}',
            f'≤ {_MAX_LAYER_RATIO:.2f}',
            floors.check(ratio <= _MAX_LAYER_RATIO),
        ]
    )
  if not rows:
    return []
  return [
      '',
      'Seconds per BN layer until the end of the first round:',
      '',
      *harness.table(
          [
              'Models',
              small_model,
              large_model,
              'ratio',
              'floor',
              'met',
          ],
          rows,
      ),
  ]


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  rows = [Row.parse(text) for text in _ROWS.value if text]
  first_rounds = [
      Row.parse(text, 'first_rounds') for text in _FIRST_ROUNDS.value if text
  ]
  return dict(rows=rows, repeats=_REPEATS.value, first_rounds=first_rounds)


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run('fedtan', arguments, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
