"""Runs plans: the server's part, and the clients' part on their devices."""

import collections
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import queue
import threading
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import arguments
from tff_bn.runtime import client_dataset
from tff_bn.runtime import plan as plan_lib

# How many clients per lane may be computed before their turn to be added up.
_CLIENTS_AHEAD = 2


class Lanes:
  """Threads in which the clients of one device are computed."""

  def __init__(self, number: int, name: str):
    """Starts no thread yet.

    Args:
      number: How many clients are computed at the same time.
      name: The threads' name.
    """
    self._number = number
    self._name = name
    self._calls = queue.SimpleQueue()
    self._threads = []
    self._lock = threading.Lock()
    self._open = set()
    self._error: Optional[Exception] = None

  @property
  def number(self) -> int:
    """How many clients are computed at the same time."""
    return self._number

  def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future:
    """Calls a function in one of the threads."""
    future = concurrent.futures.Future()
    with self._lock:
      if self._error is not None:
        future.set_exception(self._error)
        return future
      self._open.add(future)
      if len(self._threads) < self._number:
        # A daemon: a call to a machine that hangs must not keep the program.
        thread = threading.Thread(
            target=self._work, name=self._name, daemon=True
        )
        self._threads.append(thread)
        thread.start()
    self._calls.put((future, function))
    return future

  def _work(self) -> None:
    while True:
      future, function = self._calls.get()
      if future is None:
        return
      if future.set_running_or_notify_cancel():
        self._settle(future, *_result_of(function))
      del future, function  # Not until the next call.

  def _settle(
      self,
      future: concurrent.futures.Future,
      result: Any,
      error: Optional[BaseException],
  ) -> None:
    with self._lock:
      if future not in self._open:
        return  # Given up.
      self._open.discard(future)
    if error is not None:
      future.set_exception(error)
    else:
      future.set_result(result)

  def abandon(self, error: Exception) -> None:
    """Lets all calls, running ones and later ones, fail with an error."""
    with self._lock:
      self._error = error
      abandoned, self._open = self._open, set()
    for future in abandoned:
      if not future.cancelled():
        future.set_exception(error)

  def close(self) -> None:
    """Ends the threads once they have done their work."""
    for _ in self._threads:
      self._calls.put((None, None))


def _result_of(
    function: Callable[[], Any],
) -> tuple[Any, Optional[BaseException]]:
  try:
    return function(), None
  except BaseException as error:  # pylint: disable=broad-exception-caught
    return None, error


@dataclasses.dataclass(frozen=True)
class Device:
  """A device on which clients are computed.

  Attributes:
    name: Its full name in TensorFlow.
    lanes: Its threads.
    worker: The worker that it belongs to, if it is on another machine.
  """

  name: str
  lanes: Lanes
  worker: Any = None

  @property
  def task(self) -> Optional[str]:
    """Its task, if it is on another machine."""
    return None if self.worker is None else self.worker.task


class Execution:
  """One invocation of a plan."""

  def __init__(
      self,
      plan: plan_lib.Plan,
      argument: arguments.Argument,
      devices: Sequence[Device],
      server_device: str,
  ):
    """Initializes the invocation.

    Args:
      plan: The plan.
      argument: The argument.
      devices: The devices for the clients.
      server_device: The full name of the server's device.
    """
    self._plan = plan
    self._argument = argument
    self._devices = devices
    self._server_device = server_device
    self._num_clients = len(argument.clients or ())
    with tf.device(server_device):
      self._server = {
          leaf: _tensor(value)
          for leaf, value in zip(
              plan.server_inputs, argument.server, strict=True
          )
      }
    # Of each client, what later passes need.
    self._kept: list[dict[plan_lib.Leaf, tf.Tensor]] = [
        {} for _ in range(self._num_clients)
    ]
    self._results: list[dict[plan_lib.Leaf, Any]] = [
        {} for _ in range(self._num_clients)
    ]
    self._copies = {device.name: _Copies(device) for device in devices}

  def run(self) -> None:
    """Computes all passes."""
    for number, part in enumerate(self._plan.passes):
      self._compute_at_server(part.server)
      self._compute_at_clients(number)

  def server_result(self, leaf: plan_lib.Leaf) -> Any:
    """The value of a leaf that is at the server."""
    return arguments.to_python(self._server[leaf], leaf.type)

  def client_results(self, leaf: plan_lib.Leaf) -> list[Any]:
    """The values of a leaf, one for each client."""
    if leaf in self._server:
      return [self.server_result(leaf)] * self._num_clients
    return [results[leaf] for results in self._results]

  def _compute_at_server(self, stage: plan_lib.Stage) -> None:
    tensors = stage(
        [self._server[leaf] for leaf in stage.inputs], self._server_device, None
    )
    self._server.update(zip(stage.outputs, tensors))

  def _compute_at_clients(self, number: int) -> None:
    part = self._plan.passes[number]
    totals = [self._server[leaf] for leaf in part.zero]
    captured = [self._server[leaf] for leaf in part.captured]
    if part.clients.outputs or part.folded or part.results:
      for folded in self._clients_in_order(number):
        totals = part.fold(
            [*totals, *folded, *captured], self._server_device, None
        )
    self._server.update(zip(part.totals, totals))

  def _clients_in_order(self, number: int) -> Iterator[list[tf.Tensor]]:
    """Yields what each client adds to the totals."""
    num_lanes = sum(device.lanes.number for device in self._devices)
    if num_lanes == 1 or self._num_clients == 1:
      for client in range(self._num_clients):
        yield self._compute_client(client, number)
      return
    running = collections.deque()
    try:
      for client in range(self._num_clients):
        if len(running) >= _CLIENTS_AHEAD * num_lanes:
          yield running.popleft().result()
        running.append(
            self._device(client).lanes.submit(
                lambda client=client: self._compute_client(client, number)
            )
        )
      while running:
        yield running.popleft().result()
    finally:
      for future in running:
        future.cancel()

  def _device(self, client: int) -> Device:
    return self._devices[client % len(self._devices)]

  def _compute_client(self, client: int, number: int) -> list[tf.Tensor]:
    """Computes one client's part of a pass."""
    part = self._plan.passes[number]
    device = self._device(client)
    tensors = self._kept[client]
    if number == 0:
      tensors = self._client_inputs(client, device)

    def get(leaf):
      if leaf in tensors:
        return tensors[leaf]
      return self._copies[device.name].get(leaf, self._server[leaf])

    outputs = part.clients(
        [get(leaf) for leaf in part.clients.inputs], device.name, device.task
    )
    tensors.update(zip(part.clients.outputs, outputs))
    self._results[client].update(
        (leaf, arguments.to_python(tensors[leaf], leaf.type))
        for leaf in part.results
    )
    with tf.device(self._server_device):
      folded = [tf.identity(get(leaf)) for leaf in part.folded]
    self._kept[client] = {
        leaf: tensor for leaf, tensor in tensors.items() if leaf in part.kept
    }
    return folded

  def _client_inputs(
      self, client: int, device: Device
  ) -> dict[plan_lib.Leaf, tf.Tensor]:
    with tf.device(device.name):
      return {
          leaf: _tensor(value)
          for leaf, value in zip(
              self._plan.client_inputs,
              self._argument.clients[client],
              strict=True,
          )
      }


class _Copies:
  """The server's tensors on one device."""

  def __init__(self, device: Device):
    self._device = device
    self._lock = threading.Lock()
    self._tensors = {}

  def get(self, leaf: plan_lib.Leaf, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the copy of a leaf's tensor."""
    if isinstance(leaf.type, tff.SequenceType):
      return tensor
    with self._lock:
      if leaf not in self._tensors:
        with tf.device(self._device.name):
          self._tensors[leaf] = tf.identity(tensor)
      return self._tensors[leaf]


def _tensor(value: Any) -> tf.Tensor:
  if isinstance(value, client_dataset.ClientDataset):
    value = value.build(None)
  if isinstance(value, tf.data.Dataset):
    with tf.device('/device:CPU:0'):
      return tf.data.experimental.to_variant(value)
  return tf.identity(value)
