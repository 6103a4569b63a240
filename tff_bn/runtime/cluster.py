"""Other machines' devices, by TensorFlow's distributed runtime.

On each machine a `tff_bn.runtime.Server` runs, mostly as `tff-bn-worker`.
This process, the coordinator, places clients on the workers' devices and adds
up what they return.

The transport is TensorFlow's gRPC. It neither encrypts nor authenticates:
whoever can reach a worker's port can run anything there. It is for trusted
networks only.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import json
import os
import socket
import threading
from typing import Optional, TypeVar

from absl import logging
import tensorflow as tf

from tff_bn.runtime import devices as devices_lib
from tff_bn.runtime import execution
from tff_bn.runtime import loopback
from tff_bn.runtime import remote_worker
from tff_bn.runtime import server
from tff_bn.runtime.remote_worker import Worker

_T = TypeVar('_T')

ON_WORKER_LOSS = ('continue', 'stop')

# A worker that does not answer for as long as the sum of the two is lost.
_KEEPALIVE_SECONDS = 10
_KEEPALIVE_TIMEOUT_SECONDS = 5
_PING_TIMEOUT_SECONDS = _KEEPALIVE_SECONDS + _KEEPALIVE_TIMEOUT_SECONDS
_REACH_SECONDS = 5.0
_ENVIRONMENT = {
    # By default, remote operations are queued and the Python lock is held while
    # one waits for the shape of a result, so that a worker that hangs stops all
    # threads of the program.
    'TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE': 'False',
    'TF_GRPC_DEFAULT_OPTIONS': ','.join(
        [
            f'grpc.keepalive_time_ms={1000 * _KEEPALIVE_SECONDS}',
            f'grpc.keepalive_timeout_ms={1000 * _KEEPALIVE_TIMEOUT_SECONDS}',
            'grpc.keepalive_permit_without_calls=1',
            'grpc.http2.max_pings_without_data=0',
            # gRPC sends pings of its own, too, and by default waits a minute.
            f'grpc.http2.ping_timeout_ms={1000 * _PING_TIMEOUT_SECONDS}',
        ]
    ),
}


class WorkerLostError(RuntimeError):
  """A worker was lost, and the computation can't or shall not go on."""


class Cluster:
  """The workers that are left, and their devices."""

  def __init__(
      self,
      addresses: Sequence[str],
      device_names: Optional[Sequence[str]],
      max_concurrent_clients: Optional[int],
      on_worker_loss: str,
  ):
    """Connects to the workers.

    Args:
      addresses: Each worker's `host:port`.
      device_names: The devices of each worker, such as `['GPU:0']`. Default:
        its GPUs, or its CPU if it has none.
      max_concurrent_clients: See `devices.make_devices`.
      on_worker_loss: `'continue'` or `'stop'`.

    Raises:
      ValueError: If an address or `on_worker_loss` is wrong, a worker can't be
        reached, has other versions, or lacks a device.
    """
    if on_worker_loss not in ON_WORKER_LOSS:
      raise ValueError(
          f'on_worker_loss={on_worker_loss!r} must be one of'
          f' {", ".join(map(repr, ON_WORKER_LOSS))}.'
      )
    _check_addresses(addresses)
    self._device_names = device_names
    self._max_concurrent_clients = max_concurrent_clients
    self._on_worker_loss = on_worker_loss
    self._lock = threading.RLock()
    # The numbers of tasks stay, also when others are lost.
    self._addresses = dict(enumerate(addresses))
    self._workers: list[Worker] = []
    self._devices: list[execution.Device] = []
    self._connect()
    try:
      self._greet()
    except BaseException:
      self.close()
      raise

  @property
  def workers(self) -> list[Worker]:
    """The workers that are left."""
    with self._lock:
      return list(self._workers)

  @property
  def devices(self) -> list[execution.Device]:
    """The devices of the workers that are left."""
    with self._lock:
      return list(self._devices)

  def close(self) -> None:
    """Ends the threads; the workers go on serving."""
    for device in self._devices:
      device.lanes.close()
    for worker in self._workers:
      worker.stop()

  def _connect(self) -> None:
    """Connects to the workers that are left."""
    self.close()
    os.environ.update(_ENVIRONMENT)
    # Also this process gets a server, to which nobody else has to connect.
    with loopback.restrict_new_servers():
      tf.config.experimental_connect_to_cluster(
          tf.train.ClusterSpec({remote_worker.JOB: self._addresses}),
          protocol='grpc',
      )
      tf.config.list_logical_devices()  # Connects now.
    self._workers = [
        Worker(address, number) for number, address in self._addresses.items()
    ]
    self._devices = devices_lib.make_devices(
        [
            (name, worker)
            for worker in self._workers
            for name in self._names(worker)
        ],
        self._max_concurrent_clients,
    )
    for worker in self._workers:
      worker.start()

  def _names(self, worker: Worker) -> list[str]:
    if self._device_names is None:
      return worker.devices('GPU') or worker.devices('CPU')[:1]
    known = worker.devices('CPU') + worker.devices('GPU')
    names = []
    for name in self._device_names:
      full = f'{worker.task}/device:{name.upper()}'
      if full not in known:
        short = [device.rpartition('device:')[2] for device in known]
        raise ValueError(
            f'The worker {worker.address} has no device {name}; it has'
            f' {", ".join(short)}.'
        )
      names.append(full)
    return names

  def _greet(self) -> None:
    """Checks that the workers fit to this program."""
    expected = server.versions()
    try:
      greetings = self.for_each_worker(lambda w: w.ask(server.HELLO, None))
    except RuntimeError as error:
      raise ValueError(f'{error} Is it a tff-bn-worker?') from error
    for worker, greeting in greetings:
      versions = json.loads(greeting)
      if versions != expected:
        raise ValueError(
            f'The worker {worker.address} has {_list(versions)}, but this'
            f' program has {_list(expected)}; they must be the same.'
        )

  def for_each_worker(
      self, function: Callable[[Worker], _T]
  ) -> list[tuple[Worker, _T]]:
    """Calls a function for all workers at the same time.

    Args:
      function: The function.

    Returns:
      Each worker and what the function returned.
    """
    workers = self.workers
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
      return list(zip(workers, pool.map(function, workers)))

  def recover(
      self, devices: Sequence[execution.Device], error: Exception
  ) -> list[execution.Device]:
    """Connects anew to the workers that are left; see `execution.Devices`.

    Args:
      devices: The devices on which something failed.
      error: What happened.

    Returns:
      The devices that are left.

    Raises:
      WorkerLostError: If nothing can go on.
      Exception: The given error, if no worker was lost.
    """
    with self._lock:
      if devices[0] not in self._devices:
        return self.devices  # Another thread was faster.
      alive = self.for_each_worker(Worker.is_alive)
      lost = [worker.address for worker, is_alive in alive if not is_alive]
      left = [worker.address for worker, is_alive in alive if is_alive]
      if not lost:
        raise error
      message = f'Lost the worker{"s" * (len(lost) > 1)} {", ".join(lost)}'
      if self._on_worker_loss == 'stop':
        raise WorkerLostError(f'{message}.') from error
      if not left:
        raise WorkerLostError(f'{message}; no worker is left.') from error
      logging.warning(
          '%s; its clients are computed again on %s.', message, ', '.join(left)
      )
      self._addresses = {
          number: address
          for number, address in self._addresses.items()
          if address in left
      }
      self._connect()
      return self.devices


def _list(versions: dict[str, str]) -> str:
  return ', '.join(f'{name} {version}' for name, version in versions.items())


def _check_addresses(addresses: Sequence[str]) -> None:
  """Checks that there are workers, as far as one can see from outside."""
  if not addresses:
    raise ValueError('The cluster is empty; name at least one worker.')
  if len(set(addresses)) < len(addresses):
    raise ValueError(f'{", ".join(addresses)} names a worker twice.')
  for address in addresses:
    host, colon, port = address.rpartition(':')
    if not colon or not host or not port.isdecimal():
      raise ValueError(f'{address!r} is not understood; a worker is host:port.')
    try:
      socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
      raise ValueError(
          f'The worker {address} can not be reached: {error}. Is'
          f' `tff-bn-worker --port={port}` running there?'
      ) from error
