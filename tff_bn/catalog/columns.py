"""The columns of results: one entry for each, which tables and plots read.

A column is a column of `metrics.csv` and of `results.csv`, with one value for
each evaluated round and for each run.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kind:
  """What the numbers of a column are.

  Attributes:
    name: The beginning of the names of their plots.
    title: Their name on the axis of a plot.
    is_averaged: Whether `results.csv` has the mean over the last evaluated
      rounds, tables have the deviation over the seeds, and plots have a curve.
      Otherwise `results.csv` has the value of the last round.
    higher_is_better: Which of two numbers is better; None if neither is.
    factor: Tables show the number multiplied by it.
    digits: The digits after the point in tables.
    axis_format: The format on the axis of a plot, as d3 writes it.
    is_logarithmic: Whether the axis of a plot is logarithmic.
    range: The smallest and the largest possible number, where bands end.
  """

  name: str
  title: str
  is_averaged: bool = False
  higher_is_better: bool | None = None
  factor: float = 1.0
  digits: int = 2
  axis_format: str = '~g'
  is_logarithmic: bool = False
  range: tuple[float, float] | None = None


ACCURACY = Kind(
    'accuracy',
    'Accuracy',
    is_averaged=True,
    higher_is_better=True,
    factor=100.0,
    digits=1,
    axis_format='~%',
    range=(0, 1),
)
# With wrong BN statistics, losses differ by orders of magnitude.
LOSS = Kind(
    'loss',
    'Loss (cross-entropy)',
    is_averaged=True,
    higher_is_better=False,
    is_logarithmic=True,
)
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
  """

  name: str
  title: str
  kind: Kind
  explanation: str = ''
  in_table: bool = True
  axis_title: str = ''


# In the order of `results.csv`. Tables and plots have the accuracies first.
COLUMNS = (
    Column('test_accuracy', 'Accuracy, %', ACCURACY),
    Column('test_loss', 'Loss', LOSS),
    Column('client_test_accuracy', 'Client accuracy, %', ACCURACY),
    Column('client_test_loss', 'Client loss', LOSS, in_table=False),
    Column('train_loss', 'Training loss', LOSS),
    Column('rounds', 'Rounds', COUNT, 'trained'),
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


def averaged() -> list[Column]:
  """Returns the columns with means over the last rounds and with curves."""
  return [column for column in COLUMNS if column.kind.is_averaged]


def costs() -> list[Column]:
  """Returns the columns against which curves are drawn."""
  return [column for column in COLUMNS if column.axis_title]


def by_kind() -> list[Column]:
  """Returns all columns as tables and plots show them: kind after kind."""
  kinds = list(dict.fromkeys(column.kind for column in COLUMNS))
  return sorted(COLUMNS, key=lambda column: kinds.index(column.kind))
