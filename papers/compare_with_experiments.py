"""The console script `tff-bn-compare`: the program with `--experiment`.

Programs import nothing of the papers. This module adds the flags of experiments
to the program of `programs/compare.py` and plans their runs; the program trains
them and lets the experiment show the results. In the same way,
`papers/analyze.py` is the console script `tff-bn-analyze`.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import itertools
import pathlib
import sys
from typing import Optional

from absl import flags as absl_flags

from tff_bn.catalog import value_types
from tff_bn.catalog.parts import listing
from tff_bn.common import progress
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_plan
from tff_bn.programs import compare
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.cli.parsed_flags import Source
from tff_bn.programs.plan import sweeps
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder

_LIST = 'list'
_OUTPUT_DIR = 'output_dir'


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  define = flag_groups.Definer(values)
  define(
      'experiment',
      value_types.TEXT,
      'PAPER/NAME: trains what a table or a figure of a paper shows, and shows'
      ' the result in the same form. The command line overrides the flags of'
      f' the experiment. {_LIST} prints the names. The name'
      ' without a letter at its end, such as fbn/figure_3, stands for all parts'
      ' of the figure',
      default_text='none',
  )
  define(
      'scale',
      value_types.Choice(experiment_files.SCALES),
      'The size of --experiment:\n' + listing(experiment_files.SCALES),
      experiment_files.PAPER,
  )
  algorithms, sweep, *others = compare.define_flags(values)
  return (algorithms, sweep, define.group('Experiments of papers'), *others)


def main(flags: ParsedFlags) -> None:
  """Runs an experiment with all its parts, or another comparison.

  Args:
    flags: The program's flags.
  """
  if flags.experiment is None:
    with command_line.checking_input():
      if flags.is_given('scale'):
        raise ValueError(
            f'{flags.text("scale")} has no effect without --experiment.'
        )
    compare.main(flags)
    return
  if flags.experiment == _LIST:
    print(_list_text())
    return
  with command_line.checking_input():
    parts = _parts(flags)
    # A mistake in the last part is found before the first one starts.
    for part in parts[1:]:
      _plan(part)
  for part in parts:
    if len(parts) > 1:
      progress.say(part.text('experiment'))
    _run(part)


def _parts(flags: ParsedFlags) -> list[ParsedFlags]:
  """Returns the flags of each experiment that the name stands for."""
  names = experiment_files.parts(flags.experiment)
  if len(names) == 1:
    return [flags]
  result = []
  for name in names:
    changes = {'experiment': name}
    if flags.is_given(_OUTPUT_DIR):
      stem = name.partition('/')[2]
      changes[_OUTPUT_DIR] = f'{flags.output_dir}/{stem}'
    result.append(flags.replacing(changes))
  return result


def _plan(flags: ParsedFlags) -> experiment_plan.Plan:
  if not flags.is_given(_OUTPUT_DIR):
    folder = f'runs/experiments/{flags.experiment}-{flags.scale}'
    flags = flags.replacing({_OUTPUT_DIR: folder}, Source.DEFAULT)
  return experiment_plan.plan(
      flags, flags.experiment, flags.scale, sweeps.swept_axes(flags)
  )


def experiment_flags(planned: experiment_plan.Plan) -> dict[str, str]:
  """Returns the flags that define an experiment, for `flags.txt`."""
  flags = planned.flags
  texts = {'experiment': flags.experiment, 'scale': flags.scale}
  if planned.comparison is not None:
    texts |= compare.comparison_flags(flags, planned.comparison)
    # The experiment's axes set the algorithms.
    texts.pop('algorithms', None)
  return texts


def _run(flags: ParsedFlags) -> None:
  """Runs one experiment."""
  with command_line.checking_input():
    planned = _plan(flags)
    texts = experiment_flags(planned)
    if planned.comparison is None:
      _measure(planned, texts)
      return
  compare.run_planned(
      compare.Planned(
          planned.flags,
          planned.comparison,
          texts,
          lambda folder: _show(planned, folder),
      )
  )


def _measure(planned: experiment_plan.Plan, texts: dict[str, str]) -> None:
  """Runs the analyses of an experiment without runs."""
  flags = planned.flags
  folder = output_folder.choose(flags, texts)
  if flags.list:
    names = [analysis.name for analysis in planned.experiment.analyses]
    print(f'No runs, only tff-bn-analyze {" and ".join(names)}.')
    return
  with contextlib.ExitStack() as stack:
    stack.enter_context(run_folder.claim(folder))
    run_folder.check(folder, texts, overwrite=flags.overwrite)
    run_folder.begin(folder, PROGRAM.name, texts, overwrite=flags.overwrite)
    _show(planned, folder)


def _show(planned: experiment_plan.Plan, folder: pathlib.Path) -> None:
  """Shows the result of an experiment in the paper's form."""
  # Imported late, because it imports Matplotlib.
  from tff_bn.papers.experiments import experiment_results

  experiment_results.write(planned, folder)


def _list_text() -> str:
  """Returns the list of all experiments, by paper."""
  names = experiment_files.names()
  blocks = []
  for _, group in itertools.groupby(names, lambda name: name.partition('/')[0]):
    members = list(group)
    width = max(map(len, members))
    lines = []
    for name in members:
      experiment = experiment_files.load(name)
      scales = ', '.join(experiment_files.scales(name))
      lines.append(f'{name:{width}}  {experiment.title} ({scales})')
    blocks.append('\n'.join(lines))
  return '\n\n'.join(blocks)


PROGRAM = dataclasses.replace(
    compare.PROGRAM,
    examples=(
        *compare.PROGRAM.examples,
        'tff-bn-compare --experiment=fedtan/table_1 --scale=digits',
    ),
    define_flags=define_flags,
    main=main,
)


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  return command_line.run(PROGRAM, arguments)


if __name__ == '__main__':
  sys.exit(run())
