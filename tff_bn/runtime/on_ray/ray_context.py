"""A TFF context that computes clients on a Ray cluster."""

from collections.abc import Callable, Iterator
import contextlib
import itertools
from typing import Any, Optional
import weakref

from tff_bn.runtime import devices
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_context
from tff_bn.runtime import portioning as portioning_lib
from tff_bn.runtime.on_ray import ray_options

_MISSING = (
    "Ray is not installed. Run `pip install '.[ray]'` in a clone of the tff_bn"
    ' repository.'
)


class RayContext(plan_context.PlanContext):
  """Computes the server's part in this process and clients on Ray's workers.

  The results equal `InProcessContext`'s results on the same kind of device, to
  the bit. Several threads may use the context; their computations take turns.
  """

  def __init__(self, options: ray_options.RayOptions):
    """Connects to the cluster and waits for workers, see `ray_runtime`."""
    super().__init__(devices.HOST)
    # By plan, its computation in Ray's object store.
    self._computations: weakref.WeakKeyDictionary[plan_lib.Plan, Any] = (
        weakref.WeakKeyDictionary()
    )
    self._numbers = itertools.count()
    # The numbers of deleted computations.
    self._forgotten: list[int] = []
    try:
      # Most users don't need Ray.
      import ray

      from tff_bn.runtime.on_ray import ray_clients
      from tff_bn.runtime.on_ray import ray_cluster
      from tff_bn.runtime.on_ray import ray_workers
      from tff_bn.runtime.on_ray import transport

    except ModuleNotFoundError as error:
      raise ImportError(_MISSING) from error
    self._ray_clients = ray_clients
    devices.share_gpus()
    with contextlib.ExitStack() as stack:
      is_lost = stack.enter_context(ray_cluster.connected(options))
      num_gpus = ray.cluster_resources().get('GPU', 0)
      self._workers = ray_workers.Workers(
          options.for_cluster(num_gpus), is_lost
      )
      stack.callback(self._workers.close)
      self._sender = transport.Sender(ray.put)
      self._stack = stack.pop_all()

  @contextlib.contextmanager
  def clients(
      self, invocation: execution.Invocation
  ) -> Iterator[execution.Clients]:
    """See the base class."""
    with self._workers.lock:
      self._workers.grow()
    if self._forgotten:
      forgotten, self._forgotten[:] = list(self._forgotten), []
      self._workers.forget(forgotten)
    portioning = portioning_lib.of(invocation.plan)
    # Portions wait at the workers.
    num_calls = self._ray_clients.CALLS_PER_WORKER * len(self._workers.ready)
    portions = portioning.portions(
        invocation, max(1, num_calls), self._workers.are_cpus
    )
    number = next(self._numbers)
    try:
      with portioning.watching(portions):
        clients = self._ray_clients.RayClients(
            invocation,
            number,
            self._sent_computation(invocation),
            [portion for portion, _ in portions],
            self._workers,
            self._sender,
        )
        yield clients
      portioning.saw(clients.seconds)
    finally:
      self._workers.release(number)

  def check_workers(
      self, what: str, question: Callable[[], Any], expected: Any
  ) -> None:
    """Checks that a function returns the same on all workers as here.

    A later worker is checked when it starts. If it fails the check, it is not
    used, and a warning says why.

    Args:
      what: A description of the result, for messages.
      question: The function that each worker calls; it must be picklable.
      expected: The value that it must return.

    Raises:
      ValueError: If the function returns another value or an error on a worker.
      WorkersLostError: If no worker is left.
    """
    with self._workers.lock:
      self._workers.add_check(what, question, expected)

  def close(self) -> None:
    """Ends the workers and disconnects from the cluster."""
    self._stack.close()
    super().close()

  def _sent_computation(self, invocation: execution.Invocation) -> Any:
    """Puts a computation into Ray's object store, once."""
    plan = invocation.plan
    sent = self._computations.get(plan)
    if sent is None:
      sent = self._ray_clients.SentComputation(
          next(self._numbers), invocation.computation, plan
      )
      self._computations[plan] = sent
      weakref.finalize(plan, self._forgotten.append, sent.number)
    return sent


@contextlib.contextmanager
def ray_runtime(
    address: Optional[str] = None,
    num_workers: Optional[int] = None,
    *,
    cpus_per_worker: Optional[int] = None,
    gpus_per_worker: Optional[float] = None,
    client_timeout: Optional[float] = None,
    worker_timeout: float = 300.0,
) -> Iterator[RayContext]:
  """Runs TFF computations on a Ray cluster for a `with` block.

  Each worker is a process that computes one client at a time, or several small
  clients in one call, see `portioning`. The server's part runs in this process.
  If a worker is lost, other workers repeat its clients.

  Args:
    address: `'auto'` or `'HOST:PORT'` for a cluster that this machine belongs
      to; `'local'` for a new cluster on this machine, which ends with the block
      and which other machines can't reach. Default: the cluster that this
      process is connected to, else `'local'`.
    num_workers: The number of workers. Default: as many as fit into the
      cluster, also when machines join.
    cpus_per_worker: The number of cores that Ray reserves for a worker.
      Default: 1 with a GPU, else half of this machine's cores, or as many as
      an operation uses if that is fewer (see `divide_cores`). A TensorFlow
      operation always uses as many threads as in this process, because results
      depend on their number.
    gpus_per_worker: The number of GPUs of a worker, from 0 to 1; with 0.5, two
      workers share a GPU. Default: 1 if the cluster has GPUs.
    client_timeout: The seconds after which a second worker computes a client,
      too; the first result counts. Clients that are computed in one call have
      this time for each of them. Default: no limit.
    worker_timeout: The seconds without any worker after which the computation
      fails.

  Yields:
    The context, installed as the calling thread's default.

  Raises:
    ImportError: If Ray is not installed.
    ValueError: If an argument is invalid, if there is no such cluster or no
      room for a worker, or if a worker has other versions of the software.
    WorkersLostError: If no worker starts within `worker_timeout`.
  """
  options = ray_options.RayOptions(
      address=address,
      num_workers=num_workers,
      cpus_per_worker=cpus_per_worker,
      gpus_per_worker=gpus_per_worker,
      client_timeout=client_timeout,
      worker_timeout=worker_timeout,
  )
  with plan_context.installed(RayContext(options)) as context:
    yield context
