"""A process of `tff-bn-compare --jobs`: trains runs, one after another.

Other processes are started by `tff_bn.programs.runs.parallel` only. It writes
an `Order` to the standard input for each run, and `END` after the last one. At
the end of a run, the process writes `MARK` and the result to its standard error
and output streams, so that what stands before it belongs to this run.
"""

from collections.abc import Iterator, Sequence
import functools
import json
import os
import pathlib
import queue
import signal
import sys
import threading
import time
from typing import IO, NamedTuple, Optional

from absl import flags as absl_flags

from tff_bn.common import interruptible
from tff_bn.imports import dependencies
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.flags import logging_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.flags import runtime_flags
from tff_bn.programs.runs import finished_run
from tff_bn.training import folder_lock
from tff_bn.training import termination

END = 'end\n'
# A character that no run prints.
MARK = '\x1e'
HAS_MODEL = 'has a model\n'
NO_MODEL = 'has no model\n'
# After this time, a process that should end is killed.
_PATIENCE_SECONDS = 30


class Order(NamedTuple):
  """A run to train: its settings are in the flags.txt of its folder.

  Attributes:
    folder: The folder, which the parent process claims.
    lock: The descriptor of the open folder that holds the parent's lock.
  """

  folder: str
  lock: int

  def line(self) -> str:
    """Returns the line that `orders` reads."""
    return f'{json.dumps(self)}\n'


def orders(stream: IO[str]) -> Iterator[Order]:
  """Returns the orders of a stream up to `END`.

  If the stream ends before, the parent process has died, and this process ends.
  """
  lines: queue.SimpleQueue[str] = queue.SimpleQueue()

  def read() -> None:
    for line in stream:
      lines.put(line)
      if line == END:
        return
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)

  threading.Thread(target=read, daemon=True).start()
  received = iter(functools.partial(interruptible.next_of, lines), END)
  return (Order(*json.loads(line)) for line in received)


def mark_end(result: str) -> None:
  """Marks the end of a run with its result in both streams."""
  for stream in (sys.stderr, sys.stdout):
    print(f'{MARK}{result}', end='', file=stream, flush=True)


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (
      runtime_flags.RuntimeFlags.define(values),
      logging_flags.LoggingFlags.define(values),
      run_flags.VerbosityFlags.define(values),
  )


def main(flags: command_line.ParsedFlags) -> None:
  """Trains the runs."""
  waiting = orders(sys.stdin)
  runtime = runtime_flags.RuntimeFlags.read(flags)
  metrics_hook = logging_flags.LoggingFlags.read(flags).load()
  dependencies.require_tff()
  from tff_bn.programs.runs import jobs
  from tff_bn.runtime import devices

  devices.share_gpus()
  builder = jobs.Builder()
  with runtime.enter():
    for order in waiting:
      folder = pathlib.Path(order.folder)
      # The parent process has written the flags.
      settings = finished_run.read_settings(folder, is_trusted=True)
      with folder_lock.inherit(folder, order.lock):
        has_model = jobs.train_next(builder, settings, folder, metrics_hook)
      mark_end(HAS_MODEL if has_model else NO_MODEL)
      # The exception of a signal can be lost during a run. The parent process
      # waits for this one to end, and sends no further order.
      termination.check()


PROGRAM = command_line.Program(
    name='tff-bn-compare',
    description='Trains runs of a comparison.',
    examples=(),
    define_flags=define_flags,
    main=main,
)


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  return command_line.run(PROGRAM, arguments)


if __name__ == '__main__':
  sys.exit(run())
