"""Trains several runs of a comparison at the same time, in processes.

The processes (`tff_bn.programs.runs.run_process`) use the locks of this
process. They end when it ends, even if it is killed, because their standard
input is closed then.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, NamedTuple, Optional, TextIO

from tff_bn.common import cores
from tff_bn.common import interruptible
from tff_bn.common import progress
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_process
from tff_bn.training import folder_lock


class _Event(NamedTuple):
  """The end of a run or of a process, after all its lines are forwarded.

  `has_model` tells whether the run has a usable model; it is None if the
  process has ended.
  """

  process: '_Process'
  has_model: Optional[bool]


class _Process:
  """A process that trains runs, one after another.

  Attributes:
    popen: The process.
    task: The run that it trains, or trained last.
    is_busy: Whether this run has no end yet.
  """

  def __init__(
      self,
      locks: Iterable[int],
      arguments: Sequence[str],
      shows: Callable[[str], bool],
      events: 'queue.SimpleQueue[_Event]',
  ):
    self.popen = subprocess.Popen(
        [sys.executable, '-m', run_process.__name__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=tuple(locks),
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
    self.task: jobs.Task
    self.is_busy = False
    self._prefix = ''
    self._is_shown = True
    self._events = events
    # The process marks the end of a run in its error stream first, so nobody
    # waits for a mark that does not come.
    self._reached = threading.Semaphore(0)
    streams = (
        (self.popen.stdout, sys.stdout, lambda line: True, self._report),
        (self.popen.stderr, sys.stderr, shows, self._note),
    )
    threads = [
        threading.Thread(target=self._forward, args=stream)
        for stream in streams
    ]

    def wait() -> None:
      for thread in threads:
        thread.join()
      self.popen.wait()
      events.put(_Event(self, None))

    for thread in (*threads, threading.Thread(target=wait)):
      thread.daemon = True
      thread.start()

  def train(self, prefix: str, task: jobs.Task) -> None:
    """Starts a run; a prefix stands before each line that it prints."""
    progress.say(f'{prefix}{task.title}')
    self._prefix, self.task, self.is_busy = prefix, task, True
    lock = folder_lock.descriptor(task.folder)
    self._send(run_process.Order(str(task.folder), lock).line())

  def finish(self) -> None:
    """Tells the process to end."""
    self._send(run_process.END)

  def end(self) -> None:
    """Ends the process; if it trains a run, it saves the last round."""
    self._is_shown = self.is_busy  # Without a run, it has nothing to tell.
    self.popen.terminate()

  def _send(self, line: str) -> None:
    assert self.popen.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has just ended.
      self.popen.stdin.write(line)
      self.popen.stdin.flush()

  def _note(self, result: str) -> None:
    """Notes that the error stream has reached the end of a run."""
    del result  # The other stream reports it.
    self._reached.release()

  def _report(self, result: str) -> None:
    """Reports the end of a run."""
    self._reached.acquire()
    self._events.put(_Event(self, result == run_process.HAS_MODEL))

  def _forward(
      self,
      source: IO[str],
      target: TextIO,
      shows: Callable[[str], bool],
      at_end: Callable[[str], None],
  ) -> None:
    """Writes the lines that are shown, with the prefix of their run."""
    is_open = True
    # The loop goes on if writing fails: the process waits while its pipe is
    # full.
    for line in source:
      text, mark, result = line.partition(run_process.MARK)
      try:
        if text and is_open and self._is_shown and shows(text):
          line_end = '' if text.endswith('\n') else '\n'
          target.write(f'{self._prefix}{text}{line_end}')
          target.flush()
      except (OSError, ValueError):
        is_open = False
      if mark:
        at_end(result)


@contextlib.contextmanager
def started(
    tasks: Sequence[jobs.Task],
    num_jobs: int,
    arguments: Sequence[str],
    shows: Callable[[str], bool],
) -> Iterator[Callable[[], list[jobs.Task]]]:
  """Starts processes, which import TensorFlow, and ends them after the block.

  Args:
    tasks: The runs, in folders that the caller claims; finished ones are
      skipped.
    num_jobs: The number of runs at a time.
    arguments: Further arguments of `run_process`: where and how it runs.
    shows: Whether to show a line that a process writes to its standard error
      stream.

  Yields:
    A function that trains the runs with the same results as `jobs.train`, and
    returns the runs that failed; such a failure does not stop the other runs.
    It raises a `RuntimeError` if a process ended for another reason.
  """
  locks = [folder_lock.descriptor(t.folder) for t in tasks if not t.is_finished]
  events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
  processes: list[_Process] = []
  try:
    for _ in range(min(num_jobs, len(locks))):
      processes.append(_Process(locks, arguments, shows, events))
    yield functools.partial(_train, tasks, processes, events)
  finally:
    _end(processes)


def _train(
    tasks: Sequence[jobs.Task],
    processes: Sequence[_Process],
    events: 'queue.SimpleQueue[_Event]',
) -> list[jobs.Task]:
  """Trains runs in processes, see `started`."""
  jobs.announce_finished(tasks)
  waiting = [
      (f'[{number}/{len(tasks)}] ', task)
      for number, task in enumerate(tasks, start=1)
      if not task.is_finished
  ]
  for process in processes:
    process.train(*waiting.pop(0))
  failures = []
  num_running = len(processes)
  while num_running:
    process, has_model = interruptible.next_of(events)
    if has_model is None:
      code = process.popen.returncode
      if process.is_busy or code:
        raise RuntimeError(_explain(process.task, code))
      num_running -= 1
      continue
    process.is_busy = False
    folder_lock.let_others_read(process.task.folder)
    if not has_model:
      failures.append(process.task)
    if waiting:
      process.train(*waiting.pop(0))
    else:
      process.finish()
  return failures


def _end(processes: Iterable[_Process]) -> None:
  """Ends processes, and waits for them."""
  try:
    for process in processes:
      process.end()
    for process in processes:
      process.popen.wait()
  finally:  # A second Ctrl-C does not wait.
    for process in processes:
      process.popen.kill()


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
