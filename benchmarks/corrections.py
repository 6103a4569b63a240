"""Measures what the corrections of the clients' drift cost.

FedAvg and ways to train that do more in their steps or keep more take turns,
round by round, in one process:

*   FedProx, SCAFFOLD and MOON.
*   FedBS by losses, and FedBS switched, after it became FedProx.
*   clipped, warm-up: FedAvg with `client_gradient_clip_norm` and with
    `client_warmup_steps`.

The rounds run in process, with default settings. Each way trains on from round
to round, as a training loop does: what a round returns of the server and of the
clients is given to the next one, and the time includes that. The building of
the datasets is not timed.

So that the same work is timed, a round in which a correction has no effect,
like that of FedProx with strength 0, has to have FedAvg's result; and after the
timed rounds, in which it has one, the models have to differ. Otherwise the
program ends without a report. It writes a Markdown report and exits with 1 if a
floor is not met.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import gc
import pathlib
import statistics
import time
from typing import Any, Optional, Self

from absl import app
from absl import flags
import harness
from harness import Result
from harness import Timing

_ROWS = flags.DEFINE_list(
    'rows',
    ['small_cnn:10x5x32', 'resnet20:4x5x32'],
    'Which rounds to time, each as MODEL:CLIENTSxSTEPSxBATCH; see the report'
    ' for the models. The data are random images.',
)
_REPEATS = flags.DEFINE_integer(
    'repeats',
    None,
    'How many rounds to time in each way, after a first one. Default: the more,'
    ' the shorter they are.',
    lower_bound=1,
)
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir',
    str(pathlib.Path(__file__).resolve().parent / 'results'),
    'Folder for the report, corrections.md.',
)

FED_AVG = 'FedAvg'
FED_PROX = 'FedProx'
SCAFFOLD = 'SCAFFOLD'
MOON = 'MOON'
FED_BS_BY_LOSSES = 'FedBS by losses'
FED_BS_SWITCHED = 'FedBS switched'
CLIPPED = 'clipped'
WARM_UP = 'warm-up'

# How a way differs from FedAvg: the name of its builder and its arguments.
_BUILDERS = {
    FED_AVG: ('build_fed_avg', {}),
    FED_PROX: ('build_fed_prox', {'proximal_strength': 0.1}),
    SCAFFOLD: ('build_scaffold', {}),
    MOON: ('build_moon', {'contrastive_weight': 1.0}),
    FED_BS_BY_LOSSES: ('build_fed_bs', {'epsilon': 1e-9}),
    # It switches after the first round, which does not count.
    FED_BS_SWITCHED: (
        'build_fed_bs',
        {'epsilon': 1e9, 'proximal_strength': 0.1},
    ),
    CLIPPED: ('build_fed_avg', {'client_gradient_clip_norm': 0.1}),
    WARM_UP: ('build_fed_avg', {'client_warmup_steps': 1000}),
}
WAYS = tuple(_BUILDERS)
# The arguments with which a way has the result of FedAvg.
_WITHOUT_EFFECT = {
    FED_PROX: {'proximal_strength': 0.0},
    MOON: {'contrastive_weight': 0.0},
    FED_BS_SWITCHED: {'proximal_strength': 0.0},
    CLIPPED: {'client_gradient_clip_norm': 1e9},
    WARM_UP: {'client_warmup_steps': 1},
}

# How much longer than one of FedAvg a round may take, for these models, numbers
# of clients and of steps. MOON computes three forward passes.
_MAX_RATIOS = {FED_PROX: 1.1, SCAFFOLD: 1.2, MOON: 2.5}
_ROWS_WITH_FLOORS = (('small_cnn', 10, 5), ('resnet20', 4, 5))
# Of the model's change in a round.
_TOLERANCE = 1e-3
# Of the model's change in all rounds: how much a correction changes at least.
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
          ' drift to correct; use at least 2 of both.'
      )
    return row

  def max_ratio(self, way: str) -> Optional[float]:
    """How much longer than a round of FedAvg one of this way may take."""
    key = (self.model, self.num_clients, self.num_steps)
    return _MAX_RATIOS.get(way) if key in _ROWS_WITH_FLOORS else None

  @property
  def default_repeats(self) -> int:
    """How many rounds are timed: fewer where they take long."""
    return 9 if self.model == 'resnet20' else 11


@dataclasses.dataclass(frozen=True)
class Measurements:
  """All that is reported.

  Attributes:
    machine: Lines about the machine and versions.
    timings: By row.
  """

  machine: Sequence[str]
  timings: Mapping[Row, Timing]


class _Problem:
  """A row's data and model."""

  def __init__(self, row: Row):
    from tff_bn import models  # pylint: disable=g-import-not-at-top

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
      way: Which one.
      **changes: Other values of its arguments.

    Returns:
      The process.
    """
    # pylint: disable=g-import-not-at-top
    import tensorflow_federated as tff

    from tff_bn import algorithms

    # pylint: enable=g-import-not-at-top
    builder, arguments = _BUILDERS[way]
    return getattr(algorithms, builder)(
        self.model,
        tff.learning.optimizers.build_sgdm(_LEARNING_RATE),
        local_steps=self.row.num_steps,
        **{**arguments, **changes},
    )

  def client_datasets(self, round_num: int) -> list[Any]:
    """The batches of all clients, one dataset for each."""
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
    """Raises a `RuntimeError` unless all have the result of FedAvg's round."""
    harness.check_results(self.row, results, FED_AVG, self.initial, _TOLERANCE)


class _Training:
  """A training in TFF's current context."""

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
    """Continues with this model of the server."""
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
    """Of FedBS: whether it has become FedProx."""
    correction = self._metrics['client_work']['correction']
    return bool(correction['switched_to_fedprox'])


def check_without_effect(problem: _Problem, fed_avg: Result) -> None:
  """Checks the ways that can be made to have FedAvg's result.

  Args:
    problem: The problem.
    fed_avg: FedAvg's result after two rounds. (In the first one, MOON has no
      effect anyway.)

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
  """Checks the first round of ways that do not have their effect in it yet.

  Args:
    problem: The problem.
    results: The results of the first round, by way.

  Raises:
    RuntimeError: If results differ.
  """
  fed_avg = results[FED_AVG]
  # The clients of FedBS train as those of FedAvg; only their mean is another.
  by_losses = Result(fed_avg.weights, results[FED_BS_BY_LOSSES].metrics)
  problem.check(
      {
          # All control variates are 0, and all models those of the server.
          SCAFFOLD: results[SCAFFOLD],
          MOON: results[MOON],
          FED_BS_BY_LOSSES: by_losses,
          FED_AVG: fed_avg,
      }
  )


def check_effects(problem: _Problem, trainings: Mapping[str, _Training]):
  """Checks that no way is FedAvg under another name.

  Args:
    problem: The problem.
    trainings: All trainings, after their last round.

  Raises:
    RuntimeError: If one of them had FedAvg's result, or FedBS has not or should
      not have switched.
  """
  import numpy as np  # pylint: disable=g-import-not-at-top

  def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights]).astype(np.float64)

  fed_avg = flat(trainings[FED_AVG].result.weights)
  change = np.linalg.norm(fed_avg - flat(problem.initial))
  for way in WAYS[1:]:
    weights = flat(trainings[way].result.weights)
    effect = np.linalg.norm(weights - fed_avg) / change
    # Not `<`: an effect that is not a number is none.
    if not effect >= _MIN_EFFECT:
      raise RuntimeError(
          f'{problem.row}: the model of {way!r} differs from that of'
          f" {FED_AVG!r} by {effect:.1e} of the model's change; at least"
          f' {_MIN_EFFECT} is expected.'
      )
  for way, is_switched in (FED_BS_BY_LOSSES, False), (FED_BS_SWITCHED, True):
    if trainings[way].is_switched != is_switched:
      raise RuntimeError(
          f'{problem.row}: {way!r} has{" not" if is_switched else ""} become'
          ' FedProx.'
      )


def time_row(row: Row, repeats: int) -> Timing:
  """Times rounds in all ways, which take turns.

  Args:
    row: The kind of round.
    repeats: How many rounds, besides the first.

  Returns:
    The times.

  Raises:
    RuntimeError: If a way does not do what it should.
  """
  from tff_bn import runtime  # pylint: disable=g-import-not-at-top

  problem = _Problem(row)
  times = {way: [] for way in WAYS}
  with runtime.in_process_runtime():
    trainings = {
        way: _Training(problem, problem.build_process(way)) for way in WAYS
    }
    for round_num in range(repeats + 1):
      # Each way follows each other one in its turn.
      first = round_num % len(WAYS)
      for way in WAYS[first:] + WAYS[:first]:
        datasets = problem.client_datasets(round_num)
        # What the others left is not cleared away at this one's expense.
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
  """Measures every row in a process of its own.

  Args:
    rows: The rounds to time.
    repeats: How many of each; `None`: as each row says.

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
  """Makes the report.

  Args:
    measurements: What was measured.

  Returns:
    Markdown text, and whether all floors are met.
  """
  floors = harness.Floors()
  rows, ratio_rows, first_rows = [], [], []
  for row, timing in measurements.timings.items():
    rows.append(
        [
            str(row),
            *(f'{statistics.median(timing.later[way]):.3f}' for way in WAYS),
            str(len(timing.later[FED_AVG])),
        ]
    )
    first_rows.append([str(row), *(f'{timing.first[way]:.2f}' for way in WAYS)])
    for way in WAYS[1:]:
      ratios = timing.ratios(way, FED_AVG)
      limit, floor_cells = row.max_ratio(way), ['–', '–']
      if limit is not None:
        is_met = statistics.median(ratios) <= limit
        floor_cells = [f'≤ {limit:.2f}', floors.check(is_met)]
      ratio_rows.append([str(row), way, harness.spread(ratios), *floor_cells])
  shapes = dict.fromkeys(
      _IMAGE_SHAPES[row.model] for row in measurements.timings
  )
  shapes_text = ' or '.join('×'.join(map(str, shape)) for shape in shapes)
  lines = [
      *harness.head(
          'What corrections of drift cost', 'corrections', measurements.machine
      ),
      '',
      '## Seconds per round',
      '',
      f'Clients × steps × batch size, on random images of {shapes_text} pixels,'
      ' in ways that take turns: FedAvg; FedProx; SCAFFOLD; MOON; FedBS before'
      ' and after it became FedProx; and FedAvg with clipped gradients and with'
      ' warm-up. Rounds run in process, with default settings, and each way'
      ' trains on from round to round; handing over what the clients keep is'
      ' included. Where they have no effect, like FedProx with strength 0, the'
      f" results are FedAvg's (to {_TOLERANCE:g} of the model's change)."
      ' Seconds are medians.',
      '',
      *harness.table(['Round', *WAYS, 'rounds'], rows),
      '',
      'How much longer than FedAvg it takes: the medians (and ranges) of the'
      ' ratios within each turn.',
      '',
      *harness.table(
          ['Round', 'way', 'way / FedAvg', 'floor', 'met'], ratio_rows
      ),
      '',
      'The first round, without the building of the processes:',
      '',
      *harness.table(['Round', *WAYS], first_rows),
  ]
  return '\n'.join(lines) + '\n', floors.are_met


def _parse_flags() -> dict[str, Any]:
  """The arguments of `measure`."""
  rows = [Row.parse(text) for text in _ROWS.value if text]
  if not rows:
    raise ValueError('--rows is empty; name at least one round.')
  return dict(rows=rows, repeats=_REPEATS.value)


def main(arguments: Sequence[str]) -> int:
  """Measures, prints and writes the report."""
  return harness.run(
      'corrections', arguments, _OUTPUT_DIR.value, _parse_flags, measure, report
  )


if __name__ == '__main__':
  app.run(main)
