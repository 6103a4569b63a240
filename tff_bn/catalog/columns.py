"""The columns of results: one entry for each, which tables and plots read.

A column is a column of `metrics.csv` and of `results.csv`, with one value for
each evaluated round and for each run. The metrics of a run decide its columns,
see `of`; `tff_bn.catalog.tasks.METRICS` has the kinds of their numbers.
"""

from collections.abc import Iterable, Sequence
import dataclasses


@dataclasses.dataclass(frozen=True)
class Kind:
  """What the numbers of a column are.

  Attributes:
    name: The name of the metric, which is the beginning of the names of its
      plots.
    title: Their name on the axis of a plot.
    word: Their name in a sentence.
    is_averaged: Whether `results.csv` has the mean over the last evaluated
      rounds, tables have the deviation over the seeds, and plots have a curve.
      Otherwise `results.csv` has the value of the last round.
    higher_is_better: Which of two numbers is better; None if neither is.
    factor: Tables show the number multiplied by it.
    digits: The digits after the point in tables.
    axis_format: The format on the axis of a plot, as d3 writes it.
    is_logarithmic: Whether the axis of a plot is logarithmic.
    range: The smallest and the largest possible number, where bands end; None:
      there is none.
  """

  name: str
  title: str
  word: str = ''
  is_averaged: bool = False
  higher_is_better: bool | None = None
  factor: float = 1.0
  digits: int = 2
  axis_format: str = '~g'
  is_logarithmic: bool = False
  range: tuple[float | None, float | None] = (None, None)

  @property
  def is_share(self) -> bool:
    """Whether tables and axes show percentages."""
    return self.factor == 100

  @property
  def unit(self) -> str:
    """The unit in titles, behind a comma."""
    return ', %' if self.is_share else ''

  def text(self, number: float) -> str:
    """Returns a number as tables show it."""
    return f'{self.factor * number:.{self.digits}f}'

  @property
  def heading(self) -> str:
    """The word at the beginning of a text."""
    return _begin(self.word)

  @property
  def has_direction(self) -> bool:
    """Whether one of two numbers is better."""
    return self.higher_is_better is not None


def _begin(text: str) -> str:
  """Returns a text with a capital letter in front."""
  return text[:1].upper() + text[1:]


def share(name: str, word: str) -> Kind:
  """Returns the kind of a metric from 0 to 1 that tables show in percent."""
  return Kind(
      name,
      _begin(word),
      word,
      is_averaged=True,
      higher_is_better=True,
      factor=100.0,
      digits=1,
      axis_format='~%',
      range=(0, 1),
  )


def number(
    name: str,
    word: str,
    higher_is_better: bool | None = None,
    largest: float | None = None,
) -> Kind:
  """Returns the kind of a metric that tables show as it is.

  `largest` is the largest possible number, if there is one.
  """
  # Readers expect that higher is better.
  direction = ' (lower is better)' if higher_is_better is False else ''
  return Kind(
      name,
      f'{_begin(word)}{direction}',
      word,
      is_averaged=True,
      higher_is_better=higher_is_better,
      digits=3,
      range=(None, largest),
  )


# With wrong BN statistics, losses differ by orders of magnitude.
LOSS = Kind(
    'loss',
    'Loss',
    'loss',
    is_averaged=True,
    higher_is_better=False,
    is_logarithmic=True,
)


# See `tff_bn.training.detailed_reports`.
CALIBRATION_ERROR = dataclasses.replace(
    share('calibration_error', 'expected calibration error'),
    higher_is_better=False,
)


def loss(word: str) -> Kind:
  """Returns the kind of a loss, given its name in words."""
  return dataclasses.replace(LOSS, title=f'Loss ({word})')


COUNT = Kind('count', 'Number', digits=0)
SIZE = Kind('size', 'MB')


@dataclasses.dataclass(frozen=True)
class Column:
  """A column of results.

  Attributes:
    name: Its name in `metrics.csv` and `results.csv`.
    title: Its title in the table of a comparison.
    kind: What its numbers are.
    explanation: Its meaning, for the lines below the table. Default: what it is
      measured on, see `tff_bn.training.measures`.
    in_table: Whether the table of a comparison has it.
    axis_title: Its title as the horizontal axis of curves; empty if it is none.
    has_curve: Whether plots have a curve, if its kind is averaged.
    is_optional: Whether results leave it out if no run has it.
  """

  name: str
  title: str
  kind: Kind
  explanation: str = ''
  in_table: bool = True
  axis_title: str = ''
  has_curve: bool = True
  is_optional: bool = False


# What `--client_filter` adds to `metrics.csv`.
FILTERED_CLIENTS = Column(
    'num_filtered_clients',
    'Left out',
    COUNT,
    'clients that --client_filter left out of the mean in the round',
)
# What `--privacy` adds to `metrics.csv`.
CLIPPED_CLIENTS = Column(
    'clipped_clients',
    'Clipped',
    COUNT,
    'how often values of clients were out of the bounds of secure sums in the'
    ' round',
)
EPSILON = Column(
    'epsilon',
    'ε',
    dataclasses.replace(COUNT, name='epsilon', title='ε', digits=2),
    'of (ε, δ)-differential privacy of the clients after all rounds, with'
    ' --dp_delta',
    is_optional=True,
)
# The columns of every run, after the ones of its metrics and its losses.
_OF_ALL_RUNS = (
    Column('rounds', 'Rounds', COUNT, 'trained'),
    Column(
        'best_round',
        'Best round',
        COUNT,
        'the round that --keep_best chooses, of which the metrics and losses'
        ' are',
        is_optional=True,
    ),
    EPSILON,
    Column(
        'exchanges',
        'Exchanges',
        COUNT,
        'messages to all clients and back, in all rounds',
        axis_title='Exchanges between server and clients',
    ),
    Column(
        'megabytes',
        'MB',
        SIZE,
        'sent in these exchanges: once to all clients, and back by each client'
        ' (2^20 bytes)',
        axis_title='MB sent',
    ),
)


def of(metrics: Sequence[Kind], loss_kind: Kind = LOSS) -> tuple[Column, ...]:
  """Returns the columns of runs with these metrics, as `results.csv` has them.

  The first metric is the main one: tables have its mean over the clients, too.
  """
  measured = []
  for prefix, words, is_main, is_optional in (
      ('test_', '', True, False),
      ('client_test_', 'Client ', False, False),
      ('validation_', 'Validation ', False, True),
  ):
    for position, kind in enumerate(metrics):
      measured.append(
          Column(
              f'{prefix}{kind.name}',
              _begin(f'{words}{kind.word}{kind.unit}'),
              kind,
              in_table=is_main or not position,
              is_optional=is_optional,
          )
      )
    measured.append(
        Column(
            f'{prefix}{loss_kind.name}',
            _begin(f'{words}{loss_kind.word}'),
            loss_kind,
            in_table=is_main,
            is_optional=is_optional,
        )
    )
  for prefix, words in (
      ('client_deviation_', 'deviation over clients'),
      ('client_worst_tenth_', 'worst tenth of clients'),
  ):
    kind = [*metrics, loss_kind][0]
    measured.append(
        Column(
            f'{prefix}{kind.name}',
            f'{kind.heading}, {words}{kind.unit}',
            kind,
            in_table=False,
            has_curve=False,
            is_optional=True,
        )
    )
  return (
      *measured,
      Column(f'train_{loss_kind.name}', 'Training loss', loss_kind),
      Column(
          f'client_train_{loss_kind.name}',
          'Client training loss',
          loss_kind,
          is_optional=True,
      ),
      *_OF_ALL_RUNS,
  )


def averaged(columns: Iterable[Column]) -> list[Column]:
  """Returns the columns with means over the last rounds and with curves."""
  return [column for column in columns if column.kind.is_averaged]


def costs() -> list[Column]:
  """Returns the columns against which curves are drawn."""
  return [column for column in _OF_ALL_RUNS if column.axis_title]


def by_kind(columns: Sequence[Column]) -> list[Column]:
  """Returns columns as tables and plots show them: kind after kind."""
  kinds = list(dict.fromkeys(column.kind for column in columns))
  return sorted(columns, key=lambda column: kinds.index(column.kind))
