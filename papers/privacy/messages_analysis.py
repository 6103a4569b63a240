"""`tff-bn-analyze messages`: what the server and the clients send."""

import contextlib
import pathlib

from absl import flags as absl_flags

from tff_bn.imports import dependencies
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder

NAME = 'messages'
OUTPUT_DIR = f'runs/{NAME}'


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags, which describe a run."""
  return (
      algorithm_flags.AlgorithmFlags.define(values),
      *settings_lib.define_shared_flags(values),
      run_flags.RunFlags.define(values),
      run_flags.OutputFlags.define(values, output_dir=OUTPUT_DIR),
  )


def main(flags: command_line.ParsedFlags) -> None:
  """Lists the messages and writes their table."""
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      settings_lib.check(flags)
      settings = settings_lib.resolve(flags, flags.algorithm, flags.seed)
      folder = output_folder.choose(flags, settings.to_flags())
      stack.enter_context(run_folder.claim(folder))
      run_folder.check(folder, settings.to_flags(), overwrite=flags.overwrite)
    _list_messages(settings, folder, overwrite=flags.overwrite)


def _list_messages(
    settings: settings_lib.RunSettings, folder: pathlib.Path, *, overwrite: bool
) -> None:
  """Builds the process, and writes the table into a claimed folder."""
  dependencies.require_tff()
  # Imported late because it takes long, and wrong flags are found without it.
  from tff_bn.papers import analysis_report
  from tff_bn.papers.privacy import messages_report
  from tff_bn.programs.runs import jobs

  with command_line.checking_input():
    job = jobs.Builder().build(settings, folder)
  report = messages_report.report(
      job.process, job.model, f'{settings.algorithm}, {settings.model}'
  )
  run_folder.begin(
      folder, PROGRAM.name, settings.to_flags(), overwrite=overwrite
  )
  analysis_report.write(folder, NAME, report)


PROGRAM = command_line.Program(
    name=f'tff-bn-analyze {NAME}',
    description=(
        'Lists every tensor that the server and the clients send in a round of'
        ' an algorithm: the exchange, the direction, the variable, the shape'
        ' and the size. Nothing is trained. It takes the flags that describe a'
        ' run of tff-bn-train, also from its file:'
        ' --flagfile=runs/mine/flags.txt.'
    ),
    examples=(
        f'tff-bn-analyze {NAME} --algorithm=fedtan --local_steps=1',
        f'tff-bn-analyze {NAME} --algorithm=silobn --model=resnet20'
        ' --output_dir=runs/sent_by_silobn',
    ),
    define_flags=define_flags,
    main=main,
)
