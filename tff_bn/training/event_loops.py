"""Runs an event loop, even inside of another one."""

import asyncio
from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import contextvars
import threading
from typing import TypeVar
import warnings

import tensorflow_federated as tff

_Result = TypeVar('_Result')


def call_outside_of_event_loops(
    fn: Callable[[threading.Event], _Result],
) -> _Result:
  """Calls a function that runs an event loop, in another thread if necessary.

  The argument of `fn` is an event that is set when it should stop.
  """
  stop = threading.Event()
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    with _own_event_loop():
      return fn(stop)

  # A thread can't run an event loop inside of another one.
  context = tff.framework.get_context_stack().current

  def call_in_thread() -> _Result:
    # The default context belongs to the thread.
    tff.framework.set_default_context(context)
    with _own_event_loop():
      return fn(stop)

  with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
    # The thread may use what the caller has claimed, see `folder_lock`.
    future = executor.submit(contextvars.copy_context().run, call_in_thread)
    try:
      return future.result()
    except BaseException:
      # Only this thread gets Ctrl-C. The other one stops after its round.
      stop.set()
      raise


@contextlib.contextmanager
def _own_event_loop() -> Iterator[None]:
  """Gives the thread a new event loop, which TFF's training loop needs."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    try:
      previous = asyncio.get_event_loop()
    except RuntimeError:  # The thread has none.
      previous = None
  loop = asyncio.new_event_loop()
  asyncio.set_event_loop(loop)
  try:
    yield
  finally:
    # After Ctrl-C, the writing of a checkpoint may still be in progress.
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
      task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(previous)
