"""The flags that name an experiment of a paper."""

import itertools
import pathlib

from absl import flags as absl_flags

from tff_bn.programs import experiment_files
from tff_bn.programs import flag_groups
from tff_bn.programs import parsers
from tff_bn.programs.parsed_flags import ParsedFlags
from tff_bn.programs.parsed_flags import Source

LIST = 'list'
_OUTPUT_DIR = 'output_dir'


def define_flags(values: absl_flags.FlagValues) -> flag_groups.FlagGroup:
  """Defines the flags."""
  define = flag_groups.Definer(values)
  define(
      'experiment',
      flag_groups.TEXT,
      'PAPER/NAME: trains what a table or a figure of a paper shows, and shows'
      ' the result in the same form. Its flags are like those of a flagfile:'
      f' flags of the command overrule them. {LIST} prints the names',
      default_text='none',
  )
  define(
      'scale',
      parsers.ChoiceParser(experiment_files.SCALES),
      'The size of --experiment:\n'
      + flag_groups.listing(experiment_files.SCALES),
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


def texts(flags: ParsedFlags) -> dict[str, str]:
  """Returns the flags that name the experiment, for `flags.txt`."""
  return {'experiment': flags.experiment, 'scale': flags.scale}


def with_output_dir(flags: ParsedFlags) -> ParsedFlags:
  """Returns the flags with the experiment's own folder, if none is given."""
  if flags.is_given(_OUTPUT_DIR):
    return flags
  folder = f'runs/experiments/{flags.experiment}-{flags.scale}'
  return flags.replacing({_OUTPUT_DIR: folder}, Source.DEFAULT)


def overruled(flags: ParsedFlags) -> list[str]:
  """Returns the flags of a command that replace those of an experiment.

  Args:
    flags: The flags, without those of the experiment.

  Returns:
    The flags as one writes them, without those that do not change the results.
  """
  names = [
      name
      for name in flags.names()
      if flags.is_given(name) and name not in _NEUTRAL
  ]
  return [flags.text(name) for name in names]


_NEUTRAL = (
    'experiment',
    'scale',
    _OUTPUT_DIR,
    'overwrite',
    'verbosity',
    'jobs',
    'list',
    'flagfile',
)


def list_text(folder: pathlib.Path = experiment_files.FOLDER) -> str:
  """Returns the list of all experiments, by paper.

  Args:
    folder: The folder of the papers' folders.

  Returns:
    The text.
  """
  names = experiment_files.names(folder)
  blocks = []
  for _, group in itertools.groupby(names, lambda name: name.partition('/')[0]):
    members = list(group)
    width = max(map(len, members))
    lines = []
    for name in members:
      experiment = experiment_files.load(name, folder=folder)
      scales = ', '.join(experiment_files.scales(name, folder))
      lines.append(f'{name:{width}}  {experiment.title} ({scales})')
    blocks.append('\n'.join(lines))
  return '\n\n'.join(blocks)
