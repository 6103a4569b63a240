"""A TFF context that computes clients by the workers of a Ray cluster."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import itertools
from typing import Any, Optional
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import devices
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_context
from tff_bn.runtime import symbols
from tff_bn.runtime.on_ray import ray_options

_MISSING = (
    'Ray, which several machines need, is not installed. Run `pip install'
    " '.[ray]'` in a clone of the tff_bn repository."
)


class RayContext(plan_context.PlanContext):
  """Computes the server's part in this process, and clients by Ray's workers.

  The results are those of `InProcessContext` on a device of the same kind, to
  the bit. It may be used by several threads, whose computations take turns.
  """

  def __init__(self, options: ray_options.RayOptions):
    """Connects to the cluster, and waits until workers are there.

    Args:
      options: What is asked for, see `ray_runtime`.

    Raises:
      ImportError: If Ray is not installed.
      ValueError: If there is no such cluster, or a worker can't be used.
      WorkersLostError: If no worker comes in time.
    """
    super().__init__(devices.HOST)
    self._stack = contextlib.ExitStack()
    # By plan: the number of its computation, and where workers find it.
    self._computations = weakref.WeakKeyDictionary()
    self._numbers = itertools.count()
    # The numbers of computations that are gone.
    self._forgotten: list[int] = []
    try:
      # Imported late: not everybody needs Ray.
      # pylint: disable=g-import-not-at-top
      import ray

      from tff_bn.runtime.on_ray import ray_clients
      from tff_bn.runtime.on_ray import ray_cluster
      from tff_bn.runtime.on_ray import ray_workers
      from tff_bn.runtime.on_ray import transport

      # pylint: enable=g-import-not-at-top
    except ModuleNotFoundError as error:
      raise ImportError(_MISSING) from error
    self._put = ray.put
    self._clients_class = ray_clients.RayClients
    _share_gpus()
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
      self,
      comp: tff.framework.ConcreteComputation,
      plan: plan_lib.Plan,
      values: Sequence[Sequence[Any]],
      server: Mapping[symbols.Leaf, Any],
  ) -> Iterator[execution.Clients]:
    """See the base class."""
    with self._workers.lock:
      self._workers.grow()
    self._forget()
    invocation = next(self._numbers)
    try:
      yield self._clients_class(
          self._workers,
          self._sender,
          plan,
          self._sent_computation(comp, plan),
          invocation,
          values,
          server,
      )
    finally:
      self._workers.release(invocation)

  def check_workers(
      self, what: str, question: Callable[[], Any], expected: Any
  ) -> None:
    """Compares all workers, also those that come later, with this program.

    A worker that comes later and differs is not used; a warning says why.

    Args:
      what: What is compared, in words.
      question: What each worker calls; it is pickled.
      expected: What it has to return.

    Raises:
      ValueError: If a worker returns something else, or an error.
      WorkersLostError: If no worker is there any more.
    """
    with self._workers.lock:
      self._workers.add_check(what, question, expected)

  def close(self) -> None:
    """Ends the workers, and leaves the cluster."""
    self._stack.close()
    super().close()

  def _sent_computation(
      self, comp: tff.framework.ConcreteComputation, plan: plan_lib.Plan
  ) -> tuple[int, Any]:
    """Sends a computation, once."""
    sent = self._computations.get(plan)
    if sent is None:
      comp = plan_context.without_secure_sums(comp)
      proto = tff.framework.ConcreteComputation.get_proto(comp)
      sent = self._computations[plan] = next(self._numbers), self._put(proto)
      weakref.finalize(plan, self._forgotten.append, sent[0])
    return sent

  def _forget(self) -> None:
    if self._forgotten:
      forgotten, self._forgotten[:] = list(self._forgotten), []
      self._workers.forget(forgotten)


def _share_gpus() -> None:
  """Keeps this process from taking all memory of GPUs that workers use."""
  for gpu in tf.config.list_physical_devices('GPU'):
    with contextlib.suppress(RuntimeError):  # It is in use already.
      tf.config.experimental.set_memory_growth(gpu, True)


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

  Each worker is a process that computes one client after another; the server's
  part stays in this process. What a lost worker has not delivered, others
  compute again.

  Args:
    address: `'auto'` or `'HOST:PORT'`: a cluster to which this machine belongs.
      `'local'`: a cluster of this machine alone, which begins and ends with the
      block and which nobody else can reach. Default: the cluster to which this
      process is connected, or else `'local'`.
    num_workers: The number of workers. Default: as many as there is room for,
      also when machines join.
    cpus_per_worker: The number of cores that Ray reserves for a worker.
      Default: 1 with a GPU, else half of this machine's, so that two clients
      are computed at a time on such a machine, as in one process. TensorFlow
      uses as many threads for an operation as in this process, whatever the
      number, because its results depend on it; the environment variable
      `TF_NUM_INTRAOP_THREADS` changes both.
    gpus_per_worker: The number of GPUs of a worker, from 0 to 1: with 0.5 two
      workers share one. Default: 1 if the cluster has GPUs.
    client_timeout: After so many seconds a client is given to a second worker;
      who is first, counts. Default: never.
    worker_timeout: If no worker is there for so many seconds, the computation
      fails.

  Yields:
    The context, installed as the calling thread's default.

  Raises:
    ImportError: If Ray is not installed.
    ValueError: If an argument is not allowed, if there is no such cluster or no
      room for a worker, or if a worker has other versions.
    WorkersLostError: If no worker comes within `worker_timeout`.
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
