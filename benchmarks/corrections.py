"""Measures the time of drift corrections.

These variants take turns, round by round, in one process:

*   FedAvg.
*   FedProx, SCAFFOLD and MOON.
*   FedBS by losses, and FedBS switched: after it became FedProx.
*   clipped, warm-up: FedAvg with `client_gradient_clip_norm` and with
    `client_warmup_steps`.

The rounds run in process, with default settings. As in a training loop, each
variant continues from its last round; the time includes passing on the states
of server and clients, but not the building of the datasets.

Two checks make sure that the variants do the same work: a variant without
effect, such as FedProx with strength 0, must equal FedAvg, and a variant with
effect must differ from FedAvg. Otherwise the program ends without a report. The
program writes a Markdown report and exits with 1 if a floor is not met.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import gc
import time
from typing import Any, Optional, Self

from absl import app
from absl import flags
import harness
from harness import Result
from harness import Timing

flags.adopt_module_key_flags(harness)

_ROWS = flags.DEFINE_list(
    'rows',
    ['small_cnn:10x5x32', 'resnet20:4x5x32'],
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

FED_AVG = 'FedAvg'
FED_PROX = 'FedProx'
SCAFFOLD = 'SCAFFOLD'
MOON = 'MOON'
FED_BS_BY_LOSSES = 'FedBS by losses'
FED_BS_SWITCHED = 'FedBS switched'
CLIPPED = 'clipped'
WARM_UP = 'warm-up'

# The builder and the arguments of each variant.
_BUILDERS = {
    FED_AVG: ('build_fed_avg', {}),
    FED_PROX: ('build_fed_prox', {'proximal_strength': 0.1}),
    SCAFFOLD: ('build_scaffold', {}),
    MOON: ('build_moon', {'contrastive_weight': 1.0}),
    FED_BS_BY_LOSSES: ('build_fed_bs', {'epsilon': 1e-9}),
    # It switches after the first round, which is not timed.
    FED_BS_SWITCHED: (
        'build_fed_bs',
        {'epsilon': 1e9, 'proximal_strength': 0.1},
    ),
    CLIPPED: ('build_fed_avg', {'client_gradient_clip_norm': 0.1}),
    WARM_UP: ('build_fed_avg', {'client_warmup_steps': 1000}),
}
WAYS = tuple(_BUILDERS)
# The arguments that make a variant equal to FedAvg.
_WITHOUT_EFFECT = {
    FED_PROX: {'proximal_strength': 0.0},
    MOON: {'contrastive_weight': 0.0},
    FED_BS_SWITCHED: {'proximal_strength': 0.0},
    CLIPPED: {'client_gradient_clip_norm': 1e9},
    WARM_UP: {'client_warmup_steps': 1},
}

# Largest ratio to FedAvg, for the rows below (model, number of clients, number
# of steps). MOON computes three forward passes.
_MAX_RATIOS = {FED_PROX: 1.1, SCAFFOLD: 1.2, MOON: 2.5}
_ROWS_WITH_FLOORS = (('small_cnn', 10, 5), ('resnet20', 4, 5))
# Relative to the model's change in a round.
_TOLERANCE = 1e-3
# Smallest effect of a correction, relative to the model's change in all rounds.
_MIN_EFFECT = 1e-5

_LEARNING_RATE = 0.01

_IMAGE_SHAPES = {
    'mlp3': (8, 8, 1),
    'small_cnn': (8, 8, 1),
    'digits_cnn': (8, 8, 1),
    'resnet20': (32, 32, 3),
}


class Row(harness.Row):
  """A kind of round."""

  models = tuple(_IMAGE_SHAPES)

  @classmethod
  def parse(cls, text: str, flag: str = 'rows') -> Self:
    """See the base class."""
    row = super().parse(text, flag)
    if row.num_clients < 2 or row.num_steps < 2:
      raise ValueError(
          f'--{flag}: {text!r} has one client or one step, where there is no'
          ' drift to correct; use at least 2 of each.'
      )
    return row

  def max_ratio(self, way: str) -> Optional[float]:
    """Returns the largest ratio of a variant to FedAvg, if there is a floor."""
    key = (self.model, self.num_clients, self.num_steps)
    return _MAX_RATIOS.get(way) if key in _ROWS_WITH_FLOORS else None

  @property
  def default_repeats(self) -> int:
    """The number of rounds to time: fewer if they take long."""
    return 9 if self.model == 'resnet20' else 11


@dataclasses.dataclass(frozen=True)
class Measurements:
  """The measurements that a report shows.

  Attributes:
    machine: Lines about the machine and versions.
    timings: The times of each row.
  """

  machine: Sequence[str]
  timings: Mapping[Row, Timing]


class _Problem:
  """A row's data and model."""

  def __init__(self, row: Row):
    from tff_bn import models

    self.row = row
    self.data = harness.unlike_clients(row, _IMAGE_SHAPES[row.model])
    self.model = harness.build_classifier(
        models.build_model_fn(
            row.model, _IMAGE_SHAPES[row.model], harness.NUM_CLASSES
        ),
        self.data.element_spec,
    )
    self.initial = self.model.from_model_weights(self.model.initial_weights)

  def build_process(self, way: str, **changes: Any) -> Any:
    """Builds a federated algorithm.

    Args:
      way: The variant.
      **changes: Arguments that replace the variant's.

    Returns:
      The process.
    """
    import tensorflow_federated as tff

    from tff_bn import algorithms

    builder, arguments = _BUILDERS[way]
    return getattr(algorithms, builder)(
        self.model,
        tff.learning.optimizers.build_sgdm(_LEARNING_RATE),
        local_steps=self.row.num_steps,
        **{**arguments, **changes},
    )

  def client_datasets(self, round_num: int) -> list[Any]:
    """Returns a dataset of batches for each client."""
    return [
        self.data.client_dataset(
            [client_id],
            seed=0,
            round_num=round_num,
            batch_size=self.row.batch_size,
            local_steps=self.row.num_steps,
        )
        for client_id in self.data.client_ids
    ]

  def check(self, results: Mapping[str, Result]) -> None:
    """Raises a `RuntimeError` unless all results equal FedAvg's."""
    harness.check_results(self.row, results, FED_AVG, self.initial, _TOLERANCE)


class _Training:
  """Training in TFF's current context."""

  def __init__(self, problem: _Problem, process: Any):
    self._problem = problem
    self._process = process
    self._state = process.initialize()
    self._client_states = None
    if hasattr(process, 'initialize_client'):
      self._client_states = [
          process.initialize_client(self._state)
          for _ in range(problem.row.num_clients)
      ]
    self._metrics = None

  def next_round(self, datasets: Sequence[Any]) -> None:
    """Computes a round."""
    if self._client_states is None:
      output = self._process.next(self._state, datasets)
    else:
      output = self._process.next(self._state, self._client_states, datasets)
      self._client_states = output.client_states
    self._state, self._metrics = output.state, output.metrics

  def start_from(self, weights: Any) -> None:
    """Replaces the server's model."""
    self._state = self._process.set_model_weights(self._state, weights)

  @property
  def result(self) -> Result:
    """The model, and the metrics of the last round."""
    train = self._metrics['client_work']['train']
    return Result(
        self._problem.model.from_model_weights(
            self._process.get_model_weights(self._state)
        ),
        [train['loss'], train['accuracy']],
    )

  @property
  def is_switched(self) -> bool:
    """Whether FedBS has become FedProx."""
    correction = self._metrics['client_work']['correction']
    return bool(correction['switched_to_fedprox'])


def check_without_effect(problem: _Problem, fed_avg: Result) -> None:
  """Checks that variants without effect equal FedAvg.

  Args:
    problem: The problem.
    fed_avg: FedAvg's result after two rounds. (MOON has no effect in the first
      round.)

  Raises:
    RuntimeError: If results differ.
  """
  for way, arguments in _WITHOUT_EFFECT.items():
    training = _Training(problem, problem.build_process(way, **arguments))
    if way == FED_BS_SWITCHED:
      training.next_round(problem.client_datasets(0))
      training.start_from(problem.model.initial_weights)
    for round_num in range(2):
      training.next_round(problem.client_datasets(round_num))
    problem.check({way: training.result, FED_AVG: fed_avg})


def check_first_round(problem: _Problem, results: Mapping[str, Result]) -> None:
  """Checks the variants that have no effect in the first round yet.

  Args:
    problem: The problem.
    results: The results of the first round, by variant.

  Raises:
    RuntimeError: If results differ.
  """
  fed_avg = results[FED_AVG]
  # FedBS's clients train as FedAvg's; only the weights of the mean differ.
  by_losses = Result(fed_avg.weights, results[FED_BS_BY_LOSSES].metrics)
  problem.check(
      {
          # Control variates are 0, and previous models are the server's.
          SCAFFOLD: results[SCAFFOLD],
          MOON: results[MOON],
          FED_BS_BY_LOSSES: by_losses,
          FED_AVG: fed_avg,
      }
  )


def check_effects(problem: _Problem, trainings: Mapping[str, _Training]):
  """Checks that every variant differs from FedAvg.

  Args:
    problem: The problem.
    trainings: All trainings, after their last round.

  Raises:
    RuntimeError: If a variant equals FedAvg, or FedBS switched when it should
      not have, or the reverse.
  """
  import numpy as np

  def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights]).astype(np.float64)

  fed_avg = flat(trainings[FED_AVG].result.weights)
  change = np.linalg.norm(fed_avg - flat(problem.initial))
  for way in WAYS[1:]:
    weights = flat(trainings[way].result.weights)
    effect = np.linalg.norm(weights - fed_avg) / change
    # Not `<`: NaN must fail.
    if not effect >= _MIN_EFFECT:
      raise RuntimeError(
          f'{problem.row}: the model of {way!r} differs from the'
          f" model of {FED_AVG!r} by {effect:.1e} of the model's change; at"
          f' least {_MIN_EFFECT} is expected.'
      )
  for way, is_switched in (FED_BS_BY_LOSSES, False), (FED_BS_SWITCHED, True):
    if trainings[way].is_switched != is_switched:
      raise RuntimeError(
          f'{problem.row}: {way!r} has{" not" if is_switched else ""} become'
          ' FedProx.'
      )


def time_row(row: Row, repeats: int) -> Timing:
  """Times rounds of all variants in turn.

  Args:
    row: The kind of round.
    repeats: The number of rounds to time after the first.

  Returns:
    The times.

  Raises:
    RuntimeError: If a variant has a wrong result.
  """
  from tff_bn import runtime

  problem = _Problem(row)
  times = {way: [] for way in WAYS}
  with runtime.in_process_runtime():
    trainings = {
        way: _Training(problem, problem.build_process(way)) for way in WAYS
    }
    for round_num in range(repeats + 1):
      # Rotate the order, so that no variant always follows the same one.
      first = round_num % len(WAYS)
      for way in WAYS[first:] + WAYS[:first]:
        datasets = problem.client_datasets(round_num)
        # Collect the other variants' garbage before this one is timed.
        gc.collect()
        start = time.perf_counter()
        trainings[way].next_round(datasets)
        times[way].append(time.perf_counter() - start)
      if round_num == 0:
        results = {way: t.result for way, t in trainings.items()}
        check_first_round(problem, results)
      if round_num == 1:
        check_without_effect(problem, trainings[FED_AVG].result)
    check_effects(problem, trainings)
  return Timing.of(times)


def measure(rows: Sequence[Row], repeats: Optional[int]) -> Measurements:
  """Measures each row in a new process.

  Args:
    rows: The rounds to time.
    repeats: The number of rounds to time; `None`: each row's default.

  Returns:
    The measurements.
  """
  timings = {}
  for row in rows:
    harness.progress(f'Timing {row} ...')
    timings[row] = harness.in_new_process(
        time_row, row, repeats or row.default_repeats
    )
  return Measurements(harness.in_new_process(harness.describe_machine), timings)


def report(measurements: Measurements) -> tuple[str, bool]:
  """Writes the report.

  Args:
    measurements: The measurements.

  Returns:
    The report in Markdown, and whether all floors are met.
  """
  floors = harness.Floors()
  rows, ratio_rows, first_rows = [], [], []
  for row, timing in measurements.timings.items():
    rows.append(
        [
            str(row),
            *timing.median_cells(WAYS),
            str(len(timing.later[FED_AVG])),
        ]
    )
    first_rows.append([str(row), *timing.first_cells(WAYS)])
    for way in WAYS[1:]:
      ratios = timing.ratios(way, FED_AVG)
      ratio_rows.append(
          [
              str(row),
              way,
              harness.spread(ratios),
              *floors.ratio_cells(ratios, row.max_ratio(way)),
          ]
      )
  shapes = dict.fromkeys(
      _IMAGE_SHAPES[row.model] for row in measurements.timings
  )
  shapes_text = ' or '.join('×'.join(map(str, shape)) for shape in shapes)
  lines = [
      *harness.head(
          'Cost of drift corrections', 'corrections', measurements.machine
      ),
      '',
      '## Seconds per round',
      '',
      f'Clients × steps × batch size, on random images of {shapes_text} pixels.'
      ' These variants take turns: FedAvg; FedProx; SCAFFOLD; MOON; FedBS'
      ' before and after it became FedProx; and FedAvg with clipped gradients'
      ' and with warm-up. Rounds run in process, with default settings. Each'
      ' variant continues its training from round to round; the times include'
      ' passing on client states. Variants without effect, such as FedProx with'
      f" strength 0, equal FedAvg (to {_TOLERANCE:g} of the model's change)."
      ' Seconds are medians.',
      '',
      *harness.table(['Round', *WAYS, 'rounds'], rows),
      '',
      'Ratios within each turn: median and range.',
      '',
      *harness.table(
          ['Round', 'variant', 'variant / FedAvg', 'floor', 'met'], ratio_rows
      ),
      '',
      'The first round, without building the process:',
      '',
      *harness.table(['Round', *WAYS], first_rows),
  ]
  return '\n'.join(lines) + '\n', floors.are_met


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  return dict(rows=Row.parse_all(_ROWS.value), repeats=_REPEATS.value)


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run('corrections', arguments, _parse_flags, measure, report)


if __name__ == '__main__':
  app.run(main)
