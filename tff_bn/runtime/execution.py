"""Runs plans: the server's part, and the clients' part on their devices."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import dataclasses
import threading
from typing import Any, Optional, Protocol

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import arguments
from tff_bn.runtime import client_dataset
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import remote_worker

# How many clients per lane may be computed before their turn to be added up.
_CLIENTS_AHEAD = 2


class Lanes:
  """Threads in which the clients of one device are computed.

  Attributes:
    number: How many clients are computed at the same time.
  """

  def __init__(self, number: int):
    """Starts no thread yet.

    Args:
      number: How many clients are computed at the same time.
    """
    self.number = number
    self._pool = concurrent.futures.ThreadPoolExecutor(
        number, thread_name_prefix='tff-bn-clients'
    )

  def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future:
    """Calls a function in one of the threads.

    Args:
      function: The function.

    Returns:
      The future of what it returns.

    Raises:
      tf.errors.UnavailableError: If the threads have ended: the runtime was
        left, or another thread found that a worker was lost.
    """
    try:
      return self._pool.submit(function)
    except RuntimeError as error:
      raise tf.errors.UnavailableError(
          None, None, 'The runtime was left; enter it again.'
      ) from error

  def close(self) -> None:
    """Ends the threads once they have done what they are at."""
    # Waits: TensorFlow must not get a new connection, or end, while a thread
    # that has used it ends.
    self._pool.shutdown(wait=True, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class Device:
  """A device on which clients are computed.

  Attributes:
    name: Its full name in TensorFlow.
    lanes: Its threads.
    worker: The worker that it belongs to; `None`: this process.
  """

  name: str
  lanes: Lanes
  worker: Optional[remote_worker.Worker] = None


class Devices(Protocol):
  """The devices that there are at the moment."""

  @property
  def devices(self) -> list[Device]:
    """The devices."""

  def recover(
      self, devices: Sequence[Device], error: Exception
  ) -> list[Device]:
    """Finds out whether devices were lost.

    What was on any of them is lost, too.

    Args:
      devices: The devices on which something failed.
      error: What happened.

    Returns:
      The devices that are left.

    Raises:
      Exception: If nothing was lost, the error.
    """


class Execution:
  """One invocation of a plan."""

  def __init__(
      self,
      plan: plan_lib.Plan,
      argument: arguments.Argument,
      devices: Devices,
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
    self._all_devices = devices
    self._server_device = server_device
    self._num_clients = len(argument.clients or ())
    self._server = {
        leaf: _to_tensor(value, server_device, None)
        for leaf, value in zip(plan.server_inputs, argument.server, strict=True)
    }
    self._results: list[dict[plan_lib.Leaf, Any]] = [
        {} for _ in range(self._num_clients)
    ]
    self._use(devices.devices)

  def _use(self, devices: Sequence[Device]) -> None:
    """Starts afresh on devices on which nothing is yet."""
    self._devices = devices
    self._copies = {device.name: _Copies(device) for device in devices}
    # Of each client, what later passes need; `None`: to be computed (again).
    self._kept: list[Optional[dict[plan_lib.Leaf, tf.Tensor]]] = [
        None
    ] * self._num_clients

  def _renew(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    with tf.device(self._server_device):
      return [tf.identity(tensor) for tensor in tensors]

  def run(self) -> None:
    """Computes all passes."""
    for number, part in enumerate(self._plan.passes):
      tensors = part.server(
          [self._server[leaf] for leaf in part.server.inputs],
          self._server_device,
      )
      self._server.update(zip(part.server.outputs, tensors))
      totals = self._compute_totals(number)
      self._server.update(zip(part.totals, totals))

  def server_result(self, leaf: plan_lib.Leaf) -> Any:
    """The value of a leaf that is at the server."""
    return arguments.to_python(self._server[leaf], leaf.type)

  def client_results(self, leaf: plan_lib.Leaf) -> list[Any]:
    """The values of a leaf, one for each client."""
    if leaf in self._server:
      return [self.server_result(leaf) for _ in range(self._num_clients)]
    return [results[leaf] for results in self._results]

  def _compute_totals(self, number: int) -> list[tf.Tensor]:
    """Computes all clients' part of a pass and folds it."""
    part = self._plan.passes[number]
    totals = [self._server[leaf] for leaf in part.zero]
    if not (part.clients.outputs or part.totals or part.results):
      return totals
    captured = [self._server[leaf] for leaf in part.captured]
    num_done = 0
    while num_done < self._num_clients:
      try:
        for folded in self._in_order(
            range(num_done, self._num_clients), number
        ):
          totals = part.fold([*totals, *folded, *captured], self._server_device)
          num_done += 1
      except tf.errors.OpError as error:
        # The totals so far are at the server, so only the clients from here on
        # are computed on other devices.
        failed = self._devices
        self._use(())
        self._use(self._all_devices.recover(failed, error))
        # TensorFlow takes copies of these on workers for still there.
        totals, captured = self._renew(totals), self._renew(captured)
        self._server = dict(
            zip(self._server, self._renew(self._server.values()))
        )
    return totals

  def _in_order(
      self, clients: Sequence[int], number: int
  ) -> Iterator[list[tf.Tensor]]:
    """Yields what each client adds to the totals."""
    num_lanes = sum(device.lanes.number for device in self._devices)
    if num_lanes == 1 or len(clients) == 1:
      for client in clients:
        yield self._compute(client, number)
      return
    running = collections.deque()
    try:
      for client in clients:
        if len(running) >= _CLIENTS_AHEAD * num_lanes:
          yield running.popleft().result()
        running.append(
            self._device(client).lanes.submit(
                lambda client=client: self._compute(client, number)
            )
        )
      while running:
        yield running.popleft().result()
    finally:
      for future in running:
        future.cancel()
      concurrent.futures.wait(running)

  def _device(self, client: int) -> Device:
    position = client
    for value in self._argument.clients[client]:
      if isinstance(value, client_dataset.ClientDataset):
        position = value.home if value.home is not None else client
    return self._devices[position % len(self._devices)]

  def _compute(self, client: int, number: int) -> list[tf.Tensor]:
    """Computes one client's part of a pass; returns what is to be folded."""
    device = self._device(client)
    if device.worker is None:
      return self._compute_on(device, client, number)
    with device.worker.watch():
      return self._compute_on(device, client, number)

  def _compute_on(
      self, device: Device, client: int, number: int
  ) -> list[tf.Tensor]:
    tensors = self._kept[client]
    if tensors is None:
      tensors = self._client_inputs(client, device)
      for earlier in range(number):
        self._advance(tensors, earlier, device)
    self._advance(tensors, number, device)
    part = self._plan.passes[number]
    for leaf in part.results:
      tensor = tensors[leaf]
      if isinstance(leaf.type, tff.SequenceType):
        tensor = client_dataset.variant_from_worker(tensor, device.worker)
      else:
        tensor = self._to_server(tensor)
      self._results[client][leaf] = arguments.to_python(tensor, leaf.type)
    folded = [
        self._to_server(tensors.get(leaf, self._server.get(leaf)))
        for leaf in part.folded
    ]
    self._kept[client] = {leaf: tensors[leaf] for leaf in part.kept}
    return folded

  def _advance(
      self,
      tensors: dict[plan_lib.Leaf, tf.Tensor],
      number: int,
      device: Device,
  ) -> None:
    """Adds to a client's tensors what it computes in a pass."""
    stage = self._plan.passes[number].clients
    copies = self._copies[device.name]
    inputs = [
        tensors[leaf]
        if leaf in tensors
        else copies.get(leaf, self._server[leaf])
        for leaf in stage.inputs
    ]
    outputs = stage(inputs, device.name, device.worker)
    tensors.update(zip(stage.outputs, outputs))

  def _client_inputs(
      self, client: int, device: Device
  ) -> dict[plan_lib.Leaf, tf.Tensor]:
    values = self._argument.clients[client]
    return {
        leaf: _to_tensor(value, device.name, device.worker)
        for leaf, value in zip(self._plan.client_inputs, values, strict=True)
    }

  def _to_server(self, tensor: tf.Tensor) -> tf.Tensor:
    if tensor.device == self._server_device:
      return tensor
    with tf.device(self._server_device):
      return tf.identity(tensor)


class _Copies:
  """The server's tensors on one device."""

  def __init__(self, device: Device):
    self._device = device
    self._lock = threading.Lock()
    self._tensors = {}

  def get(self, leaf: plan_lib.Leaf, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the copy of a leaf's tensor."""
    with self._lock:
      if leaf not in self._tensors:
        if isinstance(leaf.type, tff.SequenceType):
          tensor = client_dataset.variant_to_worker(tensor, self._device.worker)
        else:
          with tf.device(self._device.name):
            tensor = tf.identity(tensor)
        self._tensors[leaf] = tensor
      return self._tensors[leaf]


def _to_tensor(
    value: Any, device: str, worker: Optional[remote_worker.Worker]
) -> tf.Tensor:
  """Makes a part of the argument a tensor on a device."""
  if isinstance(value, client_dataset.ClientDataset):
    return value.build(worker)
  if isinstance(value, tf.data.Dataset):
    return client_dataset.dataset_to_worker(value, worker)
  with tf.device(device):
    return tf.identity(value)
