"""The program's view of the workers of a Ray cluster.

Ray places workers on machines and restarts them, there or elsewhere, after they
or their machines end. This module keeps track of the ready workers and ends
workers that hang, which Ray does not notice.
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

from tff_bn.common import cores
from tff_bn.imports import versions
from tff_bn.runtime.on_ray import ray_options
from tff_bn.runtime.on_ray import ray_worker

# After this time without an answer, a worker is asked for a sign of life.
_QUIET_SECONDS = 10.0
# Without a sign of life for this time, a worker counts as hanging.
_HANG_SECONDS = 30.0
# The time between two checks for late or hanging workers.
_POLL_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
# TensorFlow's environment variables must be the same on all workers.
_ENVIRONMENT_PREFIXES = ('TF_', 'XLA_')


class CallOwner(Protocol):
  """The object that makes calls and handles their outcome."""

  def on_answer(self, call: 'Call') -> None:
    """Handles an answer; `call.is_done` or `call.error` is set."""

  def on_loss(self, call: 'Call', was_running: bool) -> None:
    """Handles the loss of a running or waiting call with its worker."""

  def on_delay(self, call: 'Call') -> None:
    """Handles a late call, which goes on."""


@dataclasses.dataclass(eq=False)
class Call:
  """A task that runs or waits on a worker.

  `owner` handles the outcome.
  """

  owner: CallOwner
  task: ray_worker.Task
  worker: 'RemoteWorker'
  life: int  # The worker's life in which the call was made.
  status: ray.ObjectRef  # Of a bool: whether the worker could compute it.
  values: ray.ObjectRef
  is_late: bool = False  # Whether it takes longer than its clients may.
  is_done: bool = False  # Whether the values are computed.
  error: Optional[ray.exceptions.RayTaskError] = None


@dataclasses.dataclass(eq=False)
class RemoteWorker:
  """A worker, as the program sees it.

  Times are seconds of `time.monotonic`.
  """

  actor: Any
  place: str = 'a worker'  # The worker's machine and process, for messages.
  is_ready: bool = False  # Whether it can compute clients.
  life: int = 0  # The number of times that it was lost.
  calls: list[Call] = dataclasses.field(default_factory=list)  # Running first.
  starting: Optional[ray.ObjectRef] = None  # Its description, while it starts.
  question: Optional[ray.ObjectRef] = None  # An expected sign of life,
  asked_at: float = 0.0  # and when it was asked for.
  heard_at: float = 0.0  # The last sign of life, or first call after a pause.
  call_began_at: float = 0.0  # When the running call began.

  @property
  def is_late(self) -> bool:
    """Whether a call takes longer than its clients may."""
    return any(call.is_late for call in self.calls)


@dataclasses.dataclass(frozen=True)
class _Check:
  """A function whose result must be the same on all workers."""

  what: str  # A description of the result, for messages.
  question: Callable[[], Any]
  expected: Any


class Workers:
  """All workers of a runtime.

  Attributes:
    lock: The lock that a thread holds while it uses the workers.
  """

  def __init__(self, options: ray_options.RayOptions, is_lost: threading.Event):
    """Starts workers and waits for them.

    `is_lost` is set when the cluster can't be reached any more.

    Raises:
      ValueError: If there is no room for a worker, or a worker can't be used.
      WorkersLostError: If no worker starts within `worker_timeout`.
    """
    self.lock = threading.Lock()
    self._options = options
    self._is_lost = is_lost
    self._workers: list[RemoteWorker] = []
    self._checks: list[_Check] = []
    # The reasons why workers are not used.
    self._refusals: list[str] = []
    self._nobody_since: Optional[float] = None
    self._looked_at = time.monotonic()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT_PREFIXES)
    }
    environment[cores.ENVIRONMENT_VARIABLE] = str(cores.per_operation())
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
    # Ray could wait forever for a lost cluster.
    if not self._is_lost.is_set():
      for worker in self._workers:
        ray.kill(worker.actor)

  def check_cluster(self) -> None:
    """Raises a `WorkersLostError` if the cluster can't be reached."""
    if self._is_lost.is_set():
      raise ray_options.WorkersLostError(
          "Ray's process on this machine has ended, and with it the connection"
          ' to the cluster.'
      )

  @property
  def are_cpus(self) -> bool:
    """Whether the workers compute on CPUs."""
    return not self._options.gpus_per_worker

  @property
  def ready(self) -> list[RemoteWorker]:
    """The workers that can compute clients."""
    return [worker for worker in self._workers if worker.is_ready]

  def grow(self) -> None:
    """Starts the workers for which there is room now.

    With a given number of workers, this creates all of them at once, and Ray
    starts each when there is room.
    """
    wanted = self._options.num_workers or max(1, self._num_places())
    while len(self._workers) < wanted:
      actor = self._actor_class.remote('CPU' if self.are_cpus else 'GPU')
      worker = RemoteWorker(actor)
      self._workers.append(worker)
      self._start(worker)

  def add_check(
      self, what: str, question: Callable[[], Any], expected: Any
  ) -> None:
    """Adds a check for all workers, see `RayContext.check_workers`."""
    self._checks.append(_Check(what, question, expected))
    ready = self.ready
    for worker in ready:
      self._start(worker)
    self._wait_for_start(len(ready))

  def call(
      self, owner: CallOwner, worker: RemoteWorker, task: ray_worker.Task
  ) -> None:
    """Sends a task to a worker; `owner` handles its outcome during `wait`."""
    status, values = worker.actor.compute.remote(task)
    if not worker.calls:
      worker.call_began_at = worker.heard_at = time.monotonic()
    worker.calls.append(Call(owner, task, worker, worker.life, status, values))

  def wait(self) -> None:
    """Waits for the next event and lets the owners of calls handle it.

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
    # Ray checks the references in this order.
    handlers |= calls
    done, _ = ray.wait(list(handlers), timeout=_POLL_SECONDS, fetch_local=False)
    for reference in done:
      handle, about = handlers[reference]
      handle(about)
    if time.monotonic() - self._looked_at > _POLL_SECONDS:
      self._look_for_silence()

  def release(self, invocation: int) -> None:
    """Lets all workers free the values of an invocation."""
    if not self._is_lost.is_set():
      for worker in self.ready:
        worker.actor.release.remote(invocation)

  def forget(self, computations: Sequence[int]) -> None:
    """Lets all workers free the plans of computations."""
    for worker in self.ready:
      worker.actor.forget.remote(computations)

  def _num_places(self) -> int:
    """Returns the number of workers that fit into the whole cluster."""
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
    """Asks a worker for its description, which it sends when it has started."""
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
      time.sleep(_PAUSE_SECONDS)  # The worker takes no calls yet.
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
    """Returns the differences between a worker and this program, in words."""
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
    """Gives up a worker's calls and waits for its restart."""
    logging.warning(
        'The worker %s was lost; other workers repeat its clients. %s',
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
      if timeout is not None:
        limit = timeout * len(worker.calls[0].task.clients)
        if now - worker.call_began_at > limit:
          self._note_delay(worker, limit)
      if worker.question is not None:
        if now - worker.asked_at > _HANG_SECONDS:
          self._check_it_answers(worker)
      elif now - worker.heard_at > _QUIET_SECONDS:
        worker.question = worker.actor.is_alive.remote()
        worker.asked_at = now

  def _check_it_answers(self, worker: RemoteWorker) -> None:
    """Restarts a worker, unless its answer came in the meantime."""
    answered, _ = ray.wait([worker.question], timeout=0)
    if answered:
      self._on_sign_of_life(worker)
      return
    ray.kill(worker.actor, no_restart=False)
    self._lose(worker, 'It did not answer.')

  def _note_delay(self, worker: RemoteWorker, seconds: float) -> None:
    """Lets other workers compute the clients of a late worker, too."""
    for call in worker.calls:
      if not call.is_late:
        call.is_late = True
        logging.warning(
            'The worker %s takes more than %g seconds; another worker computes'
            ' %s, too.',
            worker.place,
            seconds,
            call.task,
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
        'The Ray cluster has no worker'
        f' (worker_timeout={self._options.worker_timeout:g} seconds);'
        f' {self._options.describe_needs()}.',
        *self._refusals,
    ]
    return ray_options.WorkersLostError(' '.join(reasons))
