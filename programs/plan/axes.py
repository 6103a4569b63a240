"""What a comparison varies: axes of labeled points, which set flags.

A comparison makes one run for each combination of a point of every axis and a
seed. `--algorithms=fedavg,fbn` is an axis of two points, `--sweep=gamma=0,0.5`
another one.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools

# The name of the axis of --algorithms, and of the flag that it sets.
ALGORITHM = 'algorithm'


@dataclasses.dataclass(frozen=True)
class Point:
  """A point of an axis.

  Attributes:
    label: Its name in tables, plots and folders.
    flags: The texts of the flags that it sets, by name.
  """

  label: str
  flags: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Axis:
  """One thing that a comparison varies, such as the algorithm or a flag.

  Attributes:
    name: Its name, which is the title of a column. A swept flag gives its name
      to its axis.
    points: Its points, in the order of tables and legends.
  """

  name: str
  points: tuple[Point, ...]

  def __str__(self) -> str:
    """Returns the axis of a swept flag as the value of `--sweep`."""
    return f'{self.name}={",".join(point.label for point in self.points)}'

  @property
  def flags(self) -> tuple[str, ...]:
    """The names of the flags that some point sets, in order."""
    names = itertools.chain.from_iterable(point.flags for point in self.points)
    return tuple(dict.fromkeys(names))


@dataclasses.dataclass(frozen=True)
class Cell:
  """A combination of a point of every axis.

  Attributes:
    labels: The points' labels by the axes' names.
    flags: The flags of all its points.
  """

  labels: Mapping[str, str]
  flags: Mapping[str, str]


def product(axes: Sequence[Axis]) -> list[Cell]:
  """Returns all combinations of points; the last axis varies fastest.

  If two axes set the same flag, the later one counts.
  """
  cells = []
  for points in itertools.product(*(axis.points for axis in axes)):
    flags: dict[str, str] = {}
    for point in points:
      flags.update(point.flags)
    labels = {axis.name: point.label for axis, point in zip(axes, points)}
    cells.append(Cell(labels, flags))
  return cells


def describe(labels: Mapping[str, str]) -> str:
  """Returns labels as one text, such as `fedavg, gamma=0.5`."""
  names = sorted(labels, key=lambda name: name != ALGORITHM)
  return ', '.join(
      labels[name] if name == ALGORITHM else f'{name}={labels[name]}'
      for name in names
  )
