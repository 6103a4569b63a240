"""TensorFlow Federated's own runtime, with a worker that never outlives us.

TFF executes computations in a child process, its `worker_binary`. Left alone
that child survives the Python process that started it, keeps its standard
output open (so that `program | tail` hangs) and prints an error while the
interpreter shuts down. This module starts the same binary itself and connects
TFF to it with the public parts of `tff.framework`, so that the child

*   ends when the `with native_runtime():` block ends, for whatever reason,
*   is killed by the kernel (Linux) when the Python process dies without a
    chance to clean up, `kill -9` included.
"""

import asyncio
import atexit
from collections.abc import Iterator
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Optional

import grpc
import portpicker
import psutil
import tensorflow_federated as tff

from tff_bn.imports import tff_stand_ins

_WORKER_NAME = 'worker_binary'
_WORKER_PATH = os.path.join(
    os.path.dirname(os.path.abspath(tff.__file__)), 'data', _WORKER_NAME
)
_LEFT = "TFF's native runtime was left; enter `native_runtime()` again."
_START_TIMEOUT_SECONDS = 120.0
_START_ATTEMPTS = 3
_END_TIMEOUT_SECONDS = 5.0

_MAX_MESSAGE_BYTES = 2 * 1000 * 1000 * 1000  # As TFF's own channel.
_CHANNEL_OPTIONS = (
    ('grpc.max_message_length', _MAX_MESSAGE_BYTES),
    ('grpc.max_receive_message_length', _MAX_MESSAGE_BYTES),
    ('grpc.max_send_message_length', _MAX_MESSAGE_BYTES),
    # The worker is on this machine: a proxy would only be in the way.
    ('grpc.enable_http_proxy', 0),
)

# Runs in a new interpreter that then becomes the worker: it asks the kernel to
# kill it when its parent dies. `prctl(PR_SET_PDEATHSIG)` survives the `exec`.
# A `preexec_fn` would do the same, but is unsafe in a process with threads.
_LAUNCHER = """
import os, signal, sys
if sys.platform.startswith('linux'):
  import ctypes
  ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != int(sys.argv[1]):  # The parent is already dead.
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class _Stub(tff.framework.RemoteExecutorGrpcStub):
  """A connection to a worker whose values end with it."""

  def dispose(self, request: Any) -> None:
    # Called when a value is garbage-collected, where an error can't be handled.
    with contextlib.suppress(tff.framework.RetryableError):
      super().dispose(request)


class _Worker:
  """One `worker_binary` process, started at the first use."""

  def __init__(self):
    self._lock = threading.Lock()
    self._process: Optional[subprocess.Popen[bytes]] = None
    self._stub: Optional[_Stub] = None
    self._ended = False

  def create_executor(
      self, cardinalities: tff.framework.CardinalitiesType
  ) -> tff.framework.RemoteExecutor:
    """Returns an executor for so many clients, starting the worker if needed.

    Args:
      cardinalities: The number of clients.

    Returns:
      A `tff.framework.RemoteExecutor`.

    Raises:
      RuntimeError: If the worker does not start, died, or was ended.
    """
    with self._lock:
      # TFF retries calls whose connection broke. Starting another worker then
      # would undo `end`, or repeat what killed the first one (mostly memory).
      if self._ended:
        raise RuntimeError(_LEFT)
      if self._process is None:
        self._start()
      status = self._process.poll()
    if status is not None:
      raise RuntimeError(
          f"TFF's worker process ended with status {status}"
          + (' (perhaps it ran out of memory).' if status == -9 else '.')
      )
    cardinalities.setdefault(tff.CLIENTS, 0)
    executor = tff.framework.RemoteExecutor(self._stub)
    executor.set_cardinalities(cardinalities)
    return executor

  def _start(self) -> None:
    """Starts the process and waits until it answers."""
    if not os.path.isfile(_WORKER_PATH):
      raise RuntimeError(
          f'{_WORKER_PATH} is missing; install tensorflow-federated again.'
      )
    # Another program can take a port between its choice and its use.
    for _ in range(_START_ATTEMPTS):
      port = portpicker.pick_unused_port()
      self._start_at(port)
      if self._ended or self._is_listening(port):
        break
    else:
      raise RuntimeError("TFF's worker process did not start.")
    channel = grpc.insecure_channel(f'localhost:{port}', _CHANNEL_OPTIONS)
    # The stub would watch the connection in a thread that can't be stopped;
    # nothing here asks for what it learns.
    channel.subscribe = lambda callback, try_to_connect=None: None
    self._stub = _Stub(channel)

  def _start_at(self, port: int) -> None:
    """Starts the process."""
    command = [
        *(sys.executable, '-I', '-S', '-c', _LAUNCHER, str(os.getpid())),
        *(_WORKER_PATH, f'--port={port}'),
        '--max_concurrent_computation_calls=-1',
    ]
    started = threading.Event()
    errors = []

    # The kernel sends the parent-death signal when the *thread* that started
    # the child ends. This thread ends after the child.
    def keep():
      try:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C goes to the whole process group; the worker has to live
            # until the program has put its things in order.
            start_new_session=True,
        )
      except OSError as e:
        errors.append(e)
      started.set()
      if self._process is not None:
        self._process.wait()

    threading.Thread(target=keep, name='tff-worker', daemon=True).start()
    started.wait()
    if errors:
      raise RuntimeError("TFF's worker process did not start.") from errors[0]

  def _is_listening(self, port: int) -> bool:
    """Waits for the process; whether it came so far that it can be used."""
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while self._process.poll() is None and time.monotonic() < deadline:
      # Not by connecting to the port: another program may be listening there.
      with contextlib.suppress(psutil.Error):
        connections = psutil.Process(self._process.pid).net_connections('tcp')
        if any(
            c.status == psutil.CONN_LISTEN and c.laddr.port == port
            for c in connections
        ):
          return True
      time.sleep(0.02)
    self._process.kill()
    return False

  def end(self) -> None:
    """Kills the process and waits for its end; nothing can start it again."""
    # Before the lock: a thread that holds it may be waiting for the process.
    self._ended = True
    if self._process is not None:
      self._process.kill()
    with self._lock:
      if self._process is not None:  # Also one that was starting just now.
        self._process.kill()
        self._process.wait()


class _NativeContext(tff.framework.SyncContext):
  """As TFF's `create_sync_local_cpp_execution_context`, but can be closed."""

  def __init__(self):
    self._worker = _Worker()
    self._async_context = tff.framework.AsyncExecutionContext(
        executor_fn=tff.framework.ResourceManagingExecutorFactory(
            self._worker.create_executor
        ),
        compiler_fn=tff.backends.native.desugar_and_transform_to_native,
        transform_args=tff.tensorflow.transform_args,
        transform_result=tff.tensorflow.transform_result,
    )
    self._lock = threading.Lock()
    self._thread: Optional[threading.Thread] = None
    self._loop: Optional[asyncio.AbstractEventLoop] = None
    self._closed: Optional[asyncio.Event] = None

  def invoke(self, comp: Any, arg: Any) -> Any:
    with self._lock:
      if self._thread is None:
        self._start_thread()
      if not self._thread.is_alive():
        raise RuntimeError(_LEFT)
      future = concurrent.futures.Future()
      self._loop.call_soon_threadsafe(self._begin, future, comp, arg)
    return future.result()

  def _begin(
      self, future: concurrent.futures.Future[Any], comp: Any, arg: Any
  ) -> None:
    """Starts a computation, in the event loop.

    The coroutine is made here: Ctrl-C can't come between, in this thread, and
    leave one that nobody awaits.

    Args:
      future: Gets the result.
      comp: The computation.
      arg: Its argument.
    """

    def finish(task: asyncio.Task[Any]) -> None:
      if task.cancelled():
        future.cancel()
      elif error := task.exception():
        future.set_exception(error)
      else:
        future.set_result(task.result())

    task = self._loop.create_task(self._async_context.invoke(comp, arg))
    task.add_done_callback(finish)

  def _start_thread(self) -> None:
    """Starts an event loop, in which the asynchronous context works."""
    started = threading.Event()

    async def serve():
      self._loop = asyncio.get_running_loop()
      self._closed = asyncio.Event()
      started.set()
      await self._closed.wait()

    self._thread = threading.Thread(
        target=lambda: asyncio.run(serve()), name='tff-native', daemon=True
    )
    self._thread.start()
    started.wait()

  def close(self) -> None:
    """Ends the worker, and what is being computed."""
    self._worker.end()
    # The thread must not be in the middle of something when the interpreter
    # ends: if it is inside of C++ code, the process aborts.
    if self._thread is not None and self._thread.is_alive():
      self._loop.call_soon_threadsafe(self._closed.set)
      self._thread.join(_END_TIMEOUT_SECONDS)


# The `native_runtime` blocks that are open, by their contexts.
_blocks: dict[_NativeContext, contextlib.ExitStack] = {}
_owner_pid = os.getpid()


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
  """Turns SIGTERM into `SystemExit`, so that `finally` blocks run."""
  # Python lets only the main thread set handlers; a handler that somebody else
  # has set stays.
  if (
      threading.current_thread() is not threading.main_thread()
      or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
  ):
    yield
    return

  def handle(signum: int, frame: object) -> None:
    del frame  # Unused.
    raise SystemExit(128 + signum)

  signal.signal(signal.SIGTERM, handle)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def native_runtime() -> Iterator[tff.framework.SyncContext]:
  """Runs TFF computations in TFF's C++ worker process for a `with` block.

  The worker starts with the first computation that is invoked and ends with
  the block: at its normal end, at an exception, at Ctrl-C, at SIGTERM (which
  becomes a `SystemExit`), and at the latest with this process, however it ends.

  The default context of TFF belongs to one thread. To run computations in
  another one, call `tff.framework.set_default_context` there with what this
  yields.

  Yields:
    The TFF execution context, installed as the calling thread's default.
  """
  context = _NativeContext()
  with contextlib.ExitStack() as block:
    _blocks[context] = block
    block.callback(_blocks.pop, context)
    block.callback(context.close)
    previous = tff.framework.get_context_stack().current
    block.callback(tff.framework.set_default_context, previous)
    del previous  # What never leaves the block must not keep it.
    block.enter_context(_sigterm_as_exit())
    tff.framework.set_default_context(context)
    yield context


def end_worker_processes() -> None:
  """Ends every TFF worker process that this process has started.

  That is those of `native_runtime` blocks that are still open, and those that
  TFF's own default context has started. A context whose worker was ended
  here fails at its next computation.
  """
  if os.getpid() != _owner_pid:  # A fork has no part in its parent's workers.
    return
  for context in list(_blocks):
    context.close()
  children = [
      child
      for child in psutil.Process().children()
      if _name_of(child) == _WORKER_NAME
  ]
  for child in children:
    with contextlib.suppress(psutil.NoSuchProcess):
      child.kill()
  # Not `child.wait()`: that would reap the process, and TFF, which has started
  # it, signals its number later, when it may be another process's.
  deadline = time.monotonic() + _END_TIMEOUT_SECONDS
  while any(_is_running(c) for c in children) and time.monotonic() < deadline:
    time.sleep(0.01)


def _name_of(process: psutil.Process) -> str:
  try:
    return process.name()
  except psutil.NoSuchProcess:
    return ''


def _is_running(process: psutil.Process) -> bool:
  try:
    return process.status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def _end_at_exit() -> None:
  """Ends the workers, and blocks never left, while modules can still be used.

  TFF's own default context ends in `tff_stand_ins`.
  """
  # First: TFF's own context must not notice that its worker ends.
  tff_stand_ins.stop_watching_workers()
  end_worker_processes()
  if os.getpid() == _owner_pid:
    for block in list(_blocks.values()):
      block.close()


atexit.register(_end_at_exit)
