"""Tests of waiting that signals can end."""

import concurrent.futures
import queue
import signal
import threading

import pytest

from tff_bn.common import interruptible


class _SignalError(Exception):
  """The handler of a signal raises it."""


@pytest.fixture(name='raises')
def _raises():
  """Lets SIGUSR1 raise an error in the main thread."""

  def handle(number, frame):
    raise _SignalError

  before = signal.signal(signal.SIGUSR1, handle)
  yield
  signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    'wait',
    [
        lambda: interruptible.result(concurrent.futures.Future()),
        lambda: interruptible.next_of(queue.SimpleQueue()),
    ],
    ids=['result', 'next_of'],
)
def test_signal_that_another_thread_receives(wait, raises):
  # It raises the signal in its own thread.
  timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGUSR1,))
  timer.start()
  with pytest.raises(_SignalError):
    wait()
  timer.join()


def test_result_of_a_future():
  future = concurrent.futures.Future()
  threading.Timer(1.2, future.set_result, (7,)).start()
  assert interruptible.result(future) == 7


def test_error_of_a_future_that_is_a_timeout():
  future = concurrent.futures.Future()
  future.set_exception(TimeoutError('its own'))
  with pytest.raises(TimeoutError, match='its own'):
    interruptible.result(future)


def test_next_of_a_queue():
  values = queue.SimpleQueue()
  threading.Timer(1.2, values.put, (7,)).start()
  assert interruptible.next_of(values) == 7
