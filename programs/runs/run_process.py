"""A process of `tff-bn-compare --jobs`: trains one run of a comparison.

The run's settings are in the flags.txt of its folder. Other processes are
started by `tff_bn.programs.runs.parallel` only.
"""

from collections.abc import Sequence
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Optional

from absl import flags as absl_flags

from tff_bn.catalog import value_types
from tff_bn.imports import dependencies
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.flags import logging_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.flags import runtime_flags
from tff_bn.programs.runs import finished_run
from tff_bn.training import folder_lock

# The exit code if the run has no usable model; the message is printed.
TRAINING_FAILED = 3
# After this time, a process that should end is killed.
_PATIENCE_SECONDS = 30


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  define = flag_groups.Definer(values)
  define(
      'lock',
      value_types.Number(int, minimum=0),
      'Descriptor of the open folder that holds the lock of the parent process',
  )
  return (
      define.group('Process'),
      runtime_flags.RuntimeFlags.define(values),
      logging_flags.LoggingFlags.define(values),
      run_flags.OutputFlags.define(values),
  )


def end_with_parent() -> None:
  """Ends this process when its standard input is closed."""

  def watch() -> None:
    # Nothing is ever written to it.
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)

  threading.Thread(target=watch, daemon=True).start()


def main(flags: command_line.ParsedFlags) -> None:
  """Trains the run; exits with `TRAINING_FAILED` if it has no usable model."""
  end_with_parent()
  folder = pathlib.Path(flags.output_dir)
  # The parent process has written the flags.
  settings = finished_run.read_settings(folder, is_trusted=True)
  runtime = runtime_flags.RuntimeFlags.read(flags)
  metrics_hook = logging_flags.LoggingFlags.read(flags).load()
  dependencies.require_tff()
  from tff_bn import training
  from tff_bn.programs.runs import jobs
  from tff_bn.runtime import devices

  devices.share_gpus()
  with folder_lock.inherit(folder, flags.lock), runtime.enter():
    try:
      jobs.train_one(jobs.Builder().build(settings, folder), metrics_hook)
    except training.TrainingFailedError as error:
      print(error, file=sys.stderr, flush=True)
      sys.exit(TRAINING_FAILED)


PROGRAM = command_line.Program(
    name='tff-bn-compare',
    description='Trains one run of a comparison.',
    examples=(),
    define_flags=define_flags,
    main=main,
)


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  return command_line.run(PROGRAM, arguments)


if __name__ == '__main__':
  sys.exit(run())
