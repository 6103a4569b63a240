"""Runs an event loop wherever the caller is, also inside another one."""

import asyncio
from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import threading
from typing import TypeVar
import warnings

import tensorflow_federated as tff

_Result = TypeVar('_Result')


def call_outside_of_event_loops(
    fn: Callable[[threading.Event], _Result],
) -> _Result:
  """Calls a function that runs an event loop, from wherever this is called.

  Args:
    fn: The function. It gets an event that is set when it should stop.

  Returns:
    What the function returns.
  """
  stop = threading.Event()
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    with _own_event_loop():
      return fn(stop)

  # An event loop can't be run inside another one of the same thread.
  context = tff.framework.get_context_stack().current

  def call_in_thread() -> _Result:
    tff.framework.set_default_context(context)  # It belongs to the thread.
    with _own_event_loop():
      return fn(stop)

  with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
    future = executor.submit(call_in_thread)
    try:
      return future.result()
    except BaseException:
      # Ctrl-C reaches this thread only; the other one stops after its round.
      stop.set()
      raise


@contextlib.contextmanager
def _own_event_loop() -> Iterator[None]:
  """Gives the thread an event loop, in which TFF's training loop works."""
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
    # After Ctrl-C a checkpoint may still be being written.
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
      task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(previous)
