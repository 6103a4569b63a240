"""`tff-bn-worker`: serves this machine's devices to programs on others."""

from collections.abc import Sequence
import sys
import time
from typing import Optional

from absl import flags as absl_flags

from tff_bn import dependencies
from tff_bn.programs import cli
from tff_bn.programs import flag_groups

_NAP_SECONDS = 0.5


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (flag_groups.define_worker_flags(values),)


def main(flags: cli.ParsedFlags) -> None:
  """Serves until it is interrupted.

  Args:
    flags: The program's flags.
  """
  with cli.checking_input():
    if flags.port is None:
      raise ValueError(
          '--port=NUMBER is missing: where is the worker to serve?'
      )

  dependencies.require_tff()
  # Imported late: it takes seconds, and wrong flags are found without it.
  # pylint: disable=g-import-not-at-top
  from tff_bn import round_data
  from tff_bn import runtime
  from tff_bn.programs import experiment

  # pylint: enable=g-import-not-at-top
  with cli.checking_input():
    server = runtime.Server(
        flags.port,
        round_data.worker_functions(experiment.make_data),
        allow_remote=flags.allow_remote,
    )
  whom = 'all machines that reach it' if flags.allow_remote else 'this machine'
  print(
      f'Serving {", ".join(server.devices)} at port {server.port} to {whom}.'
      ' Ctrl-C ends it.',
      flush=True,
  )
  # A signal that comes just before the main thread goes to sleep is handled
  # only when it wakes up again, so it may not sleep for ever.
  while True:
    time.sleep(_NAP_SECONDS)


PROGRAM = cli.Program(
    name='tff-bn-worker',
    description=(
        "Serves this machine's devices to tff-bn-train and tff-bn-compare,"
        ' which place clients on them if --cluster names this machine and the'
        ' port. All machines need the same versions of tff_bn, TensorFlow and'
        ' Python, and the same data under the same paths.'
    ),
    examples=(
        'tff-bn-worker --port=7000',
        'tff-bn-worker --port=7000 --allow_remote',
        'tff-bn-train --cluster=10.0.0.5:7000,10.0.0.6:7000',
    ),
    define_flags=define_flags,
    main=main,
)


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  return cli.run(PROGRAM, arguments)


if __name__ == '__main__':
  sys.exit(run())
