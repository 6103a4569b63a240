"""A worker as the program sees it that computes clients on it."""

from collections.abc import Callable, Hashable, Iterator
import contextlib
import threading
import time
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tff_bn.runtime import server

_T = TypeVar('_T')

# The CPU of this process, by a name that holds in any `tf.device` block.
HOST = '/job:localhost/replica:0/task:0/device:CPU:0'
# What TensorFlow calls all workers together.
JOB = 'worker'

# Traffic in between keeps gRPC from sending pings to a worker that is busy,
# and its server from taking many of them for an attack.
_HEARTBEAT_SECONDS = 2.0
_GRACE_SECONDS = 2.0
_ATTEMPTS = 5
_PAUSE_SECONDS = 0.2


def _new_tensor() -> tf.Tensor:
  # TensorFlow keeps scalars, together with what it knows of their copies on
  # workers, also when it has a new connection.
  return tf.constant(np.zeros(1))


class Worker:
  """A worker, until it or another one is lost.

  Attributes:
    address: Its `host:port`.
    task: Its task in TensorFlow.
  """

  def __init__(self, address: str, number: int):
    """Initializes the worker.

    Args:
      address: Its `host:port`.
      number: The number of its task.
    """
    self.address = address
    self.task = f'/job:{JOB}/replica:0/task:{number}'
    self._lock = threading.Lock()
    self._kept = {}
    self._has_failed = threading.Event()
    self._stopped = threading.Event()
    self._is_dead = threading.Event()
    self._heart = threading.Thread(
        target=self._beat, name='tff-bn-heart', daemon=True
    )

  def start(self) -> None:
    """Starts to look whether it is alive, until `stop`."""
    self._heart.start()

  def stop(self) -> None:
    """Drops all that is kept, and waits until the connection is not used."""
    self._stopped.set()
    self._heart.join()
    with self._lock:
      self._kept.clear()

  def _beat(self) -> None:
    while not self._stopped.wait(_HEARTBEAT_SECONDS):
      if not self._answers():
        self._is_dead.set()
        return

  def _answers(self) -> bool:
    for _ in range(_ATTEMPTS):
      try:
        with tf.device(self.host_device):
          remote = tf.identity(_new_tensor())
        with tf.device(HOST):
          tf.identity(remote)
        return True
      except tf.errors.OpError as error:
        # Operations here fail, too, while TensorFlow finds out that *another*
        # worker is gone: it tells all workers of a new kind of operation.
        if f'remote target {self.task} ' in error.message:
          return False
        time.sleep(_PAUSE_SECONDS)
    return False

  @contextlib.contextmanager
  def watch(self) -> Iterator[None]:
    """For a block that uses the worker, and may fail because it is lost."""
    if self._has_failed.is_set():
      # It would only take time to find out again.
      raise tf.errors.UnavailableError(None, None, f'{self.address} has failed')
    try:
      yield
    except tf.errors.OpError:
      self._has_failed.set()
      raise

  def is_alive(self) -> bool:
    """Whether it answers; takes as long as it takes to find out."""
    # A connection breaks for all operations at the same time.
    if self._is_dead.wait(_GRACE_SECONDS if self._has_failed.is_set() else 0):
      return False
    self._has_failed.clear()
    return self._answers()

  @property
  def host_device(self) -> str:
    """Its CPU, where datasets are."""
    return f'{self.task}/device:CPU:0'

  def devices(self, kind: str) -> list[str]:
    """The full names of its devices of a kind, such as `'GPU'`."""
    return [
        device.name
        for device in tf.config.list_logical_devices(kind)
        if device.name.startswith(f'{self.task}/')
    ]

  def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
    """Returns what was made for a key, and makes it the first time.

    For tensors and functions that stay on the worker.

    Args:
      key: The key.
      make: Called with the worker's CPU as the default device.

    Returns:
      What `make` returned.
    """
    with self._lock:
      if key not in self._kept:
        with tf.device(self.host_device):
          self._kept[key] = make()
      return self._kept[key]

  def ask(self, name: str, request: Any) -> str:
    """Calls a Python function of the worker that returns a string.

    Args:
      name: The function's name, see `tff_bn.runtime.Server`.
      request: Its argument, anything that JSON knows.

    Returns:
      The string.

    Raises:
      RuntimeError: If the function fails.
    """
    try:
      with tf.device(self.host_device):
        (remote,) = server.call(
            tf.identity(server.encode_call(name, request)), [tf.string]
        )
      with tf.device(HOST):
        return tf.identity(remote).numpy().decode()
    except tf.errors.OpError as error:
      message = error.message.partition('\nTraceback')[0]
      raise RuntimeError(
          f'The worker {self.address} failed: {message.rstrip(".")}.'
      ) from error
