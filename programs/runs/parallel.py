"""Trains several runs of a comparison at the same time, each in a process.

The processes (`tff_bn.programs.runs.run_process`) use the locks of this
process. They end when it ends, even if it is killed, because their standard
input is closed then.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, TextIO

from tff_bn.common import cores
from tff_bn.common import interruptible
from tff_bn.common import progress
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_process
from tff_bn.training import folder_lock


@dataclasses.dataclass(frozen=True)
class _Child:
  """A process that trains a run."""

  task: jobs.Task
  process: subprocess.Popen[str]


def train(
    tasks: Sequence[jobs.Task],
    num_jobs: int,
    arguments: Sequence[str],
    shows: Callable[[str], bool],
) -> list[jobs.Task]:
  """Trains runs, with the same results as `jobs.train`.

  Args:
    tasks: The runs, in folders that the caller claims; finished ones are
      skipped.
    num_jobs: The number of runs at a time.
    arguments: Further arguments of `run_process`: where and how it runs.
    shows: Whether to show a line that a process writes to its standard error
      stream.

  Returns:
    The runs that failed; a failure does not stop the other runs.

  Raises:
    RuntimeError: If a process ended for another reason. Then all end.
  """
  jobs.announce_finished(tasks)
  waiting = [
      (f'[{number}/{len(tasks)}] ', task)
      for number, task in enumerate(tasks, start=1)
      if not task.is_finished
  ]
  ended: queue.SimpleQueue[_Child] = queue.SimpleQueue()
  running: list[_Child] = []
  failures = []
  try:
    while waiting or running:
      while waiting and len(running) < num_jobs:
        prefix, task = waiting.pop(0)
        progress.say(f'{prefix}{task.title}')
        running.append(_start(prefix, task, arguments, shows, ended))
      child = interruptible.next_of(ended)
      running.remove(child)
      folder_lock.let_others_read(child.task.folder)
      code = child.process.returncode
      if code == run_process.TRAINING_FAILED:
        failures.append(child.task)
      elif code:
        raise RuntimeError(_explain(child.task, code))
  finally:
    _end(running)
  return failures


def _start(
    prefix: str,
    task: jobs.Task,
    arguments: Sequence[str],
    shows: Callable[[str], bool],
    ended: 'queue.SimpleQueue[_Child]',
) -> _Child:
  """Starts a process, whose end is put into the queue."""
  descriptor = folder_lock.descriptor(task.folder)
  process = subprocess.Popen(
      [
          sys.executable,
          '-m',
          run_process.__name__,
          f'--output_dir={task.folder}',
          f'--lock={descriptor}',
          *arguments,
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      pass_fds=(descriptor,),
      # Operations use the same number of threads as in this process, so that
      # results have the same bits.
      env={
          **os.environ,
          cores.ENVIRONMENT_VARIABLE: str(cores.per_operation()),
      },
      # Ctrl-C reaches this process only, which ends the others.
      process_group=0,
      encoding='utf-8',
      errors='replace',
  )
  assert process.stdout is not None and process.stderr is not None
  child = _Child(task, process)
  threads = [
      threading.Thread(target=_forward, args=(prefix, *streams))
      for streams in (
          (process.stdout, sys.stdout, lambda line: True),
          (process.stderr, sys.stderr, shows),
      )
  ]

  def wait() -> None:
    for thread in threads:
      thread.join()
    process.wait()
    ended.put(child)

  for thread in (*threads, threading.Thread(target=wait)):
    thread.daemon = True
    thread.start()
  return child


def _forward(
    prefix: str,
    source: IO[str],
    target: TextIO,
    shows: Callable[[str], bool],
) -> None:
  """Writes the lines of a process that are shown, with a prefix."""
  is_open = True
  # The loop goes on if writing fails: the process waits while its pipe is full.
  for line in source:
    try:
      if is_open and shows(line):
        target.write(f'{prefix}{line}')
        target.flush()
    except (OSError, ValueError):
      is_open = False


def _end(children: Iterable[_Child]) -> None:
  """Ends processes; each saves its last round."""
  try:
    for child in children:
      child.process.terminate()
    for child in children:
      child.process.wait()
  finally:  # A second Ctrl-C does not wait.
    for child in children:
      child.process.kill()


def _explain(task: jobs.Task, code: int) -> str:
  """Says why a process has ended."""
  reason = 'failed, see the error above'
  if code < 0:
    reason = f'failed, because its process got {signal.Signals(-code).name}'
    if -code == signal.SIGKILL:
      reason += (
          ', perhaps from the system for lack of memory; a smaller --jobs needs'
          ' less'
      )
  return f'{task.title} {reason}. The same command continues the comparison.'
