"""The flags that say what a comparison varies, and how its runs are trained."""

from absl import flags as absl_flags

from tff_bn.catalog import algorithms
from tff_bn.catalog import value_types
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import flag_names
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.plan import axes
from tff_bn.programs.plan import settings as settings_lib

SWEEP = 'sweep'
# The flags of a comparison in place of those of a run.
_PLURALS = {axes.ALGORITHM: 'algorithms', 'seed': 'seeds'}


class SweepParser(value_types.ValueType):
  """Parses FLAG=VALUE,VALUE,... to an axis."""

  def parse(self, argument: str | axes.Axis) -> axes.Axis:
    """Returns the axis; raises a ValueError if it isn't allowed."""
    if isinstance(argument, axes.Axis):
      return argument
    name, equals, text = argument.partition('=')
    name = name.strip().removeprefix('--')
    if not equals:
      raise ValueError(
          f'must be FLAG=VALUE,VALUE,..., for example --{SWEEP}=gamma=0,0.5.'
      )
    specs = settings_lib.RunSettings.specs()
    if name in _PLURALS:
      raise ValueError(
          f'{name} is varied by --{_PLURALS[name]}, not by --{SWEEP}.'
      )
    if name not in specs:
      raise ValueError(
          f'{name} is not a flag that can be swept; those are the flags of'
          ' tff-bn-train that define a run.'
          + flag_names.suggestion(name, set(specs) - set(_PLURALS))
      )
    points, values = [], []
    for label in (part.strip() for part in text.split(',')):
      try:
        value = specs[name].values.parse(label)
      except ValueError as error:
        raise ValueError(f'{label!r}: {error}') from error
      if value in values:
        raise ValueError(f'{label} is in the list twice.')
      values.append(value)
      points.append(axes.Point(label, {name: label}))
    return axes.Axis(name, tuple(points))

  def names_code(self, value: axes.Axis) -> bool:
    """See `ValueType.names_code`."""
    values = settings_lib.RunSettings.specs()[value.name].values
    return any(values.names_code(point.label) for point in value.points)


def define_flags(values: absl_flags.FlagValues) -> flag_groups.FlagGroup:
  """Defines the flags."""
  define = flag_groups.Definer(values)
  define.repeated(
      SWEEP,
      SweepParser(),
      'FLAG=VALUE,VALUE,...: trains with each of these values of a flag that'
      ' defines a run, such as gamma=0,0.5,1. Can be given several times, for'
      ' all combinations. The results are compared in one table, in curves and'
      ' in heat maps',
  )
  define(
      'jobs',
      value_types.POSITIVE_INTEGER,
      'Number of runs that are trained at the same time, in as many'
      ' processes. It does not change the results',
      1,
  )
  define.boolean(
      'list',
      'Prints the runs, whether they are finished, and an estimate of the'
      ' remaining time, and writes nothing',
  )
  return define.group('Sweeps')


def swept_axes(flags: ParsedFlags) -> list[axes.Axis]:
  """Returns the axes of `--sweep`, in the order of the flags.

  Raises:
    ValueError: If a flag is swept twice, or also given with one value.
  """
  names = set()
  for axis in flags.sweep:
    if axis.name in names:
      raise ValueError(
          f'--{SWEEP}={axis.name}=... is given twice; list all values in one.'
      )
    names.add(axis.name)
    if flags.is_given(axis.name) and flags.source(axis.name) >= flags.source(
        SWEEP
    ):
      raise ValueError(
          f'{flags.text(axis.name)} and --{SWEEP}={axis} exclude each'
          ' other: give one of them.'
      )
  return list(flags.sweep)


def algorithm_axis(flags: ParsedFlags) -> axes.Axis:
  """Returns the axis of `--algorithms`."""
  labels = algorithms.labels(flags.algorithms)
  return axes.Axis(
      axes.ALGORITHM,
      tuple(
          axes.Point(label, {axes.ALGORITHM: name})
          for name, label in labels.items()
      ),
  )


def check_jobs(flags: ParsedFlags) -> None:
  """Raises a `ValueError` if `--jobs` needs a runtime that trains one run."""
  if flags.jobs > 1 and flags.runtime == 'ray':
    raise ValueError(
        f'--jobs={flags.jobs} is impossible with --runtime=ray, whose workers'
        ' already use the whole cluster for the clients of one run; use'
        ' --jobs=1, or --runtime=in_process.'
    )


def texts(flags: ParsedFlags) -> dict[str, str]:
  """Returns the flags that say what a comparison varies, for `flags.txt`.

  The text of `--sweep` has a line for each time that it is given.
  """
  varied = {
      name: parsers.to_text(getattr(flags, name)) for name in _PLURALS.values()
  }
  if flags.sweep:
    varied[SWEEP] = '\n'.join(map(str, flags.sweep))
  return varied
