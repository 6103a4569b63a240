"""Clients that the workers of a Ray cluster compute.

Free workers take the next clients, and other workers repeat the clients of a
lost worker. The clients' values are aggregated here in the order of the
clients, so the results don't depend on which worker computed which client.
"""

import collections
from collections.abc import Generator, Sequence
import heapq
from typing import Any, Optional

import numpy as np
import ray
import ray.exceptions
import tensorflow_federated as tff

from tff_bn.runtime import arguments
from tff_bn.runtime import execution
from tff_bn.runtime import symbols
from tff_bn.runtime.on_ray import ray_options
from tff_bn.runtime.on_ray import ray_worker
from tff_bn.runtime.on_ray import ray_workers
from tff_bn.runtime.on_ray import transport

# The number of clients per worker that may wait to be aggregated.
_CLIENTS_AHEAD = 2
# While a worker computes a client, the next client already waits there.
_CALLS_PER_WORKER = 2
# After this many lost workers, the client that they computed may be the cause.
_MAX_LOSSES = 5


class RayClients(execution.Clients):
  """The clients of one invocation."""

  def __init__(
      self,
      invocation: execution.Invocation,
      number: int,
      computation: tuple[int, ray.ObjectRef],
      workers: ray_workers.Workers,
      sender: transport.Sender,
  ):
    """Initializes the clients of the invocation with a number.

    `computation` is the computation's number, and Ray's reference to its proto.
    """
    self._plan = invocation.plan
    self._values = invocation.values
    self._server = invocation.server
    self._number = number
    self._computation = computation
    self._workers = workers
    self._sender = sender
    self._results: list[dict[symbols.Leaf, Any]] = [{} for _ in self._values]
    self._seconds: list[float] = [0.0 for _ in self._values]
    # By pass, the reference to the server's values.
    self._received: dict[int, Sequence[ray.ObjectRef]] = {}
    # By client, the worker that has computed the previous passes, and its life.
    self._homes: dict[int, tuple[ray_workers.RemoteWorker, int]] = {}
    self._losses: collections.Counter[int] = collections.Counter()
    self._pass_number = -1
    # The next client to aggregate.
    self._next = 0
    # A heap of the clients of the pass that wait for a worker.
    self._queue: list[int] = []
    # The clients that are computed, but not yet aggregated.
    self._answers: dict[int, ray_workers.Call] = {}

  @property
  def seconds(self) -> Sequence[float]:
    """See the base class."""
    return self._seconds

  def results(self, leaf: symbols.Leaf) -> list[Any]:
    """See the base class."""
    values = [results[leaf] for results in self._results]
    if isinstance(leaf.type, tff.SequenceType):
      variants = (transport.from_array(leaf, value) for value in values)
      return [arguments.to_python(v, leaf.type) for v in variants]
    return values

  def compute(self, number: int) -> Generator[execution.Computed, None, None]:
    """See the base class."""
    with self._workers.lock:
      self._workers.check_cluster()
      self._pass_number = number
      part = self._plan.passes[number]
      if part.received:
        arrays = transport.to_arrays(
            part.received, map(self._server.get, part.received)
        )
        self._received[number] = (ray.put(arrays),)
      self._queue = list(range(len(self._values)))
      try:
        for client in range(len(self._values)):
          self._next = client
          yield execution.Computed(self._fetch(client), part.fold)
      finally:
        self._pass_number = -1
        self._queue, self._answers = [], {}

  def on_answer(self, call: ray_workers.Call) -> None:
    """See `ray_workers.CallOwner`."""
    if not self._is_wanted(call):
      return
    client = call.task.client
    if call.error is None and not call.is_done:
      # The worker has restarted and has lost the client's values.
      self._homes.pop(client, None)
      heapq.heappush(self._queue, client)
      return
    self._answers[client] = call
    self._homes[client] = call.worker, call.life

  def on_loss(self, call: ray_workers.Call, was_running: bool) -> None:
    """See `ray_workers.CallOwner`."""
    if not self._is_wanted(call):
      return
    client = call.task.client
    self._losses[client] += was_running
    if self._losses[client] == _MAX_LOSSES:
      raise ray_options.WorkersLostError(
          f'{_MAX_LOSSES} workers were lost while they computed client number'
          f' {client}. It may need more memory than a worker has.'
      )
    if not call.is_late:  # A late call's client is in the queue already.
      heapq.heappush(self._queue, client)

  def on_delay(self, call: ray_workers.Call) -> None:
    """See `ray_workers.CallOwner`."""
    if self._is_wanted(call):
      self._homes.pop(call.task.client, None)
      heapq.heappush(self._queue, call.task.client)

  def _is_wanted(self, call: ray_workers.Call) -> bool:
    """Returns whether the result of a call is still needed."""
    task = call.task
    return task.pass_number == self._pass_number and self._is_missing(
        task.client
    )

  def _is_missing(self, client: int) -> bool:
    return client >= self._next and client not in self._answers

  def _fetch(self, client: int) -> Sequence[Any]:
    """Waits for a client; returns its values to aggregate."""
    while True:
      self._assign()
      call = self._answers.pop(client, None)
      if call is None:
        self._workers.wait()
        continue
      if call.error is not None:
        raise call.error.cause from call.error
      try:
        folded, results, seconds = ray.get(call.values)
      except ray.exceptions.RayError:
        # The machine that had the values was lost.
        self._homes.pop(client, None)
        heapq.heappush(self._queue, client)
        continue
      self._seconds[client] += seconds
      part = self._plan.passes[self._pass_number]
      for leaf, value in zip(part.results, results, strict=True):
        if isinstance(value, np.ndarray):
          value = value.copy()  # Frees the value in Ray's object store.
        self._results[client][leaf] = value
      leaves = [leaf for leaf in part.folded if leaf not in self._server]
      return [
          transport.from_array(leaf, value)
          for leaf, value in zip(leaves, folded, strict=True)
      ]

  def _assign(self) -> None:
    """Gives the next clients to workers that have room."""
    ready = [w for w in self._workers.ready if not w.is_late]
    # Let clients wait at workers only while there is work for all workers.
    room = _CALLS_PER_WORKER if len(self._queue) > len(ready) else 1
    horizon = self._next + _CLIENTS_AHEAD * max(1, len(ready))
    left = []
    while self._queue and self._queue[0] < horizon:
      if all(len(worker.calls) >= room for worker in ready):
        break
      client = heapq.heappop(self._queue)
      if not self._is_missing(client):
        continue  # A late worker has delivered it.
      worker = self._choose(client, ready, room)
      if worker is None:
        left.append(client)
      else:
        self._workers.call(self, worker, self._task(client))
    for client in left:
      heapq.heappush(self._queue, client)

  def _choose(
      self,
      client: int,
      ready: Sequence[ray_workers.RemoteWorker],
      room: int,
  ) -> Optional[ray_workers.RemoteWorker]:
    """Returns the worker for a client, or `None` if no worker has room."""
    home = self._home(client)
    if home is not None:
      ready = [home]
    free = [w for w in ready if len(w.calls) < room]
    return min(free, key=lambda worker: len(worker.calls), default=None)

  def _home(self, client: int) -> Optional[ray_workers.RemoteWorker]:
    """Returns the ready worker that has a client's previous passes."""
    worker, life = self._homes.get(client, (None, 0))
    if worker is None or not worker.is_ready or worker.life != life:
      return None
    return worker

  def _task(self, client: int) -> ray_worker.Task:
    number = self._pass_number
    inputs, received = None, self._received
    if self._home(client) is None:
      inputs = [self._sender.pack(value) for value in self._values[client]]
    else:
      received = {n: r for n, r in received.items() if n == number}
    computation, source = self._computation
    return ray_worker.Task(
        computation=computation,
        source=(source,),
        invocation=self._number,
        pass_number=number,
        client=client,
        received=received,
        inputs=inputs,
    )
