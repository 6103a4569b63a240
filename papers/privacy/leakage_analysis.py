"""`tff-bn-analyze leakage`: what a message says about its client."""

import contextlib
import pathlib

from absl import flags as absl_flags

from tff_bn.catalog import value_types
from tff_bn.imports import dependencies
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import run_flags
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder

NAME = 'leakage'
OUTPUT_DIR = f'runs/{NAME}'
_ALGORITHMS = ('fedavg', 'silobn', 'fedbn', 'fbn', 'fedtan')


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (
      _define_attack_flags(values),
      run_flags.OutputFlags.define(values, output_dir=OUTPUT_DIR),
  )


def _define_attack_flags(
    values: absl_flags.FlagValues,
) -> flag_groups.FlagGroup:
  define = flag_groups.Definer(values)
  define(
      'algorithms',
      value_types.List(value_types.Choice(_ALGORITHMS)),
      'Algorithms, separated by commas',
      _ALGORITHMS,
  )
  define(
      'batch_sizes',
      value_types.List(value_types.Number(int, minimum=1, maximum=256)),
      'Numbers of pictures of a client, separated by commas',
      (1, 8, 32),
  )
  define(
      'num_clients',
      value_types.POSITIVE_INTEGER,
      'Number of clients of a round whose pictures are reconstructed',
      8,
  )
  define(
      'attacked_clients',
      value_types.POSITIVE_INTEGER,
      'How many of these clients are attacked',
      4,
  )
  define(
      'label_clients',
      value_types.Number(int, minimum=2, maximum=10**4),
      'Number of clients whose shares of labels are inferred',
      100,
  )
  define(
      'attack_steps',
      value_types.POSITIVE_INTEGER,
      'Number of steps of a search for pictures',
      300,
  )
  define(
      'attack_starts',
      value_types.POSITIVE_INTEGER,
      'Number of searches for the pictures of a client; the best one counts',
      2,
  )
  define(
      'dp_noise_multiplier',
      value_types.POSITIVE,
      'The noise multiplier of a round in the rows with differential privacy,'
      ' as in tff-bn-train',
      1.0,
  )
  define(
      'dp_clip_norm',
      value_types.POSITIVE,
      'Largest norm of an update in these rows',
      1.0,
  )
  define(
      'dp_statistics_clip_norm',
      value_types.POSITIVE,
      'Largest norm in these rows of the change of the running statistics, in'
      ' units of their deviation (means) and of their variance (variances)',
      1.0,
  )
  define(
      'seed',
      value_types.SEED,
      'Random seed of the model, the clients, the noise and the attacks',
      0,
  )
  return define.group('Attack')


def main(flags: command_line.ParsedFlags) -> None:
  """Attacks the clients, and writes the tables and figures."""
  attack = _define_attack_flags(absl_flags.FlagValues())
  texts = {name: parsers.to_text(getattr(flags, name)) for name in attack.names}
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      _check(flags)
      folder = output_folder.choose(flags, texts)
      stack.enter_context(run_folder.claim(folder))
      run_folder.check(folder, texts, overwrite=flags.overwrite)
    _attack(flags, folder, texts)


def _check(flags: command_line.ParsedFlags) -> None:
  """Checks that there are as many clients as are attacked."""
  if flags.attacked_clients > flags.num_clients:
    raise ValueError(
        f'{flags.text("attacked_clients")} is more than'
        f' {flags.text("num_clients")}; attack at most {flags.num_clients}'
        ' clients.'
    )


def _attack(
    flags: command_line.ParsedFlags, folder: pathlib.Path, texts: dict[str, str]
) -> None:
  """Runs the attacks, and writes the results into a claimed folder."""
  dependencies.require_tff()
  # Imported late because it takes long, and wrong flags are found without it.
  from tff_bn.papers import analysis_report
  from tff_bn.papers.privacy import leakage
  from tff_bn.papers.privacy import leakage_report
  from tff_bn.papers.privacy import message_noise

  settings = leakage.Settings(
      algorithms=flags.algorithms,
      batch_sizes=flags.batch_sizes,
      num_clients=flags.num_clients,
      num_attacked=flags.attacked_clients,
      num_label_clients=flags.label_clients,
      num_steps=flags.attack_steps,
      num_starts=flags.attack_starts,
      noise=message_noise.Noise(
          flags.dp_noise_multiplier,
          flags.dp_clip_norm,
          flags.dp_statistics_clip_norm,
      ),
      seed=flags.seed,
  )
  report = leakage_report.report(leakage.run(settings), settings)
  run_folder.begin(folder, PROGRAM.name, texts, overwrite=flags.overwrite)
  analysis_report.write(folder, NAME, report)


PROGRAM = command_line.Program(
    name=f'tff-bn-analyze {NAME}',
    description=(
        'Attacks clients from what they send: infers the shares of labels among'
        ' their examples, and reconstructs their pictures, with and without'
        ' differential privacy. The clients have handwritten digits and send'
        ' the first round of an algorithm with one local step.'
    ),
    examples=(
        f'tff-bn-analyze {NAME}',
        f'tff-bn-analyze {NAME} --algorithms=fbn,fedtan --batch_sizes=1,4'
        ' --dp_noise_multiplier=0.1 --output_dir=runs/less_noise',
    ),
    define_flags=define_flags,
    main=main,
)
