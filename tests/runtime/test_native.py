"""Tests that TFF's worker process works and always ends."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import portpicker
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.runtime import native


@tff.tensorflow.computation
def _seven():
  return tf.constant(7)


@tff.tensorflow.computation
def _endless():
  return tf.while_loop(lambda i: i >= 0, lambda i: 1 - i, [tf.constant(0)])


@tff.federated_computation(
    tff.FederatedType(tff.TensorType(np.int32), tff.CLIENTS)
)
def _sum(values):
  return tff.federated_sum(values)


@pytest.fixture
def workers():
  """Returns a function that lists new workers; checks that they end."""

  def running():
    return {
        child
        for child in psutil.Process().children()
        if child.name() == 'worker_binary'
        and child.status() != psutil.STATUS_ZOMBIE
    }

  # Other tests may have started workers.
  before = running()
  yield lambda: list(running() - before)
  assert running() == before


def test_worker_starts_at_the_first_use_and_ends_with_the_block(workers):
  stack = tff.framework.get_context_stack()
  before = stack.current
  with runtime.native_runtime() as context:
    assert stack.current is context
    assert not workers()
    assert _seven() == 7
    (worker,) = workers()
    assert _sum([1, 2, 3]) == 6
    assert workers() == [worker]

  assert not psutil.pid_exists(worker.pid)
  assert stack.current is before


def test_running_computation_ends_with_the_block(workers):
  ended = threading.Event()
  threads_before = threading.enumerate()

  with runtime.native_runtime() as context:

    def compute():
      tff.framework.set_default_context(context)
      try:
        _endless()
      except BaseException:  # Cancelled, or cut off from the worker.
        ended.set()

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    while not workers():
      time.sleep(0.01)
    time.sleep(0.2)  # The computation begins.

  # The interpreter would abort if it ended while this thread computes.
  started = set(threading.enumerate()) - set(threads_before)
  assert 'tff-native' not in [thread.name for thread in started]
  assert ended.wait(timeout=60)


def test_blocks_can_follow_each_other_and_be_nested(workers):
  with runtime.native_runtime():
    _seven()
    with runtime.native_runtime():
      _seven()
      assert len(workers()) == 2
    assert len(workers()) == 1
    assert _seven() == 7
  with runtime.native_runtime():
    assert _seven() == 7


def test_other_threads_can_use_the_context_and_end(workers):
  results = []
  with runtime.native_runtime() as context:

    def compute():
      tff.framework.set_default_context(context)
      results.append(_seven())

    # The worker must survive the thread that starts it.
    for _ in range(2):
      thread = threading.Thread(target=compute)
      thread.start()
      thread.join()
    assert _seven() == 7
    assert len(workers()) == 1

  assert results == [7, 7]


@pytest.fixture(params=[signal.SIG_DFL, lambda signum, frame: None])
def handler(request):
  """The caller's handler of SIGTERM."""
  before = signal.signal(signal.SIGTERM, request.param)
  yield request.param
  signal.signal(signal.SIGTERM, before)


def test_signal_handler_of_the_caller(handler, workers):
  if handler is signal.SIG_DFL:
    with runtime.native_runtime():
      timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
      timer.start()
      with pytest.raises(SystemExit) as raised:
        _endless()
    assert raised.value.code == 128 + signal.SIGTERM
    assert not workers()
  else:
    with runtime.native_runtime():
      assert signal.getsignal(signal.SIGTERM) is handler
  assert signal.getsignal(signal.SIGTERM) is handler


def test_signal_that_another_thread_receives(workers):
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  try:
    with runtime.native_runtime():
      # It raises the signal in its own thread.
      threading.Timer(0.5, signal.raise_signal, (signal.SIGTERM,)).start()
      with pytest.raises(SystemExit):
        _endless()
    assert not workers()
  finally:
    signal.signal(signal.SIGTERM, before)


def test_dead_worker_raises_an_error(workers):
  with runtime.native_runtime():
    _seven()
    (worker,) = workers()
    worker.kill()

    with pytest.raises(RuntimeError, match='worker process ended with status'):
      _seven()


def test_values_can_outlive_their_worker(monkeypatch):
  ignored = []
  monkeypatch.setattr(sys, 'unraisablehook', ignored.append)
  worker = native._Worker()
  executor = worker.create_executor({})
  # TFF disposes of this many values in one request.
  values = [
      asyncio.run(executor.create_value(1, tff.TensorType(np.int32)))
      for _ in range(100)
  ]
  worker.end()

  del values
  gc.collect()

  assert not ignored


def test_ctrl_c_leaves_no_coroutine(monkeypatch):
  def interrupt(*unused_args):
    raise KeyboardInterrupt

  with runtime.native_runtime() as context:
    _seven()
    with monkeypatch.context() as patch, warnings.catch_warnings():
      warnings.simplefilter('error')
      patch.setattr(context._loop._loop, 'call_soon_threadsafe', interrupt)
      ignored = []
      patch.setattr(sys, 'unraisablehook', ignored.append)
      with pytest.raises(KeyboardInterrupt):
        _seven()
      gc.collect()

  assert not ignored


def test_computation_after_the_end_is_an_error():
  with runtime.native_runtime() as context:
    pass

  with (
      tff.framework.get_context_stack().install(context),
      pytest.raises(RuntimeError, match='enter `native_runtime'),
  ):
    _seven()


_PROGRAM = """
import signal
import sys

# A shell's background jobs ignore Ctrl-C, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

import psutil
import tensorflow as tf
import tensorflow_federated as tff
from tff_bn import runtime


@tff.tensorflow.computation
def seven():
  return tf.constant(7)


@tff.tensorflow.computation
def endless():
  return tf.while_loop(lambda i: i >= 0, lambda i: 1 - i, [tf.constant(0)])


def print_worker():
  (worker,) = psutil.Process().children()
  print(worker.pid, flush=True)


if sys.argv[1] == 'ended':
  with runtime.native_runtime():
    seven()
    runtime.end_worker_processes()
    assert not psutil.Process().children()
    try:
      seven()
    except RuntimeError as e:
      assert 'enter `native_runtime' in str(e), e
    else:
      raise AssertionError('The computation was run.')
  seven()  # In TFF's default context.
  print_worker()
else:
  block = runtime.native_runtime()  # Without a name, the block would end here.
  block.__enter__()
  seven()
  print_worker()
  endless()
"""


def _start(mode):
  return subprocess.Popen(
      [sys.executable, '-c', _PROGRAM, mode],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )


def test_taken_port_is_replaced(monkeypatch):
  with socket.create_server(('localhost', 0)) as taken:
    ports = [taken.getsockname()[1], portpicker.pick_unused_port()]
    monkeypatch.setattr(portpicker, 'pick_unused_port', lambda: ports.pop(0))
    with runtime.native_runtime():
      assert _seven() == 7
  assert not ports


@pytest.mark.parametrize('parent', ['alive', 'dead'])
def test_worker_does_not_start_after_its_parent_died(parent):
  # A dead parent is simulated by the id of another process.
  pid = os.getpid() if parent == 'alive' else os.getppid()

  result = subprocess.run(
      [
          *(sys.executable, '-I', '-S', '-c', native._LAUNCHER, str(pid)),
          *(sys.executable, '-c', 'print("started")'),
      ],
      capture_output=True,
      text=True,
  )

  assert result.stdout == ('started\n' if parent == 'alive' else '')


def _is_running(pid):
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def _ends(pid):
  """Waits for the kernel to kill a worker; returns whether it has ended."""
  deadline = time.monotonic() + 30
  while _is_running(pid) and time.monotonic() < deadline:
    time.sleep(0.01)
  return not _is_running(pid)


@pytest.mark.slow
def test_interpreter_exit():
  process = _start('ended')
  # Returns after all processes, the worker too, have closed the output.
  output, error = process.communicate()

  assert process.returncode == 0
  assert not _is_running(int(output))
  assert 'Exception ignored' not in error
  assert 'Traceback' not in error


@pytest.mark.slow
@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGKILL])
def test_signal_in_a_block_that_is_never_left(signum):
  process = _start('never left')
  try:
    pid = int(process.stdout.readline())
    assert _is_running(pid)
    time.sleep(0.2)  # The computation begins.
    os.kill(process.pid, signum)
    _, error = process.communicate(timeout=120)
  finally:
    process.kill()

  assert process.returncode == -signum
  if signum != signal.SIGKILL:
    assert 'Exception ignored' not in error
    assert not _is_running(pid)
  assert _ends(pid)


# Starts the launcher as `native` does, with a shell in place of the worker.
_PARENT = """
import os, subprocess, sys
command = [sys.executable, '-I', '-S', '-c', sys.argv[1], str(os.getpid())]
subprocess.Popen([*command, '/bin/sh', '-c', 'echo started; exec sleep 600'])
print('launched', flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize('last_line', ['launched', 'started'])
def test_worker_ends_with_its_killed_parent(last_line):
  process = subprocess.Popen(
      [sys.executable, '-I', '-S', '-c', _PARENT, native._LAUNCHER],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
  )
  while process.stdout.readline().strip() != last_line:
    assert process.poll() is None
  (worker,) = psutil.Process(process.pid).children()
  process.kill()
  process.wait()

  # The launcher, which becomes the worker.
  assert _ends(worker.pid)
  process.stdin.close()
  process.stdout.close()
