"""The files of the papers' experiments: found by name, read and checked.

`experiments/PAPER/NAME.toml` describes a table or a figure of a paper,
`experiments/PAPER/NAME.csv` has the numbers that the paper prints. An
experiment has up to four scales: the paper's own, one on Fashion-MNIST in the
paper's size, a small one on digits that are available offline, and one on
random data that shows that it runs.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any, Optional

from tff_bn.common import spelling
from tff_bn.papers.experiments import paper_form
from tff_bn.papers.experiments import scale_differences
from tff_bn.papers.experiments import toml_table
from tff_bn.programs.cli import flag_names
from tff_bn.programs.cli import parsers
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.plan import settings as settings_lib

FOLDER = pathlib.Path(__file__).parent
PAPER = 'paper'
DIGITS = 'digits'
FASHION = 'fashion'
SMOKE = 'smoke'
SCALES = {
    PAPER: "the paper's data, model and number of rounds",
    FASHION: (
        "Fashion-MNIST in place of the paper's data, with the paper's model,"
        ' split and steps where hours suffice'
    ),
    DIGITS: 'handwritten digits and a small model, offline and in minutes',
    SMOKE: 'random data, a small model and two rounds, to see that it runs',
}
# The scales that a file describes by a table of their name.
_TABLES = (FASHION, DIGITS)
# The folder of experiments that are not a paper's.
_OURS = 'tff_bn'
# Flags of a comparison that are not flags of one run.
COMPARISON_FLAGS = ('seeds', 'average_last')
_TOP_KEYS = (
    'title',
    'place',
    'finding',
    'flags_of',
    'flags',
    'axes',
    'show',
    'analyses',
    'core_hours',
)
# Whether a result agrees with the paper's claim, in a file and in words.
AGREES = {
    'yes': 'as claimed',
    'within deviations': 'as claimed, but within the deviations',
    'in part': 'in part as claimed',
    'no': 'not as claimed',
}
_SCALE_KEYS = (
    'agrees',
    'finding',
    'flags',
    'without',
    'axes',
    'show',
    'analyses',
    'core_hours',
)
_SMOKE_KEYS = ('flags', 'without')
_ANALYSIS_KEYS = ('name', 'runs', 'flags')


@dataclasses.dataclass(frozen=True)
class Analysis:
  """An analysis of the finished runs, or a measurement without runs.

  Attributes:
    name: Its name in `tff-bn-analyze`.
    runs: The axis whose points it compares; None: it needs no runs.
    flags: The texts of its flags by name.
  """

  name: str
  runs: Optional[str]
  flags: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Experiment:
  """An experiment of a paper at one scale.

  Attributes:
    name: PAPER/NAME.
    scale: One of `SCALES`.
    title: The paper, its table or figure, and what that shows.
    place: The section of the paper that concludes it.
    finding: What the paper concludes from it, or this package; None: the paper
      says nothing about it.
    found: What is found at this scale, if the file says it.
    agrees: Whether that agrees with the paper, a key of `AGREES`; None: the
      file does not say it.
    differences: In which settings this scale differs from the paper's.
    flags: The texts of the common flags of all runs, by name.
    axes: What the runs differ in.
    shown: The paper's table or figure; None: the analyses show the result.
    analyses: The analyses.
    paper: The numbers that the paper prints.
    core_hours: The measured hours of all trainings at this scale, each on one
      CPU core; None: the file does not say it.
  """

  name: str
  scale: str
  title: str
  place: Optional[str]
  finding: Optional[str]
  found: Optional[str]
  agrees: Optional[str]
  flags: Mapping[str, str]
  axes: tuple[axes_lib.Axis, ...]
  shown: Optional[paper_form.Show]
  analyses: tuple[Analysis, ...]
  paper: tuple[paper_form.PaperNumber, ...]
  differences: tuple[str, ...] = ()
  core_hours: Optional[float] = None

  @property
  def trains(self) -> bool:
    """Whether the experiment has runs, and not only a measurement."""
    return bool(self.axes or self.flags)

  def axis(self, name: str) -> axes_lib.Axis:
    """Returns the axis with a name."""
    return next(axis for axis in self.axes if axis.name == name)


def is_ours(name: str) -> bool:
  """Whether a name is that of an experiment of this package, not of a paper."""
  return name.startswith(f'{_OURS}/')


def names() -> list[str]:
  """Returns the names of all experiments, figure_4 before figure_10."""
  found = [
      f'{path.parent.name}/{path.stem}' for path in FOLDER.glob('*/*.toml')
  ]
  return sorted(found, key=_sort_key)


def _sort_key(name: str) -> list[Any]:
  paper, _, rest = name.partition('/')
  parts = rest.split('_')
  return [
      paper,
      [(not p.isdigit(), int(p) if p.isdigit() else p) for p in parts],
  ]


def parts(name: str) -> list[str]:
  """Returns the experiments that a name stands for.

  Args:
    name: PAPER/NAME, or the name of a table or figure whose parts are different
      experiments, such as `fbn/figure_3` for `figure_3_a` and `figure_3_b_c`.

  Returns:
    The names of the experiments; the name itself if it has no parts.
  """
  known = names()
  if name in known or not name[-1:].isdigit():
    return [name]
  return [other for other in known if other.startswith(f'{name}_')] or [name]


def load(name: str, scale: str = PAPER) -> Experiment:
  """Reads an experiment.

  Args:
    name: Its name, PAPER/NAME.
    scale: Its scale; see `experiment_smoke` for `SMOKE`.

  Returns:
    The experiment at this scale.

  Raises:
    ValueError: If there is no such experiment, the experiment has no such
      scale, or its files have a mistake.
  """
  known = names()
  if name not in known:
    raise ValueError(
        f'--experiment={name} is not known.'
        + spelling.suggestion(name, known)
        + ' --experiment=list prints all experiments.'
    )
  path = FOLDER / f'{name}.toml'
  file = toml_table.read(path)
  if scale in _TABLES and scale not in file.values:
    raise ValueError(
        f'--scale={scale} is impossible with --experiment={name}, which has'
        f' the scales {", ".join(scales(name))} only.'
    )
  at_paper_scale = _experiment(name, file)
  paper = paper_form.read_numbers(
      path.with_suffix('.csv'), at_paper_scale.shown, at_paper_scale.axes
  )
  experiment = dataclasses.replace(at_paper_scale, paper=paper)
  # A mistake is found at whatever scale the experiment is used.
  at_scales = {
      other: _at_scale(experiment, file, other)
      for other in _TABLES
      if other in file.values
  }
  return at_scales.get(scale, experiment)


def scales(name: str) -> list[str]:
  """Returns the scales that an experiment has."""
  file = toml_table.read(FOLDER / f'{name}.toml')
  return [
      scale for scale in SCALES if scale not in _TABLES or scale in file.values
  ]


def smoke_overrides(name: str) -> tuple[dict[str, str], tuple[str, ...]]:
  """Returns what a file says about the smoke scale.

  Args:
    name: The experiment's name.

  Returns:
    The flags of `[smoke.flags]`, and the flags that `without` removes.
  """
  table = toml_table.read(FOLDER / f'{name}.toml').table(SMOKE)
  table.check_keys(_SMOKE_KEYS)
  return _flags(table.table('flags'), COMPARISON_FLAGS), table.texts('without')


def _experiment(name: str, file: toml_table.Table) -> Experiment:
  """Reads the scale of the paper, without the paper's numbers."""
  file.check_keys((*_TOP_KEYS, *_TABLES, SMOKE))
  place, finding = (
      file.text(key) if key in file.values else None
      for key in ('place', 'finding')
  )
  if is_ours(name):
    if finding is None:
      raise file.error('finding', 'must be given, as a text.')
    if place is not None:
      raise file.error('place', 'is the place in a paper, but this is our own.')
  elif (place is None) != (finding is None):
    raise file.error(
        'place' if place is None else 'finding',
        'must be given: the place in the paper and its finding belong'
        ' together.',
    )
  return _assemble(
      name=name,
      scale=PAPER,
      title=file.text('title'),
      place=place,
      finding=finding,
      found=None,
      agrees=None,
      core_hours=_core_hours(file),
      flags={
          **_flags_of_another(file),
          **_flags(file.table('flags'), COMPARISON_FLAGS),
      },
      axes=_axes(file.table('axes')),
      show=file.table('show') if 'show' in file.values else None,
      analyses=file.tables('analyses'),
      file=file,
  )


def _at_scale(
    paper: Experiment, file: toml_table.Table, scale: str
) -> Experiment:
  """Merges the table of a scale into the experiment."""
  own = file.table(scale)
  own.check_keys(_SCALE_KEYS)
  own_axes = {axis.name: axis for axis in _axes(own.table('axes'))}
  for axis_name in own_axes:
    if axis_name not in [axis.name for axis in paper.axes]:
      raise own.error(
          f'axes.{axis_name}',
          'replaces an axis, but [axes] has no axis of this name.',
      )
  show = file.table('show') if 'show' in file.values else None
  if 'show' in own.values:
    show = toml_table.Table(
        file.path,
        f'{scale}.show',
        {**file.values.get('show', {}), **own.table('show').values},
    )
  agrees = own.text('agrees') if 'agrees' in own.values else None
  if agrees is not None:
    if agrees not in AGREES:
      raise own.error(
          'agrees', f'is {agrees!r}, but must be one of {", ".join(AGREES)}.'
      )
    if paper.finding is None or 'finding' not in own.values:
      raise own.error(
          'agrees', f"needs the paper's finding and {scale}.finding."
      )
  flags = without(
      paper.flags,
      own.texts('without'),
      lambda name: own.error('without', f'names {name!r}, not in [flags].'),
  )
  experiment = _assemble(
      name=paper.name,
      scale=scale,
      title=paper.title,
      place=paper.place,
      finding=paper.finding,
      found=own.text('finding') if 'finding' in own.values else None,
      agrees=agrees,
      core_hours=_core_hours(own),
      flags={**flags, **_flags(own.table('flags'), COMPARISON_FLAGS)},
      axes=tuple(own_axes.get(axis.name, axis) for axis in paper.axes),
      show=show,
      analyses=(own if 'analyses' in own.values else file).tables('analyses'),
      file=file,
      paper=paper.paper,
  )
  return dataclasses.replace(
      experiment,
      differences=scale_differences.describe(
          *(
              (each.flags, each.axes, [x.flags for x in each.analyses])
              for each in (paper, experiment)
          )
      ),
  )


def _core_hours(table: toml_table.Table) -> Optional[float]:
  """Reads the measured hours, if a table has them."""
  hours = table.values.get('core_hours')
  if hours is None:
    return None
  if type(hours) not in (int, float) or not hours > 0:
    raise table.error('core_hours', f'is {hours!r}, but must be more than 0.')
  return float(hours)


def without(
    flags: Mapping[str, str], removed: Sequence[str], error: Any
) -> dict[str, str]:
  """Returns flags without some of them, which must be there."""
  for name in removed:
    if name not in flags:
      raise error(name)
  return {name: text for name, text in flags.items() if name not in removed}


def _assemble(
    *,
    axes: tuple[axes_lib.Axis, ...],
    show: Optional[toml_table.Table],
    analyses: Sequence[toml_table.Table],
    file: toml_table.Table,
    flags: Mapping[str, str],
    paper: tuple[paper_form.PaperNumber, ...] = (),
    **fields: Any,
) -> Experiment:
  """Checks the parts of an experiment against one another."""
  algorithms = [axis.name for axis in axes if 'algorithm' in axis.flags]
  if axes or flags:
    if not algorithms and 'algorithm' not in flags:
      raise file.error('axes', 'sets no algorithm; one axis, or [flags], must.')
    for axis in axes:
      missing = [
          point.label for point in axis.points if 'algorithm' not in point.flags
      ]
      if axis.name in algorithms and missing and 'algorithm' not in flags:
        raise file.error(f'axes.{axis.name}.{missing[0]}', 'sets no algorithm.')
    if show is None and not analyses:
      raise file.error(
          'show', 'must be given, unless an analysis shows the result.'
      )
  elif not analyses:
    raise file.error('axes', 'must be given, or [flags], or [[analyses]].')
  elif show is not None:
    raise file.error('show', 'has no effect without runs.')
  shown = None if show is None else _show(show, axes)
  return Experiment(
      flags=flags,
      axes=axes,
      shown=shown,
      analyses=tuple(_analysis(table, axes) for table in analyses),
      paper=paper,
      **fields,
  )


def _flags(table: toml_table.Table, more: Sequence[str] = ()) -> dict[str, str]:
  """Reads flags as texts."""
  specs = settings_lib.RunSettings.specs()
  known = [name for name in specs if name != 'seed'] + list(more)
  texts = {}
  for name, value in table.values.items():
    if name not in known:
      raise table.error(
          name,
          'is no flag of a run that an experiment can set.'
          + flag_names.suggestion(name, known),
      )
    texts[name] = _to_text(table, name, value)
  return texts


def _to_text(table: toml_table.Table, name: str, value: Any) -> str:
  if not isinstance(value, (str, bool, int, float)):
    raise table.error(name, 'must be a text, a number, true or false.')
  return parsers.to_text(value)


def _flags_of_another(file: toml_table.Table) -> dict[str, str]:
  """Returns the flags of the experiment that `flags_of` names, if any."""
  if 'flags_of' not in file.values:
    return {}
  other = _another(file, 'flags_of')
  if 'flags_of' in other.values:
    raise file.error(
        'flags_of',
        'must name an experiment whose flags are all its own;'
        f' {file.text("flags_of")} has flags_of, too.',
    )
  return _flags(other.table('flags'), COMPARISON_FLAGS)


def _points(table: toml_table.Table, name: str) -> toml_table.Table:
  """Returns an axis's points; a file may take them from another experiment."""
  if not isinstance(table.values[name], str):
    return table.table(name)
  axes = _another(table, name).table('axes')
  if not isinstance(axes.values.get(name), dict):
    raise table.error(
        name, f'must be a table, because {table.text(name)} has none.'
    )
  return axes.table(name)


def _another(table: toml_table.Table, name: str) -> toml_table.Table:
  """Returns the file of the experiment that is the value of a key."""
  other = table.text(name)
  if other not in names():
    raise table.error(
        name,
        f'names the experiment {other!r}, which is not known.'
        + spelling.suggestion(other, names()),
    )
  return toml_table.read(FOLDER / f'{other}.toml')


def _axes(table: toml_table.Table) -> tuple[axes_lib.Axis, ...]:
  axes = []
  for name in table.values:
    points = _points(table, name)
    if not points.values:
      raise table.error(name, 'has no points.')
    if name in (paper_form.CLIENT, 'seed', 'column', 'value', 'deviation'):
      raise table.error(name, 'is no possible name of an axis.')
    axes.append(
        axes_lib.Axis(
            name,
            tuple(
                axes_lib.Point(label, _flags(points.table(label)))
                for label in points.values
            ),
        )
    )
  return tuple(axes)


def _show(
    table: toml_table.Table, axes: Sequence[axes_lib.Axis]
) -> paper_form.Show:
  """Reads the form of the paper's table or figure."""
  kind = table.text('kind')
  if kind not in paper_form.KINDS:
    raise table.error(
        'kind',
        f'is {kind!r}, but must be one of {", ".join(paper_form.KINDS)}.'
        + spelling.suggestion(kind, paper_form.KINDS),
    )
  form = paper_form.KINDS[kind]
  table.check_keys(('kind', *form.required, *form.optional))
  for name in form.required:
    if name not in table.values:
      raise table.error(name, f'must be given for kind = {kind!r}.')
  fields = {
      name: table.texts(name)
      for name in table.values
      if name not in ('kind', paper_form.PRINTED)
  }
  if kind == 'curves' and (
      len(fields['x']) != 1 or fields['x'][0] not in paper_form.CURVE_X
  ):
    raise table.error('x', f'must be {", ".join(paper_form.CURVE_X)}.')
  printed = table.table(paper_form.PRINTED)
  show = paper_form.Show(
      kind,
      printed={axis: printed.texts(axis) for axis in printed.values},
      **fields,
  )
  names_of_axes = [axis.name for axis in axes]
  for name in show.dimensions:
    if name not in (*names_of_axes, paper_form.CLIENT):
      raise ValueError(
          f'{table.path}: {table.key} names {name!r}, which is no axis; there'
          f' is {", ".join(names_of_axes)}.'
          + spelling.suggestion(name, names_of_axes)
      )
    if show.dimensions.count(name) > 1:
      raise ValueError(f'{table.path}: {table.key} names {name!r} twice.')
  for key, named in (
      ('with_mean', show.with_mean),
      ('best', show.best),
      ('compared', show.compared),
      (paper_form.PRINTED, show.printed),
  ):
    for name in named:
      if name not in show.shown_dimensions:
        raise table.error(
            key, f'names {name!r}, which is no axis that it shows.'
        )
  if show.wins_over:
    for key in ('worst_over', 'lines', 'panels', 'best'):
      if getattr(show, key):
        raise table.error('wins_over', f'and {key} exclude each other.')
    if len(show.value) > 1:
      raise table.error('wins_over', 'needs a single value.')
  for axis in axes:
    known = {point.label for point in axis.points}
    for label in show.printed.get(axis.name, ()):
      if label in known:
        raise table.error(
            f'{paper_form.PRINTED}.{axis.name}',
            f'names {label!r}, which has runs.',
        )
  for axis in axes:
    if axis.name not in show.dimensions and len(axis.points) > 1:
      raise ValueError(
          f'{table.path}: {table.key} shows no axis {axis.name!r}, which has'
          f' {len(axis.points)} points.'
      )
  return show


def _analysis(
    table: toml_table.Table, axes: Sequence[axes_lib.Axis]
) -> Analysis:
  table.check_keys(_ANALYSIS_KEYS)
  name = table.text('name')
  runs = None
  if 'runs' in table.values:
    runs = table.text('runs')
    if runs not in [axis.name for axis in axes]:
      raise table.error('runs', f'is {runs!r}, which is no axis.')
  own = table.table('flags')
  return Analysis(
      name,
      runs,
      {key: _to_text(own, key, value) for key, value in own.values.items()},
  )
