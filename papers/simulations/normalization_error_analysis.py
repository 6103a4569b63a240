"""`tff-bn-analyze normalization_error`: FBN's figures 1 and 2."""

import contextlib
import pathlib

from absl import flags as absl_flags

from tff_bn.catalog import value_types
from tff_bn.common import files
from tff_bn.data import splits
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import run_flags
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder

NAME = 'normalization_error'
OUTPUT_DIR = f'runs/{NAME}'

# The points of a round are in memory at once, for each algorithm.
_MAX_POINTS = 10**7
_GAMMAS = (0.0, 0.01, 0.1, 0.3, 0.5, 1.0)


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (
      _define_experiment_flags(values),
      run_flags.OutputFlags.define(values, output_dir=OUTPUT_DIR),
  )


def _define_experiment_flags(
    values: absl_flags.FlagValues,
) -> flag_groups.FlagGroup:
  define = flag_groups.Definer(values)
  define(
      'gammas',
      value_types.List(value_types.SHARE),
      "Heterogeneity levels, separated by commas: the share of each client's"
      ' points that is drawn at random from all classes; the rest is sorted by'
      ' class. With 0, each client has one class',
      _GAMMAS,
  )
  define(
      'rounds',
      value_types.POSITIVE_INTEGER,
      'Number of rounds; each client has new points in each round',
      100,
  )
  define(
      'num_clients',
      splits.NUM_CLIENTS.values,
      'Number of clients, and of classes',
      10,
  )
  define(
      'points_per_client',
      value_types.Number(int, minimum=2),
      'Number of points of a client in a round',
      30,
  )
  define(
      'beta',
      value_types.POSITIVE_SHARE,
      "Share of a round's statistics in the running statistics",
      0.1,
  )
  define(
      'seed',
      value_types.SEED,
      'Random seed of the points and their split over the clients',
      0,
  )
  return define.group('Experiment')


def main(flags: command_line.ParsedFlags) -> None:
  """Runs the experiment and writes its tables and plots."""
  experiment = _define_experiment_flags(absl_flags.FlagValues())
  texts = {
      name: parsers.to_text(getattr(flags, name)) for name in experiment.names
  }
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      _check(flags)
      folder = output_folder.choose(flags, texts)
      stack.enter_context(run_folder.claim(folder))
      run_folder.check(folder, texts, overwrite=flags.overwrite)
    _measure(flags, folder, texts)


def _check(flags: command_line.ParsedFlags) -> None:
  """Checks that the points of a round are not too many."""
  num_points = flags.num_clients * flags.points_per_client
  if num_points > _MAX_POINTS:
    raise ValueError(
        f'{flags.text("num_clients")} and {flags.text("points_per_client")}'
        f' make {num_points} points in a round; at most {_MAX_POINTS} are'
        ' possible.'
    )


def _measure(
    flags: command_line.ParsedFlags, folder: pathlib.Path, texts: dict[str, str]
) -> None:
  """Measures, and writes the results into a claimed folder."""
  # Imported late because it takes long, and wrong flags are found without it.
  from tff_bn.analysis import normalization_error
  from tff_bn.papers import analysis_report
  from tff_bn.papers.simulations import normalization_error_report

  settings = normalization_error.Settings(
      num_clients=flags.num_clients,
      points_per_client=flags.points_per_client,
      beta=flags.beta,
      rounds=flags.rounds,
      seed=flags.seed,
  )
  results = normalization_error.run_levels(settings, sorted(flags.gammas))
  report = normalization_error_report.report(
      results,
      f'{settings.num_clients} clients, {settings.points_per_client} points'
      f' each, β = {settings.beta:g}',
  )
  run_folder.begin(folder, PROGRAM.name, texts, overwrite=flags.overwrite)
  files.replace(
      folder / run_folder.NORMALIZATION_ERROR_BY_ROUND_CSV,
      normalization_error_report.rounds_csv(results),
  )
  analysis_report.write(folder, NAME, report)


PROGRAM = command_line.Program(
    name=f'tff-bn-analyze {NAME}',
    description=(
        'Measures how much naive BN, FixBN and FBN differ from centralized'
        ' batch normalization if clients have different data: the distance'
        ' between normalized points of ten Gaussian classes in the plane,'
        ' without training (figures 1 and 2 of the FBN paper).'
    ),
    examples=(
        f'tff-bn-analyze {NAME}',
        f'tff-bn-analyze {NAME} --gammas=0,0.5 --beta=0.01 --rounds=1000'
        ' --output_dir=runs/small_beta',
    ),
    define_flags=define_flags,
    main=main,
)
