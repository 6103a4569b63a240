"""Connects this process to a Ray cluster, or starts one."""

from collections.abc import Iterator
import contextlib
import logging as python_logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading

from absl import logging
import grpc
import ray
from ray._private import grpc_utils
from ray._private import ray_constants
from ray._private import services

from tff_bn.common import cores
from tff_bn.runtime.on_ray import ray_options

_LOCAL_CLUSTER = pathlib.Path(__file__).with_name('ray_local_cluster.py')
_LOCAL_ENVIRONMENT = {
    # Without this, Ray replaces the loopback address by the machine's other
    # address.
    'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER': '0',
    # Don't send usage statistics to Ray's makers.
    'RAY_USAGE_STATS_ENABLED': '0',
}
_AUTH_VARIABLE = 'RAY_AUTH_MODE'
_END_SECONDS = 30
_ANSWER_SECONDS = 20
_CREDENTIALS_HINT = (
    'Check that the cluster runs, and that RAY_USE_TLS, the certificates,'
    ' RAY_AUTH_MODE and the token are the same here and there.'
)
# The messages of this package are clearer than Ray's.
_QUIET = dict(log_to_driver=False, logging_level=python_logging.ERROR)


@contextlib.contextmanager
def connected(options: ray_options.RayOptions) -> Iterator[threading.Event]:
  """Connects to a cluster, or starts one, for a `with` block.

  The yielded event is set when Ray's process on this machine has ended.

  Raises:
    ValueError: If there is no such cluster, or it refuses this process.
  """
  is_lost = threading.Event()
  with contextlib.ExitStack() as stack:
    if ray.is_initialized():
      if options.address is not None:
        raise ValueError(
            f'address={options.address!r} can not be used: this process is'
            ' connected to a Ray cluster already. Leave out the address to use'
            ' that cluster.'
        )
      stack.enter_context(_watched(is_lost))
    elif options.address in (None, ray_options.LOCAL):
      address = stack.enter_context(_local_cluster(options))
      with _local_connections():
        stack.enter_context(_connection(address, is_lost))
    else:
      address = _checked_address(options.address)
      stack.enter_context(_connection(address, is_lost))
    yield is_lost


@contextlib.contextmanager
def _local_cluster(options: ray_options.RayOptions) -> Iterator[str]:
  """Starts a cluster that only this machine can reach; yields its address."""
  num_cpus = cores.num_cores()
  if options.num_workers is not None:
    cpus = options.cpus_per_worker or ray_options.default_cpus_per_worker()
    # Ray may start more workers than there are cores; they take turns.
    num_cpus = max(num_cpus, options.num_workers * cpus)
  with tempfile.TemporaryFile('w+') as errors:
    process = subprocess.Popen(
        [sys.executable, str(_LOCAL_CLUSTER), str(num_cpus)],
        env={
            **os.environ,
            **_LOCAL_ENVIRONMENT,
            # Workers can import the same modules as this program.
            'PYTHONPATH': os.pathsep.join(map(os.path.abspath, sys.path)),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        # Ctrl-C goes to this program, which then ends the cluster.
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    try:
      address = process.stdout.readline().strip()
      if not address:
        process.wait()
        errors.seek(0)
        raise RuntimeError(f'Ray could not start: {errors.read().strip()}')
      yield address
    finally:
      process.stdin.close()
      try:
        process.wait(_END_SECONDS)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
      process.stdout.close()


def _checked_address(address: str) -> str:
  """Checks that a cluster answers, and returns its host and port.

  Ray itself would wait forever if only one side uses TLS.
  """
  place = address
  try:
    found = services.canonicalize_bootstrap_address_or_die(address)
    if found != address:
      place = f'{address} ({found})'
    with grpc_utils.init_grpc_channel(found) as channel:
      grpc.channel_ready_future(channel).result(_ANSWER_SECONDS)
  except grpc.FutureTimeoutError as error:
    reason = f'no answer within {_ANSWER_SECONDS} s'
    raise _unusable(place, reason) from error
  except Exception as error:
    raise _unusable(place, str(error)) from error
  return found


def _unusable(address: str, reason: str) -> ValueError:
  """Returns the error for a cluster that can't be used, with Ray's reason."""
  reason = ' '.join(reason.split())
  return ValueError(
      f'No Ray cluster can be used at {address}: {reason.rstrip(".")}.'
      f' {_CREDENTIALS_HINT}'
  )


@contextlib.contextmanager
def _connection(address: str, is_lost: threading.Event) -> Iterator[None]:
  try:
    with _same_signal_handler():
      ray.init(address=address, **_QUIET)
  except Exception as error:
    ray.shutdown()
    raise _unusable(address, str(error)) from error
  try:
    with _watched(is_lost):
      yield
  finally:
    # If the cluster is lost, Ray would wait for it and then end this process.
    if not is_lost.is_set():
      ray.shutdown()


@contextlib.contextmanager
def _watched(is_lost: threading.Event) -> Iterator[None]:
  """Sets an event when Ray's process on this machine, the raylet, ends.

  When Ray notices the end of the raylet, it ends the program without a message.
  """
  node = ray._private.worker._global_node
  with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(node.plasma_store_socket_name)
    is_over = threading.Event()

    def watch():
      with contextlib.suppress(OSError):
        connection.recv(1)  # Returns when the connection ends.
      if not is_over.is_set():
        is_lost.set()
        logging.error("Ray's process on this machine has ended.")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
      yield
    finally:
      is_over.set()
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
      thread.join()


@contextlib.contextmanager
def _same_signal_handler() -> Iterator[None]:
  """Restores the SIGTERM handler that Ray replaces."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  handler = signal.getsignal(signal.SIGTERM)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _local_connections() -> Iterator[None]:
  """Lets this process connect to the cluster of `_local_cluster`."""
  # By default, that cluster asks for a token.
  if _AUTH_VARIABLE not in os.environ:
    os.environ[_AUTH_VARIABLE] = 'token'
    ray._raylet.Config.initialize('')
  enabled = ray_constants.ENABLE_RAY_CLUSTER
  ray_constants.ENABLE_RAY_CLUSTER = False
  try:
    yield
  finally:
    ray_constants.ENABLE_RAY_CLUSTER = enabled
