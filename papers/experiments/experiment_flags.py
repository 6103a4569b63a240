"""The flags that name an experiment of a paper."""

import itertools

from absl import flags as absl_flags

from tff_bn.catalog import value_types
from tff_bn.catalog.parts import listing
from tff_bn.papers.experiments import experiment_files
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.cli.parsed_flags import Source
from tff_bn.programs.plan import settings as settings_lib

LIST = 'list'
_OUTPUT_DIR = 'output_dir'


def define_flags(values: absl_flags.FlagValues) -> flag_groups.FlagGroup:
  """Defines the flags."""
  define = flag_groups.Definer(values)
  define(
      'experiment',
      value_types.TEXT,
      'PAPER/NAME: trains what a table or a figure of a paper shows, and shows'
      ' the result in the same form. Flags of the command overrule those of the'
      f' experiment. {LIST} prints the names. The name'
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
  return define.group('Experiments of papers')


def check(flags: ParsedFlags) -> None:
  """Checks the flags against one another.

  Args:
    flags: The program's flags.

  Raises:
    ValueError: If `--scale` is given without an experiment.
  """
  if flags.experiment is None and flags.is_given('scale'):
    raise ValueError(
        f'{flags.text("scale")} has no effect without --experiment.'
    )


def parts(flags: ParsedFlags) -> list[ParsedFlags]:
  """Returns the flags of each experiment that the flags ask for.

  Args:
    flags: The program's flags.

  Returns:
    The flags themselves. If the name stands for several parts, the flags of
    each part, with its own folder.
  """
  if flags.experiment is None:
    return [flags]
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


def texts(flags: ParsedFlags) -> dict[str, str]:
  """Returns the flags that name the experiment, for `flags.txt`."""
  return {'experiment': flags.experiment, 'scale': flags.scale}


def with_output_dir(flags: ParsedFlags) -> ParsedFlags:
  """Returns the flags with the experiment's own folder, if none is given."""
  if flags.is_given(_OUTPUT_DIR):
    return flags
  folder = f'runs/experiments/{flags.experiment}-{flags.scale}'
  return flags.replacing({_OUTPUT_DIR: folder}, Source.DEFAULT)


def overruled(
    flags: ParsedFlags, experiment: experiment_files.Experiment
) -> list[str]:
  """Returns the flags with which a command overrules an experiment.

  Args:
    flags: The flags of the command, without those of the experiment.
    experiment: The experiment.

  Returns:
    The flags that have other values, as one writes them.
  """
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


def list_text() -> str:
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
