"""The workers of a Ray cluster, as the program sees them.

Ray starts them, finds them room on the machines, and starts them again, here or
elsewhere, when they or their machines end. What is left to do here is to know
who is there, and to end a process that hangs, which Ray does not notice.
"""

from collections.abc import Callable, Sequence
import dataclasses
import os
import threading
import time
from typing import Any, Optional, Protocol

from absl import logging
import ray
import ray.exceptions

from tff_bn.imports import versions
from tff_bn.runtime.on_ray import ray_options
from tff_bn.runtime.on_ray import ray_worker

# A worker that has not been heard of for so long is asked for a sign of life.
_QUIET_SECONDS = 10.0
# If none comes for so long, it is taken to hang.
_HANG_SECONDS = 30.0
# How often it is looked who is late.
_POLL_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
# What TensorFlow reads from the environment should be the same everywhere.
_ENVIRONMENT_PREFIXES = ('TF_', 'XLA_')


class CallOwner(Protocol):
  """Who lets workers compute clients."""

  def on_answer(self, call: 'Call') -> None:
    """A call has an answer; `is_done` or `error` is set."""

  def on_loss(self, call: 'Call', was_running: bool) -> None:
    """A call was lost with its worker, while it was running or waiting."""

  def on_delay(self, call: 'Call') -> None:
    """A call takes longer than `client_timeout`; it goes on."""


@dataclasses.dataclass(eq=False)
class Call:
  """A client that a worker computes, or that waits there for its turn.

  Attributes:
    owner: Who is told what comes of it.
    task: What is to be computed.
    worker: The worker.
    life: The worker's life in which the call was made.
    status: Ray's reference to whether the worker could do it.
    values: Ray's reference to the values.
    is_late: Whether it takes longer than `client_timeout`.
    is_done: Whether the values are there.
    error: What the computation raised.
  """

  owner: CallOwner
  task: ray_worker.Task
  worker: 'RemoteWorker'
  life: int
  status: ray.ObjectRef
  values: ray.ObjectRef
  is_late: bool = False
  is_done: bool = False
  error: Optional[Exception] = None


@dataclasses.dataclass(eq=False)
class RemoteWorker:
  """A worker.

  Attributes:
    actor: Ray's handle.
    place: Its machine and process, for messages; once it has started.
    is_ready: Whether it computes clients.
    life: How often it was lost so far.
    calls: Its calls, the running one first.
    starting: Ray's reference to its description, while it starts.
    question: Ray's reference to the sign of life that it was asked for.
    asked_at: When it was asked.
    heard_at: When the last sign of life came, or a call began after a pause.
    call_began_at: When the running call began.
  """

  actor: Any
  place: str = 'a worker'
  is_ready: bool = False
  life: int = 0
  calls: list[Call] = dataclasses.field(default_factory=list)
  starting: Optional[ray.ObjectRef] = None
  question: Optional[ray.ObjectRef] = None
  asked_at: float = 0.0
  heard_at: float = 0.0
  call_began_at: float = 0.0

  @property
  def is_late(self) -> bool:
    """Whether one of its calls takes longer than `client_timeout`."""
    return any(call.is_late for call in self.calls)


@dataclasses.dataclass(frozen=True)
class _Check:
  """Something that has to be the same everywhere.

  Attributes:
    what: What it is, in words.
    question: Called by each worker.
    expected: What it has to return.
  """

  what: str
  question: Callable[[], Any]
  expected: Any


class Workers:
  """All workers.

  Attributes:
    lock: For who uses them, one thread at a time.
  """

  def __init__(self, options: ray_options.RayOptions, is_lost: threading.Event):
    """Starts workers, and waits until they are there.

    Args:
      options: What was asked for.
      is_lost: What is set when the cluster can't be reached any more.

    Raises:
      ValueError: If there is no room for a worker, or one can't be used.
      WorkersLostError: If no worker comes within `worker_timeout`.
    """
    self.lock = threading.Lock()
    self._options = options
    self._is_lost = is_lost
    self._workers: list[RemoteWorker] = []
    self._checks: list[_Check] = []
    # What keeps workers from being used.
    self._refusals: list[str] = []
    self._nobody_since: Optional[float] = None
    self._looked_at = time.monotonic()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT_PREFIXES)
    }
    environment['TF_NUM_INTRAOP_THREADS'] = str(ray_options.num_threads())
    self._actor_class = ray.remote(
        num_cpus=options.cpus_per_worker,
        num_gpus=options.gpus_per_worker,
        max_restarts=-1,
        concurrency_groups=ray_worker.CONCURRENCY_GROUPS,
        runtime_env={'env_vars': environment},
    )(ray_worker.Worker)
    try:
      self._start_first()
    except BaseException:
      self.close()
      raise

  def close(self) -> None:
    """Ends all workers."""
    # What can't be reached any more may let Ray wait.
    if not self._is_lost.is_set():
      for worker in self._workers:
        ray.kill(worker.actor)

  def check_cluster(self) -> None:
    """Checks that the cluster can be reached.

    Raises:
      WorkersLostError: If not.
    """
    if self._is_lost.is_set():
      raise ray_options.WorkersLostError(
          "Ray's process on this machine has ended, and with it the connection"
          ' to the cluster.'
      )

  @property
  def ready(self) -> list[RemoteWorker]:
    """The workers that compute clients."""
    return [worker for worker in self._workers if worker.is_ready]

  def grow(self) -> None:
    """Starts workers for which there is room now.

    If a number of workers was asked for, Ray has known of all of them from the
    start, and starts each when there is room.
    """
    wanted = self._options.num_workers or max(1, self._num_places())
    while len(self._workers) < wanted:
      actor = self._actor_class.remote(
          'GPU' if self._options.gpus_per_worker else 'CPU'
      )
      worker = RemoteWorker(actor)
      self._workers.append(worker)
      self._start(worker)

  def add_check(
      self, what: str, question: Callable[[], Any], expected: Any
  ) -> None:
    """Compares workers, also those to come, with this program.

    Args:
      what: What is compared, in words.
      question: Called by each worker.
      expected: What it has to return.

    Raises:
      ValueError: If a worker that is there returns something else.
      WorkersLostError: If no worker is there any more.
    """
    self._checks.append(_Check(what, question, expected))
    ready = self.ready
    for worker in ready:
      self._start(worker)
    self._wait_for_start(len(ready))

  def call(
      self, owner: CallOwner, worker: RemoteWorker, task: ray_worker.Task
  ) -> None:
    """Lets a worker compute a client.

    Args:
      owner: Who is told what comes of it, while it calls `wait`.
      worker: The worker.
      task: What it is to compute.
    """
    status, values = worker.actor.compute.remote(task)
    if not worker.calls:
      worker.call_began_at = worker.heard_at = time.monotonic()
    worker.calls.append(Call(owner, task, worker, worker.life, status, values))

  def wait(self) -> None:
    """Waits until something has happened, and tells the owners of calls.

    Raises:
      WorkersLostError: If there was no worker for `worker_timeout`, or the
        cluster can't be reached.
    """
    self.check_cluster()
    self._check_somebody_is_left()
    handlers, calls = {}, {}
    for worker in self._workers:
      if worker.starting is not None:
        handlers[worker.starting] = self._on_start, worker
      if worker.question is not None:
        handlers[worker.question] = self._on_sign_of_life, worker
      for call in worker.calls:
        calls[call.status] = self._on_call, call
    # Ray looks for one that is done in this order.
    handlers.update(calls)
    done, _ = ray.wait(list(handlers), timeout=_POLL_SECONDS, fetch_local=False)
    for reference in done:
      handle, about = handlers[reference]
      handle(about)
    if time.monotonic() - self._looked_at > _POLL_SECONDS:
      self._look_for_silence()

  def release(self, invocation: int) -> None:
    """Lets all workers drop what they have of an invocation."""
    if not self._is_lost.is_set():
      for worker in self.ready:
        worker.actor.release.remote(invocation)

  def forget(self, computations: Sequence[int]) -> None:
    """Lets all workers drop the plans of computations."""
    for worker in self.ready:
      worker.actor.forget.remote(computations)

  def _num_places(self) -> int:
    """For how many workers the cluster has room, all in all."""
    resources = ray.cluster_resources()
    return int(
        min(
            resources.get(name, 0) / number
            for name, number in self._options.needs.items()
        )
    )

  def _start_first(self) -> None:
    places = self._num_places()
    wanted = self._options.num_workers or max(1, places)
    if places < wanted:
      message = (
          f'The Ray cluster has room for {places} of {wanted} workers;'
          f' {self._options.describe_needs()}.'
      )
      if self._options.address in (None, ray_options.LOCAL):
        raise ValueError(message)
      logging.warning('%s The others start when there is room.', message)
    self.grow()
    self._wait_for_start(max(1, min(places, wanted)))

  def _wait_for_start(self, number: int) -> None:
    """Waits until a number of workers is ready."""
    deadline = time.monotonic() + self._options.worker_timeout
    while len(self.ready) < number and time.monotonic() < deadline:
      starting = {w.starting: w for w in self._workers if w.starting}
      done, _ = ray.wait(list(starting), timeout=_POLL_SECONDS)
      for reference in done:
        self._on_start(starting[reference])
      if self._refusals:
        raise ValueError(' '.join(self._refusals))
    if not self.ready:
      raise self._nobody()

  def _start(self, worker: RemoteWorker) -> None:
    """Asks a worker for its description, which it sends when it is there."""
    worker.is_ready = False
    worker.question = None
    worker.starting = worker.actor.describe.remote(
        [check.question for check in self._checks]
    )

  def _on_start(self, worker: RemoteWorker) -> None:
    reference, worker.starting = worker.starting, None
    try:
      description = ray.get(reference)
    except ray.exceptions.ActorUnavailableError:
      time.sleep(_PAUSE_SECONDS)  # It may not take calls yet.
      self._start(worker)
      return
    except ray.exceptions.RayError as error:
      self._refuse(f'A worker could not start: {error}')
      return
    worker.place = description.place
    differences = self._differences(description)
    if differences:
      self._refuse(
          f'The worker {worker.place} differs: {"; ".join(differences)}.'
      )
      return
    if worker.life:
      logging.info('The worker %s has started again.', worker.place)
    worker.is_ready = True

  def _refuse(self, reason: str) -> None:
    logging.warning('%s', reason)
    self._refusals.append(reason)

  def _differences(self, description: ray_worker.Description) -> list[str]:
    """What a worker has that is other than here."""
    expected = versions.versions()
    found = [
        f'its {name} is {version}, here it is {expected.get(name)}'
        for name, version in description.versions.items()
        if version != expected.get(name)
    ]
    for check, answer in zip(self._checks, description.answers):
      if answer != check.expected:
        found.append(
            f'{check.what} gives {answer} there, here it gives {check.expected}'
        )
    return found

  def _on_call(self, call: Call) -> None:
    worker = call.worker
    try:
      call.is_done = ray.get(call.status)
    except ray.exceptions.RayTaskError as error:
      call.error = error
    except ray.exceptions.RayError as error:
      self._lose(worker, str(error))
      return
    worker.calls.remove(call)
    worker.heard_at = worker.call_began_at = time.monotonic()
    call.owner.on_answer(call)

  def _on_sign_of_life(self, worker: RemoteWorker) -> None:
    question, worker.question = worker.question, None
    try:
      ray.get(question)
    except ray.exceptions.RayError as error:
      self._lose(worker, str(error))
      return
    worker.heard_at = time.monotonic()

  def _lose(self, worker: RemoteWorker, reason: str) -> None:
    """Gives up what a worker had to do, and waits for its next life."""
    logging.warning(
        'The worker %s was lost; its clients are computed again. %s',
        worker.place,
        ' '.join(reason.split()),
    )
    calls, worker.calls = worker.calls, []
    worker.life += 1
    self._start(worker)
    for position, call in enumerate(calls):
      call.owner.on_loss(call, was_running=position == 0)

  def _look_for_silence(self) -> None:
    """Looks for workers that are late or hang."""
    now = self._looked_at = time.monotonic()
    timeout = self._options.client_timeout
    for worker in self.ready:
      if not worker.calls:
        continue
      if timeout is not None and now - worker.call_began_at > timeout:
        self._note_delay(worker)
      if worker.question is not None:
        if now - worker.asked_at > _HANG_SECONDS:
          self._check_it_answers(worker)
      elif now - worker.heard_at > _QUIET_SECONDS:
        worker.question = worker.actor.is_alive.remote()
        worker.asked_at = now

  def _check_it_answers(self, worker: RemoteWorker) -> None:
    """Ends a worker that hangs."""
    answered, _ = ray.wait([worker.question], timeout=0)
    if answered:  # While this program was busy.
      self._on_sign_of_life(worker)
      return
    ray.kill(worker.actor, no_restart=False)  # Ray starts it again.
    self._lose(worker, 'It did not answer.')

  def _note_delay(self, worker: RemoteWorker) -> None:
    """Lets others compute the clients of a worker that takes too long."""
    for call in worker.calls:
      if not call.is_late:
        call.is_late = True
        logging.warning(
            'Client number %d takes more than %g seconds on the worker %s;'
            ' another one computes it, too.',
            call.task.client,
            self._options.client_timeout,
            worker.place,
        )
        call.owner.on_delay(call)

  def _check_somebody_is_left(self) -> None:
    if self.ready:
      self._nobody_since = None
      return
    now = time.monotonic()
    if self._nobody_since is None:
      self._nobody_since = now
    is_hopeless = not any(worker.starting for worker in self._workers)
    if is_hopeless or now - self._nobody_since > self._options.worker_timeout:
      raise self._nobody()

  def _nobody(self) -> ray_options.WorkersLostError:
    reasons = [
        'No worker of the Ray cluster is there'
        f' (worker_timeout={self._options.worker_timeout:g} seconds);'
        f' {self._options.describe_needs()}.',
        *self._refusals,
    ]
    return ray_options.WorkersLostError(' '.join(reasons))
