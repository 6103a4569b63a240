"""The runs of an experiment file, with flags from the command line."""

from collections.abc import Sequence
import dataclasses
from typing import Optional

from absl import flags as absl_flags

from tff_bn.catalog import tasks
from tff_bn.common import spelling
from tff_bn.papers import analyze
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_smoke
from tff_bn.papers.run_analyses import analysis_programs
from tff_bn.programs import compare
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_names
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.cli.parsed_flags import Source
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.plan import comparison
from tff_bn.programs.plan import settings as settings_lib

_ALGORITHM = 'algorithm'
_TASK = tasks.TASK.name
# Flags of analyses that the experiment sets itself.
_OWN_ANALYSIS_FLAGS = ('run', 'output_dir', 'overwrite', 'verbosity')


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a command runs of an experiment.

  Attributes:
    experiment: The experiment, with more axes if the command sweeps flags.
    flags: The flags of the command and of the experiment.
    comparison: The runs; None for a measurement without runs.
    overruled: The flags with which the command overrules the experiment, as
      one writes them.
  """

  experiment: experiment_files.Experiment
  flags: ParsedFlags
  comparison: Optional[comparison.Comparison]
  overruled: tuple[str, ...] = ()


def load(name: str, scale: str) -> experiment_files.Experiment:
  """Reads an experiment at any scale, see `experiment_files.load`."""
  if scale == experiment_files.SMOKE:
    return experiment_smoke.load(name)
  return experiment_files.load(name, scale)


def plan(
    flags: ParsedFlags,
    name: str,
    scale: str,
    swept: Sequence[axes_lib.Axis] = (),
) -> Plan:
  """Computes the runs of an experiment, and checks all of them.

  The experiment's flags are like a flagfile: flags of the command overrule
  them.

  Args:
    flags: The flags of `tff-bn-compare`.
    name: The experiment's name, PAPER/NAME.
    scale: One of `experiment_files.SCALES`.
    swept: Flags that are varied in addition.

  Returns:
    The plan.

  Raises:
    ValueError: If the experiment's files have a mistake, or flags contradict
      one another.
  """
  experiment = load(name, scale)
  for analysis in experiment.analyses:
    _check_analysis(experiment, analysis)
  overruled = tuple(_overruled(flags, experiment))
  if not experiment.trains:
    given = [*overruled, *(f'--sweep={axis.name}=...' for axis in swept)]
    if given:
      raise ValueError(
          f'{given[0]} has no effect with --experiment={name}, which trains'
          ' nothing.'
      )
    return Plan(experiment, flags, None)
  _check_given(flags, experiment, swept)
  experiment = _with_swept(experiment, swept)
  axes = experiment.axes
  if _ALGORITHM not in [flag for axis in axes for flag in axis.flags]:
    text = experiment.flags[_ALGORITHM]
    point = axes_lib.Point(text, {_ALGORITHM: text})
    axes = (axes_lib.Axis(_ALGORITHM, (point,)), *axes)
  cells = None
  if scale == experiment_files.SMOKE:
    cells = experiment_smoke.cells(name, axes)
  texts = {
      key: text
      for key, text in experiment.flags.items()
      if key != _ALGORITHM and not flags.is_given(key)
  }
  task = experiment.flags.get(_TASK, tasks.CLASSIFICATION)
  if not flags.is_given(_TASK):
    # Labels of another task are found before any training.
    texts[_TASK] = task
  try:
    flags = flags.replacing(texts, Source.FLAGFILE)
    planned = comparison.plan(flags, axes, flags.seeds, cells)
    for run in planned.runs:
      _check_task(run.settings, task)
  except ValueError as error:
    raise ValueError(f'--experiment={name}: {error}') from error
  return Plan(experiment, flags, planned, overruled)


def _check_task(settings: settings_lib.RunSettings, task: str) -> None:
  """Raises a `ValueError` if a run would not have what experiments show.

  Experiments of a task show its main metric.
  """
  main = tasks.TASKS[task].metrics[0]
  word = tasks.kind(main).word
  needed = f'experiments show the {word} if their task is {task}'
  if settings.task != task:
    raise ValueError(f'--{_TASK}={settings.task} is impossible: {needed}.')
  if settings.metrics is not None and main not in settings.metrics:
    raise ValueError(
        f'--metrics={",".join(settings.metrics)} is impossible: {needed}; add'
        f' {main}.'
    )


def _overruled(
    flags: ParsedFlags, experiment: experiment_files.Experiment
) -> list[str]:
  """Returns the flags with which the command overrules the experiment."""
  names = [
      name
      for name in (
          *settings_lib.RunSettings.specs(),
          *experiment_files.COMPARISON_FLAGS,
      )
      if flags.defines(name) and flags.is_given(name)
  ]
  result = []
  for name in names:
    own = getattr(flags.without([name]), name)
    if name in experiment.flags:
      own = flags.parse(name, experiment.flags[name])
    if getattr(flags, name) != own:
      result.append(flags.text(name))
  return result


def _check_given(
    flags: ParsedFlags,
    experiment: experiment_files.Experiment,
    swept: Sequence[axes_lib.Axis],
) -> None:
  """Checks that the command gives no flag that an axis sets."""
  for axis in experiment.axes:
    for name in axis.flags:
      # The flag of the algorithm has another name in a comparison.
      given = 'algorithms' if name == _ALGORITHM else name
      if flags.is_given(given):
        raise ValueError(
            f'{flags.text(given)} is impossible with'
            f' --experiment={experiment.name}, which varies it: its axis'
            f' {axis.name} has the points'
            f' {", ".join(point.label for point in axis.points)}.'
        )
      if any(name in other.flags for other in swept):
        raise ValueError(
            f'--sweep={name}=... is impossible with'
            f' --experiment={experiment.name}, whose axis {axis.name} varies'
            ' it.'
        )
  if flags.is_given('algorithms'):
    raise ValueError(
        f'{flags.text("algorithms")} is impossible with'
        f' --experiment={experiment.name}, whose algorithm is'
        f' {experiment.flags[_ALGORITHM]}.'
    )
  taken = [axis.name for axis in experiment.axes]
  for other in swept:
    if other.name in taken:
      raise ValueError(
          f'--sweep={other.name}=... is impossible with'
          f' --experiment={experiment.name}, which has an axis of this name.'
      )


def _with_swept(
    experiment: experiment_files.Experiment, swept: Sequence[axes_lib.Axis]
) -> experiment_files.Experiment:
  """Adds swept axes, which a table shows as rows, a figure as panels."""
  names = tuple(axis.name for axis in swept)
  shown = experiment.shown
  if shown is not None:
    if shown.kind == 'table':
      shown = dataclasses.replace(shown, rows=(*names, *shown.rows))
    else:
      shown = dataclasses.replace(shown, panels=(*names, *shown.panels))
  return dataclasses.replace(
      experiment,
      axes=(*swept, *experiment.axes),
      shown=shown,
      # They are for the experiment's own flags.
      paper=() if names else experiment.paper,
  )


def _check_analysis(
    experiment: experiment_files.Experiment,
    analysis: experiment_files.Analysis,
) -> None:
  """Checks the name and the flags of an analysis."""
  known = analyze.ANALYSES
  place = f'{experiment.name}: [[analyses]]'
  if analysis.name not in known:
    raise ValueError(
        f'{place}: name is {analysis.name!r}; there is {", ".join(known)}.'
        + spelling.suggestion(analysis.name, known)
    )
  values = absl_flags.FlagValues()
  known[analysis.name].define_flags(values)
  allowed = [name for name in values if name not in _OWN_ANALYSIS_FLAGS]
  for name in analysis.flags:
    if name not in allowed:
      raise ValueError(
          f'{place}: {analysis.name} has no flag {name} that an experiment can'
          f' set.{flag_names.suggestion(name, allowed)}'
      )
  takes_runs = analysis.name in analysis_programs.PROGRAMS
  if analysis.runs is not None and not takes_runs:
    raise ValueError(f'{place}: {analysis.name} takes no runs.')
  if (
      analysis.runs is None
      and takes_runs
      and analysis.name not in analysis_programs.WITHOUT_RUN
  ):
    raise ValueError(
        f'{place}: {analysis.name} needs runs, the name of the axis whose'
        ' points are compared.'
    )
  try:
    command_line.parse(
        known[analysis.name].define_flags,
        [f'--{name}={text}' for name, text in analysis.flags.items()],
    )
  except command_line.UsageError as error:
    raise ValueError(f'{place}: {analysis.name}: {error}') from error


def check_all(name: str) -> dict[str, Plan]:
  """Checks an experiment at all its scales.

  Args:
    name: Its name, PAPER/NAME.

  Returns:
    The plans by scale.

  Raises:
    ValueError: If its files have a mistake.
  """
  flags = command_line.parse(compare.define_flags, [])
  return {
      scale: plan(flags, name, scale) for scale in experiment_files.scales(name)
  }
