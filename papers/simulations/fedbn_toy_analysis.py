"""`tff-bn-analyze fedbn_toy`: FedBN's figures 1 and 2."""

import contextlib
from typing import TYPE_CHECKING

from absl import flags as absl_flags

from tff_bn.catalog import value_types
from tff_bn.common import progress
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import run_flags
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder

if TYPE_CHECKING:
  from tff_bn.papers.simulations import fedbn_toy

NAME = 'fedbn_toy'
OUTPUT_DIR = f'runs/{NAME}'

# With larger numbers, cos(w x) oscillates much faster than the grid.
_POSITIVE = value_types.Number(float, above=0, maximum=1000)


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (
      _define_example_flags(values),
      run_flags.OutputFlags.define(values, output_dir=OUTPUT_DIR),
  )


def _define_example_flags(
    values: absl_flags.FlagValues,
) -> flag_groups.FlagGroup:
  define = flag_groups.Definer(values)
  define(
      'deviations',
      value_types.List(_POSITIVE),
      "Standard deviations of the clients' inputs, separated by commas",
      (0.5, 2.0),
  )
  define('weight', _POSITIVE, 'Weight of the labels', 2.0)
  define(
      'noise',
      value_types.Number(float, minimum=0, maximum=1000),
      "Standard deviation of the labels' noise",
      0.1,
  )
  define(
      'num_points',
      # Each of the 40,000 losses of the surface takes all points.
      value_types.Number(int, minimum=2, maximum=10**4),
      'Number of points of a client',
      1000,
  )
  define('seed', value_types.SEED, 'Random seed of the points', 0)
  return define.group('Example')


def main(flags: command_line.ParsedFlags) -> None:
  """Computes the example and writes its table and plots."""
  example = _define_example_flags(absl_flags.FlagValues())
  texts = {
      name: parsers.to_text(getattr(flags, name)) for name in example.names
  }
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      settings = _settings(flags, example)
      folder = output_folder.choose(flags, texts)
      stack.enter_context(run_folder.claim(folder))
      run_folder.check(folder, texts, overwrite=flags.overwrite)
    # Imported late because it takes long.
    from tff_bn.papers import analysis_report
    from tff_bn.papers.simulations import fedbn_toy
    from tff_bn.papers.simulations import fedbn_toy_report

    with progress.saying(
        f'Computing the losses of {len(settings.deviations)} clients'
    ):
      result = fedbn_toy.run(settings)
    report = fedbn_toy_report.report(result, settings)
    run_folder.begin(folder, PROGRAM.name, texts, overwrite=flags.overwrite)
    analysis_report.write(folder, NAME, report)


def _settings(
    flags: command_line.ParsedFlags, example: flag_groups.FlagGroup
) -> 'fedbn_toy.Settings':
  from tff_bn.papers.simulations import fedbn_toy

  return fedbn_toy.Settings(
      **{name: getattr(flags, name) for name in example.names}
  )


PROGRAM = command_line.Program(
    name=f'tff-bn-analyze {NAME}',
    description=(
        'Shows why local batch normalization lets clients with different'
        ' features average their models: the losses of the model cos(w x) for'
        ' two clients whose inputs have different variances, with and without'
        ' normalization (the toy example of the FedBN paper, figures 1 and 2).'
    ),
    examples=(
        f'tff-bn-analyze {NAME}',
        f'tff-bn-analyze {NAME} --deviations=1,1.5,3 --output_dir=runs/three',
    ),
    define_flags=define_flags,
    main=main,
)
