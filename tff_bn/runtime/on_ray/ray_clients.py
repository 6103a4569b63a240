"""Clients that the workers of a Ray cluster compute.

Free workers take the next portions of the clients, and other workers repeat the
portions of a lost worker. The clients' values are aggregated here in the order
of the clients, so the results don't depend on which worker computed which
client. Where XLA compiles, the portions are the same with any workers.
"""

import collections
from collections.abc import Generator, Sequence
import heapq
from typing import Any, Optional

import ray
import ray.exceptions
import tensorflow_federated as tff

from tff_bn.runtime import client_portions
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime.on_ray import ray_options
from tff_bn.runtime.on_ray import ray_worker
from tff_bn.runtime.on_ray import ray_workers
from tff_bn.runtime.on_ray import transport

# The number of portions per worker that may wait to be aggregated.
_PORTIONS_AHEAD = 2
# While a worker computes a portion, the next portion already waits there.
CALLS_PER_WORKER = 2
# After this many lost workers, the portion that they computed may be the cause.
_MAX_LOSSES = 5


class SentComputation:
  """A computation in Ray's object store.

  Attributes:
    number: The computation's number.
    source: The reference to its proto.
  """

  def __init__(
      self,
      number: int,
      computation: tff.framework.ConcreteComputation,
      plan: plan_lib.Plan,
  ):
    self.number = number
    self.source = (ray.put(_proto(computation)),)
    self._array_forms = plan.array_forms  # Not the plan, which may end first.
    self._forms: dict[bool, ray_worker.Forms] = {}

  def forms(self, are_compiled: bool) -> ray_worker.Forms:
    """Returns the forms for several clients, which are made on first use."""
    if are_compiled not in self._forms:
      protos = {
          key: _proto(form.build(are_compiled))
          for key, form in self._array_forms.items()
      }
      self._forms[are_compiled] = ray_worker.Forms(
          are_compiled, (ray.put(protos),)
      )
    return self._forms[are_compiled]


def _proto(computation: tff.Computation) -> Any:
  return tff.framework.ConcreteComputation.get_proto(computation)


class RayClients(client_portions.PortionedClients):
  """The clients of one invocation."""

  def __init__(
      self,
      invocation: execution.Invocation,
      number: int,
      computation: SentComputation,
      portions: Sequence[client_portions.Portion],
      workers: ray_workers.Workers,
      sender: transport.Sender,
  ):
    """Initializes the clients of the invocation with a number.

    `portions` has the clients in their order.
    """
    super().__init__(invocation.plan, len(invocation.values))
    self._values = invocation.values
    self._server = invocation.server
    self._number = number
    self._computation = computation
    self._portions = portions
    self._workers = workers
    self._sender = sender
    # By pass, the reference to the server's values.
    self._received: dict[int, Sequence[ray.ObjectRef]] = {}
    # By portion, the worker that has computed the previous passes, and its
    # life.
    self._homes: dict[int, tuple[ray_workers.RemoteWorker, int]] = {}
    # By portion that a lost worker had, how many workers were lost while they
    # computed it. The end of a worker can lose the answer of a portion that it
    # has computed, which then seems to have been running. So a worker computes
    # nothing else before a portion that is in here.
    self._losses: collections.Counter[int] = collections.Counter()
    self._pass_number = -1
    # The next portion to aggregate.
    self._next = 0
    # A heap of the portions of the pass that wait for a worker.
    self._queue: list[int] = []
    # The portions that are computed, but not yet aggregated.
    self._answers: dict[int, ray_workers.Call] = {}

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
      self._queue = list(range(len(self._portions)))
      try:
        for position, portion in enumerate(self._portions):
          self._next = position
          yield portion.computed(number, self._fetch(position))
      finally:
        self._pass_number = -1
        self._queue, self._answers = [], {}

  def on_answer(self, call: ray_workers.Call) -> None:
    """See `ray_workers.CallOwner`."""
    if not self._is_wanted(call):
      return
    position = call.task.portion
    if call.error is None and not call.is_done:
      # The worker has restarted and has lost the values of earlier passes.
      self._repeat(position)
    else:
      self._answers[position] = call
      self._homes[position] = call.worker, call.life

  def on_loss(self, call: ray_workers.Call, was_running: bool) -> None:
    """See `ray_workers.CallOwner`."""
    if not self._is_wanted(call):
      return
    position = call.task.portion
    self._losses[position] += was_running
    if self._losses[position] == _MAX_LOSSES:
      raise ray_options.WorkersLostError(
          f'{_MAX_LOSSES} workers were lost while they computed {call.task}.'
          ' This may need more memory than a worker has.'
      )
    if not call.is_late:  # A late call's portion is in the queue already.
      heapq.heappush(self._queue, position)

  def on_delay(self, call: ray_workers.Call) -> None:
    """See `ray_workers.CallOwner`."""
    if self._is_wanted(call):
      self._repeat(call.task.portion)

  def _repeat(self, position: int) -> None:
    """Lets any worker compute a portion from its first pass on."""
    self._homes.pop(position, None)
    heapq.heappush(self._queue, position)

  def _is_wanted(self, call: ray_workers.Call) -> bool:
    """Returns whether the result of a call is still needed."""
    task = call.task
    return task.pass_number == self._pass_number and self._is_missing(
        task.portion
    )

  def _is_missing(self, position: int) -> bool:
    return position >= self._next and position not in self._answers

  def _forms(self, position: int) -> Optional[ray_worker.Forms]:
    """Returns what computes a portion's clients at once, if anything."""
    bulk = self._portions[position].bulk
    return None if bulk is None else self._computation.forms(bulk.is_compiled)

  def _fetch(self, position: int) -> list[Any]:
    """Waits for a portion; returns its values to aggregate."""
    while True:
      self._assign()
      call = self._answers.pop(position, None)
      if call is None:
        self._workers.wait()
        continue
      if call.error is not None:
        raise call.error.cause from call.error
      try:
        folded, results, seconds = ray.get(call.values)
      except ray.exceptions.RayError:
        # The machine that had the values was lost.
        self._repeat(position)
        continue
      part = self._plan.passes[self._pass_number]
      results = {
          leaf: transport.to_python(leaf, value)
          for leaf, value in zip(part.results, results, strict=True)
      }
      self._finish(self._portions[position], results, seconds)
      leaves = [leaf for leaf in part.folded if leaf not in self._server]
      return [
          transport.from_array(leaf, value)
          for leaf, value in zip(leaves, folded, strict=True)
      ]

  def _assign(self) -> None:
    """Gives the next portions to workers that have room."""
    ready = [w for w in self._workers.ready if not w.is_late]
    # Let portions wait at workers only while there is work for all workers.
    room = CALLS_PER_WORKER if len(self._queue) > len(ready) else 1
    horizon = self._next + _PORTIONS_AHEAD * max(1, len(ready))
    left = []
    while self._queue and self._queue[0] < horizon:
      if all(len(worker.calls) >= room for worker in ready):
        break
      position = heapq.heappop(self._queue)
      if not self._is_missing(position):
        continue  # A late worker has delivered it.
      worker = self._choose(position, ready, room)
      if worker is None:
        left.append(position)
      else:
        self._workers.call(self, worker, self._task(position))
    for position in left:
      heapq.heappush(self._queue, position)

  def _choose(
      self,
      position: int,
      ready: Sequence[ray_workers.RemoteWorker],
      room: int,
  ) -> Optional[ray_workers.RemoteWorker]:
    """Returns the worker for a portion, or `None` if no worker has room."""
    home = self._home(position)
    if home is not None:
      ready = [home]
    if position in self._losses:
      room = 1
    free = [w for w in ready if len(w.calls) < room]
    return min(free, key=lambda worker: len(worker.calls), default=None)

  def _home(self, position: int) -> Optional[ray_workers.RemoteWorker]:
    """Returns the ready worker that has a portion's previous passes."""
    worker, life = self._homes.get(position, (None, 0))
    if worker is None or not worker.is_ready or worker.life != life:
      return None
    return worker

  def _task(self, position: int) -> ray_worker.Task:
    number = self._pass_number
    portion = self._portions[position]
    inputs, received = None, self._received
    if self._home(position) is None:
      inputs = self._inputs(portion)
    else:
      received = {n: r for n, r in received.items() if n == number}
    return ray_worker.Task(
        computation=self._computation.number,
        source=self._computation.source,
        invocation=self._number,
        pass_number=number,
        portion=position,
        clients=portion.clients,
        forms=self._forms(position),
        received=received,
        inputs=inputs,
    )

  def _inputs(self, portion: client_portions.Portion) -> list[Any]:
    """Packs the part of the argument of a portion's clients."""
    clients = portion.clients
    values = self._values[clients.start : clients.stop]
    if portion.bulk is None:
      return [self._sender.pack(value) for value in values[0]]
    return [self._sender.pack_several(column) for column in zip(*values)]
