"""TensorFlow Federated's own runtime, with a worker that ends with its parent.

TFF runs computations in a child process, its `worker_binary`. If TFF starts
this process itself, the worker survives the Python process, keeps its standard
output open (so that `program | tail` hangs) and prints an error while the
interpreter shuts down. This module starts the same binary and connects TFF to
it with the public parts of `tff.framework`. The worker then

*   ends with the `with native_runtime():` block, even after an error,
*   is killed by the kernel (Linux) if the Python process dies without cleaning
    up, for example after `kill -9`.
"""

import asyncio
import atexit
from collections.abc import Callable, Iterator
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

from tff_bn.common import cores
from tff_bn.common import interruptible
from tff_bn.imports import tff_stand_ins
from tff_bn.runtime import secure_intrinsics

_WORKER_PATH = os.path.join(
    os.path.dirname(os.path.abspath(tff.__file__)),
    'data',
    tff_stand_ins.WORKER_NAME,
)
_ENDED = "TFF's native runtime has ended; enter `native_runtime()` again."
_NOT_STARTED = "TFF's worker process did not start."
_START_TIMEOUT_SECONDS = 120.0
_START_ATTEMPTS = 3
_END_TIMEOUT_SECONDS = 5.0

_MAX_MESSAGE_BYTES = 2 * 1000 * 1000 * 1000  # As in TFF's own channel.
_CHANNEL_OPTIONS = (
    ('grpc.max_message_length', _MAX_MESSAGE_BYTES),
    ('grpc.max_receive_message_length', _MAX_MESSAGE_BYTES),
    ('grpc.max_send_message_length', _MAX_MESSAGE_BYTES),
    # The worker runs on this machine, so no proxy is needed.
    ('grpc.enable_http_proxy', 0),
)

# A new interpreter runs this and then becomes the worker. It asks the kernel to
# kill it when its parent dies; `prctl(PR_SET_PDEATHSIG)` survives the `exec`.
# A `preexec_fn` could do the same, but is unsafe in a process with threads.
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
  """A connection to a worker, which may end before the values it holds."""

  def dispose(self, request: Any) -> None:
    # TFF calls this during garbage collection, where errors are not handled.
    with contextlib.suppress(tff.framework.RetryableError):
      super().dispose(request)


class _Worker:
  """A `worker_binary` process, started on first use."""

  def __init__(self):
    self._lock = threading.Lock()
    self._process: Optional[subprocess.Popen[bytes]] = None
    self._stub: Optional[_Stub] = None
    self._ended = False

  def create_executor(
      self, cardinalities: tff.framework.CardinalitiesType
  ) -> tff.framework.RemoteExecutor:
    """Returns an executor, after starting the worker if necessary."""
    with self._lock:
      # TFF retries calls whose connection broke. Starting another worker then
      # would undo `end`, or fail for the same reason (mostly lack of memory).
      if self._ended:
        raise RuntimeError(_ENDED)
      process = self._process
      if process is None:
        process = self._start()
      status = process.poll()
    if status is not None:
      raise RuntimeError(
          f"TFF's worker process ended with status {status}"
          + (' (perhaps it ran out of memory).' if status == -9 else '.')
      )
    cardinalities.setdefault(tff.CLIENTS, 0)
    executor = tff.framework.RemoteExecutor(self._stub)
    executor.set_cardinalities(cardinalities)
    return executor

  def _start(self) -> subprocess.Popen[bytes]:
    """Starts the process and waits until it answers."""
    if not os.path.isfile(_WORKER_PATH):
      raise RuntimeError(
          f'{_WORKER_PATH} is missing; install tensorflow-federated again.'
      )
    # Another program can take a port between its choice and its use.
    for _ in range(_START_ATTEMPTS):
      port = portpicker.pick_unused_port()
      process = self._start_at(port)
      if self._ended or _is_listening(process, port):
        break
    else:
      raise RuntimeError(_NOT_STARTED)
    channel = grpc.insecure_channel(f'localhost:{port}', _CHANNEL_OPTIONS)
    # The stub would watch the connection in a thread that can't be stopped, and
    # nothing here needs the connection's state.
    channel.subscribe = lambda callback, try_to_connect=None: None
    self._stub = _Stub(channel)
    return process

  def _start_at(self, port: int) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, '-I', '-S', '-c', _LAUNCHER, str(os.getpid())),
        *(_WORKER_PATH, f'--port={port}'),
        '--max_concurrent_computation_calls=-1',
    ]
    started: concurrent.futures.Future[subprocess.Popen[bytes]] = (
        concurrent.futures.Future()
    )

    # The kernel sends the parent-death signal when the *thread* that started
    # the child ends. This thread ends after the child.
    def keep():
      try:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # The bits of results depend on the number of threads.
            env={
                **os.environ,
                cores.ENVIRONMENT_VARIABLE: str(cores.per_operation()),
            },
            # Ctrl-C goes to the whole process group, but the worker has to live
            # until the program has cleaned up.
            start_new_session=True,
        )
      except OSError as error:
        started.set_exception(error)
        return
      started.set_result(self._process)
      self._process.wait()

    threading.Thread(target=keep, name='tff-worker', daemon=True).start()
    try:
      return started.result()
    except OSError as error:
      raise RuntimeError(_NOT_STARTED) from error

  def end(self) -> None:
    """Kills the process for good and waits for its end."""
    # First without the lock, whose holder may be waiting for the process.
    self._ended = True
    if self._process is not None:
      self._process.kill()
    with self._lock:
      if self._process is not None:  # It may have started in the meantime.
        self._process.kill()
        self._process.wait()


def _is_listening(process: subprocess.Popen[bytes], port: int) -> bool:
  """Waits until a process listens on a port; kills it if it takes too long."""
  deadline = time.monotonic() + _START_TIMEOUT_SECONDS
  while process.poll() is None and time.monotonic() < deadline:
    # Don't connect to the port: another program may be listening there.
    with contextlib.suppress(psutil.Error):
      connections = psutil.Process(process.pid).net_connections('tcp')
      if any(
          c.status == psutil.CONN_LISTEN and c.laddr.port == port
          for c in connections
      ):
        return True
    time.sleep(0.02)
  process.kill()
  return False


class _EventLoop:
  """An event loop that runs in a thread."""

  def __init__(self):
    started: concurrent.futures.Future[asyncio.AbstractEventLoop] = (
        concurrent.futures.Future()
    )

    async def serve():
      self._closed = asyncio.Event()
      started.set_result(asyncio.get_running_loop())
      await self._closed.wait()

    self._thread = threading.Thread(
        target=lambda: asyncio.run(serve()), name='tff-native', daemon=True
    )
    self._thread.start()
    self._loop = started.result()

  def call(self, function: Callable[..., None], *args: Any) -> None:
    """Calls a function in the event loop."""
    if not self._thread.is_alive():
      raise RuntimeError(_ENDED)
    self._loop.call_soon_threadsafe(function, *args)

  def close(self) -> None:
    """Ends the thread."""
    if self._thread.is_alive():
      self._loop.call_soon_threadsafe(self._closed.set)
      self._thread.join(_END_TIMEOUT_SECONDS)


def _compile(comp: tff.framework.ConcreteComputation) -> Any:
  """Compiles a computation for TFF's executor, which has no secure sums."""
  proto = tff.framework.ConcreteComputation.get_proto(comp)
  if secure_intrinsics.occur_in(proto):
    comp = secure_intrinsics.replaced(comp)
  return tff.backends.native.desugar_and_transform_to_native(comp)


class _NativeContext(tff.framework.SyncContext):
  """TFF's `create_sync_local_cpp_execution_context` with a `close` method."""

  def __init__(self):
    self._worker = _Worker()
    self._async_context = tff.framework.AsyncExecutionContext(
        executor_fn=tff.framework.ResourceManagingExecutorFactory(
            self._worker.create_executor
        ),
        compiler_fn=_compile,
        transform_args=tff.tensorflow.transform_args,
        transform_result=tff.tensorflow.transform_result,
    )
    self._lock = threading.Lock()
    self._loop: Optional[_EventLoop] = None

  def invoke(self, comp: Any, arg: Any) -> Any:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    with self._lock:
      if self._loop is None:
        self._loop = _EventLoop()
      self._loop.call(self._begin, future, comp, arg)
    return interruptible.result(future)

  def _begin(
      self, future: concurrent.futures.Future[Any], comp: Any, arg: Any
  ) -> None:
    """Starts a computation in the event loop.

    This thread creates the coroutine because Ctrl-C can't interrupt this thread
    and leave a coroutine that nothing awaits.
    """

    def finish(task: asyncio.Task[Any]) -> None:
      if task.cancelled():
        future.cancel()
      elif error := task.exception():
        future.set_exception(error)
      else:
        future.set_result(task.result())

    task = asyncio.create_task(self._async_context.invoke(comp, arg))
    task.add_done_callback(finish)

  def close(self) -> None:
    """Ends the worker and all running computations."""
    self._worker.end()
    # If the thread is inside of C++ code when the interpreter ends, the process
    # aborts.
    if self._loop is not None:
      self._loop.close()


# The open `native_runtime` blocks by their contexts.
_blocks: dict[_NativeContext, contextlib.ExitStack] = {}
_owner_pid = os.getpid()


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
  """Turns SIGTERM into `SystemExit`, so that `finally` blocks run."""
  # Only the main thread can set handlers. Keep a handler that other code set.
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

  The worker starts with the first computation and ends with the block, also
  after an exception, Ctrl-C or SIGTERM (which raises `SystemExit`). It ends at
  the latest with this process, even if this process is killed.

  Each thread has its own default context in TFF. To run computations in another
  thread, pass the context to `tff.framework.set_default_context` in that
  thread.

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
    del previous  # If the block never ends, this frame must not keep it alive.
    block.enter_context(_sigterm_as_exit())
    tff.framework.set_default_context(context)
    yield context


def end_worker_processes() -> None:
  """Ends all TFF worker processes that this process has started.

  These are the workers of open `native_runtime` blocks and of TFF's own default
  context. A context fails at its next computation after its worker has ended.
  """
  if os.getpid() != _owner_pid:  # A fork must not end its parent's workers.
    return
  for context in list(_blocks):
    context.close()
  children = tff_stand_ins.kill_workers()
  # Not `child.wait()`, which would reap the process: TFF sends a signal to its
  # process id later, which another process could have by then.
  deadline = time.monotonic() + _END_TIMEOUT_SECONDS
  while any(_is_running(c) for c in children) and time.monotonic() < deadline:
    time.sleep(0.01)


def _is_running(process: psutil.Process) -> bool:
  try:
    return process.status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def _end_at_exit() -> None:
  """Ends the workers and the open blocks while modules can still be used.

  `tff_stand_ins` ends TFF's own default context.
  """
  # TFF's own context must not notice that its worker ends.
  tff_stand_ins.stop_watching_workers()
  end_worker_processes()
  if os.getpid() == _owner_pid:
    for block in list(_blocks.values()):
      block.close()


atexit.register(_end_at_exit)
