"""Measures what TensorFlow gains from oneDNN, which `import tff_bn` asks for.

The same rounds of FedAvg run with and without oneDNN. A process decides when it
imports TensorFlow, so each of them has its own, and they take turns.

The program writes a Markdown report and exits with 1 if a floor is not met.
"""

from collections.abc import Sequence
import dataclasses
import os
import time
from typing import Any
from unittest import mock

from absl import app
from absl import flags
import harness

from tff_bn.imports import onednn

flags.adopt_module_key_flags(harness)

# By the name in reports and flags: a model of `tff_bn.models`, and its images.
_MODELS = {
    'small_cnn_8': ('small_cnn', (8, 8, 1)),
    'small_cnn_16': ('small_cnn', (16, 16, 1)),
    'small_cnn_28': ('small_cnn', (28, 28, 1)),
    'digits_cnn': ('digits_cnn', (28, 28, 3)),
    'resnet20': ('resnet20', (32, 32, 3)),
    'vgg11': ('vgg11', (32, 32, 3)),
}
_ROWS = flags.DEFINE_list(
    'rows',
    [
        *('small_cnn_8:100x1x2', 'small_cnn_8:10x5x32'),
        *('small_cnn_16:10x5x32', 'small_cnn_28:10x5x32'),
        *('digits_cnn:4x3x32', 'resnet20:4x2x32', 'vgg11:2x2x32'),
    ],
    'Rounds to time, each as MODEL:CLIENTSxSTEPSxBATCH with a model of'
    f' {", ".join(_MODELS)}.',
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 3, 'Number of processes of each kind.', lower_bound=1
)

# The value of TensorFlow's variable, by the heading in the report.
_WAYS = {'with': '1', 'without': '0'}
_ROUNDS = 6
# The largest ratio with / without. Images of 8 × 8 pixels have no floor: there,
# oneDNN gains nothing.
_MAX_RATIO = 1.0
_WITHOUT_FLOOR = ('small_cnn_8',)


class Row(harness.Row):
  """A kind of round."""

  models = tuple(_MODELS)


def time_round(row: Row) -> float:
  """Returns the seconds of the fastest round but the first."""
  import tensorflow_federated as tff

  from tff_bn import algorithms
  from tff_bn import models
  from tff_bn import runtime

  name, shape = _MODELS[row.model]
  data = harness.unlike_clients(row, shape)
  datasets = [
      data.client_dataset(
          [client],
          seed=0,
          round_num=0,
          batch_size=row.batch_size,
          local_steps=row.num_steps,
      )
      for client in data.client_ids
  ]
  model = harness.build_classifier(
      models.build_model_fn(name, shape, harness.NUM_CLASSES),
      data.element_spec,
  )
  process = algorithms.build_fed_avg(
      model, tff.learning.optimizers.build_sgdm(0.01)
  )
  seconds = []
  with runtime.in_process_runtime():
    state = process.initialize()
    for _ in range(_ROUNDS):
      start = time.perf_counter()
      state = process.next(state, datasets).state
      seconds.append(time.perf_counter() - start)
  return min(seconds[1:])


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    seconds: For each row, the seconds of each process by the key of `_WAYS`.
  """

  machine: Sequence[str]
  seconds: dict[Row, dict[str, list[float]]]


def measure(rows: Sequence[Row], repeats: int) -> Measurements:
  """Measures rounds in new processes.

  Args:
    rows: The kinds of rounds.
    repeats: The number of processes of each kind.

  Returns:
    The measurements.
  """
  seconds: dict[Row, dict[str, list[float]]] = {}
  for row in rows:
    harness.progress(f'Timing {row} ...')
    seconds[row] = {way: [] for way in _WAYS}
    for _ in range(repeats):
      for way, value in _WAYS.items():
        with mock.patch.dict(os.environ, {onednn.VARIABLE: value}):
          seconds[row][way].append(harness.in_new_process(time_round, row))
  return Measurements(harness.in_new_process(harness.describe_machine), seconds)


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: The measurements.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()
  cells = []
  for row, seconds in measurements.seconds.items():
    ratios = [a / b for a, b in zip(seconds['with'], seconds['without'])]
    limit = None if row.model in _WITHOUT_FLOOR else _MAX_RATIO
    cells.append(
        [
            str(row),
            *(f'{min(seconds[way]):.3f}' for way in _WAYS),
            harness.spread(ratios),
            *floors.ratio_cells(ratios, limit),
        ]
    )
  lines = [
      *harness.head('oneDNN', 'onednn', measurements.machine),
      '',
      '## Seconds per round',
      '',
      "FedAvg, clients × steps × batch, with and without TensorFlow's use of"
      f' oneDNN (`{onednn.VARIABLE}`). The number at the end of `small_cnn` is'
      ' the width of its images. The fastest'
      f' of {_ROUNDS - 1} rounds in each process, and of these the fastest;'
      ' the ratios are of successive processes.',
      '',
      *harness.table(
          ['Round', *_WAYS, 'with / without', 'floor', 'met'], cells
      ),
  ]
  return '\n'.join(lines) + '\n', floors.are_met


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  return dict(rows=Row.parse_all(_ROWS.value), repeats=_REPEATS.value)


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run('onednn', arguments, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
