"""The runs of a comparison, with their names and folders.

Nothing here imports TensorFlow or touches files.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import re
from typing import Optional

from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_folder

_UNSAFE = re.compile('[^A-Za-z0-9.+=_-]')
_MAX_NAME_LENGTH = 150


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of a comparison, which is a cell of the table of results.

  Attributes:
    labels: The labels of its points by the axes' names.
    settings: Its settings. Runs with equal settings are trained once.
    folder: The name of its folder.
  """

  labels: Mapping[str, str]
  settings: settings_lib.RunSettings
  folder: str

  @property
  def title(self) -> str:
    """The run's name in messages."""
    return f'{axes_lib.describe(self.labels)}, seed {self.settings.seed}'


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The runs of a comparison.

  There is one for each seed and each combination of the points of the axes,
  which are what it varies besides the seed.
  """

  axes: tuple[axes_lib.Axis, ...]
  runs: tuple[Run, ...]

  @property
  def varied_flags(self) -> tuple[str, ...]:
    """The names of the flags that axes set."""
    return tuple(
        dict.fromkeys(name for axis in self.axes for name in axis.flags)
    )

  def further_flags(self, run: Run) -> dict[str, str]:
    """Returns flags that differ between runs, but are not axes themselves.

    The text of a flag without effect on this run is empty.
    """
    texts = run.settings.to_flags()
    return {name: texts.get(name, '') for name in self._further_names}

  @functools.cached_property
  def _further_names(self) -> tuple[str, ...]:
    axes = {axis.name for axis in self.axes}
    texts = [run.settings.to_flags() for run in self.runs]
    return tuple(
        name
        for name in self.varied_flags
        if name not in axes and len({each.get(name, '') for each in texts}) > 1
    )

  def trained(self) -> list[Run]:
    """Returns the runs without repetitions: equal settings are trained once."""
    trained: dict[str, Run] = {}
    for run in self.runs:
      trained.setdefault(run.folder, run)
    return list(trained.values())


def plan(
    flags: ParsedFlags,
    axes: Sequence[axes_lib.Axis],
    seeds: Sequence[int],
    cells: Optional[Sequence[axes_lib.Cell]] = None,
) -> Comparison:
  """Computes the runs of a comparison, and checks all of them.

  A run leaves out the flags that have no effect on it. One of the axes must set
  `algorithm`. By default, all combinations of their points (cells) are run. The
  runs with the first seed come first; the last axis varies fastest.

  Raises:
    ValueError: If the flags of a combination contradict one another, or a flag
      has no effect on any of the runs.
  """
  cells = axes_lib.product(axes) if cells is None else cells
  variants = _checked(flags, cells)
  runs: list[Run] = []
  folders: dict[settings_lib.RunSettings, str] = {}
  for seed in seeds:
    for cell, variant in zip(cells, variants):
      settings = settings_lib.resolve(
          variant, cell.flags[axes_lib.ALGORITHM], seed
      )
      if settings not in folders:
        name = _folder_name(axes, cell, settings)
        if name in folders.values():
          name += f'-{_digest(json.dumps(settings.to_flags()))}'
        folders[settings] = name
      runs.append(Run(cell.labels, settings, folders[settings]))
  return Comparison(tuple(axes), tuple(runs))


def _checked(
    flags: ParsedFlags, cells: Sequence[axes_lib.Cell]
) -> list[ParsedFlags]:
  """Returns the flags of each cell, checked.

  The algorithms of cells that agree in all other flags are checked together.
  """
  groups: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
  keys = []
  for cell in cells:
    others = {k: v for k, v in cell.flags.items() if k != axes_lib.ALGORITHM}
    keys.append(tuple(sorted(others.items())))
    groups.setdefault(keys[-1], {})[cell.flags[axes_lib.ALGORITHM]] = None
  variants = {}
  for key, algorithms in groups.items():
    variant = flags.replacing(dict(key)).replacing(
        {'algorithms': ','.join(algorithms)}, flags.source('algorithms')
    )
    if len(groups) > 1:
      variant.refusals = {}
    settings_lib.check(variant)
    variants[key] = variant
  _check_effects(list(variants.values()))
  return [variants[key] for key in keys]


def _check_effects(variants: Sequence[ParsedFlags]) -> None:
  """Checks that every flag has an effect on a variant that gives it."""
  for variant in variants:
    for name, message in (variant.refusals or {}).items():
      if all(
          name in (other.refusals or {})
          for other in variants
          if other.is_given(name)
      ):
        raise ValueError(message)


def _folder_name(
    axes: Sequence[axes_lib.Axis],
    cell: axes_lib.Cell,
    settings: settings_lib.RunSettings,
) -> str:
  """Returns the name of a run's folder.

  It depends on the labels of the run alone, so that a comparison can get more
  of them. Points whose flags have no effect are left out.
  """
  labels = {
      axis.name: cell.labels[axis.name]
      for axis in axes
      if any(
          getattr(settings, name) is not None
          for point in axis.points
          if point.label == cell.labels[axis.name]
          for name in point.flags
      )
  }
  name = axes_lib.describe(labels).replace(', ', '-')
  readable = _UNSAFE.sub('_', name)[:_MAX_NAME_LENGTH]
  if readable != name:
    readable += f'-{_digest(name)}'
  return f'{readable}-seed{settings.seed}'


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:8]


def flag_texts(comparison: Comparison) -> dict[str, str]:
  """Returns the common flags of all runs, for `flags.txt`.

  They lack the seed and what the axes vary. A flag without effect on some of
  the runs is common to the others.
  """
  found: dict[str, set[str]] = {}
  for run in comparison.runs:
    for name, text in run.settings.to_flags().items():
      found.setdefault(name, set()).add(text)
  return {
      name: texts.pop()
      for name, texts in found.items()
      if len(texts) == 1
      and name not in (*comparison.varied_flags, 'algorithm', 'seed')
  }


def grown_flags(
    previous: Mapping[str, str], flags: Mapping[str, str]
) -> Collection[str]:
  """Returns the flags that may differ when a comparison is extended.

  With other values of them, the new comparison has all runs of the previous
  one and more, or the same ones with more rounds.
  """
  names = set(run_folder.grown_rounds(previous, flags))
  extended = {
      name
      for name in ('algorithms', 'seeds', 'sweep')
      if previous.get(name) != flags.get(name)
      and _contains(flags.get(name), previous.get(name))
  }
  if extended:
    # New runs can have more flags, and flags can have several values.
    names |= {
        name
        for name in {*previous, *flags}
        if (name in previous) != (name in flags)
    } - {'algorithms', 'seeds', 'sweep'}
  return names | extended


def _contains(text: Optional[str], part: Optional[str]) -> bool:
  """Whether a list of values, or of sweeps, contains another one."""
  if text is None or part is None:
    return False
  lists = []
  for lines in (text, part):
    split = [line.rpartition('=') for line in lines.split('\n')]
    lists.append({name: set(values.split(',')) for name, _, values in split})
  values, required = lists
  return values.keys() == required.keys() and all(
      required[name] <= values[name] for name in required
  )
