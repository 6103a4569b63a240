"""TFF contexts that compute in this process, with ordinary TensorFlow.

TFF's own runtime computes in a child process that has no GPU. The contexts here
run any TFF computation in the Python process itself, on the devices that
TensorFlow sees there, or on those of other machines (see `cluster`).

Clients are computed several at a time and added up one after another in their
order, so results don't depend on the number of threads or devices, and a
client's values are dropped when they have been added.
"""

import asyncio
from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import threading
from typing import Any, Optional
import warnings
import weakref

import tensorflow as tf

# As Keras does; TensorFlow has no public name for it.
from tensorflow.python.eager import context as eager_context
import tensorflow_federated as tff

from tff_bn.runtime import arguments
from tff_bn.runtime import cluster as cluster_lib
from tff_bn.runtime import devices as devices_lib
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import remote_worker

_SECURE_INTRINSICS = frozenset(
    [
        'federated_secure_modular_sum',
        'federated_secure_select',
        'federated_secure_sum',
        'federated_secure_sum_bitwidth',
    ]
)


class InProcessContext(tff.framework.SyncContext):
  """Runs TFF computations with this process's TensorFlow.

  It may be used by several threads at the same time.
  """

  def __init__(
      self,
      client_devices: Optional[Sequence[str]] = None,
      server_device: Optional[str] = None,
      max_concurrent_clients: Optional[int] = None,
      cluster: Optional[Sequence[str]] = None,
      on_worker_loss: str = 'continue',
  ):
    """Initializes the context.

    Args:
      client_devices: The TensorFlow devices for the clients, such as
        `['GPU:0', 'GPU:1']`; client i is computed on device i modulo their
        number. Default: all GPUs, or the CPU if there is none. With a cluster,
        of each worker.
      server_device: The device of this process for what the server computes.
        Default: the clients' if they have only one, else the CPU.
      max_concurrent_clients: How many clients are computed at the same time, on
        all devices together. Default: one on a GPU, two on a CPU.
      cluster: Workers, each as `host:port`, on whose devices clients are
        computed instead of on those of this process, see
        `tff_bn.runtime.Server`. A process can have one cluster at a time.
      on_worker_loss: What happens when a worker can't be reached any more:
        `'continue'` computes the clients that it had on the others; `'stop'`
        raises a `WorkerLostError`.

    Raises:
      ValueError: If there is no such device or worker, or a worker has other
        versions; if `max_concurrent_clients` is less than 1, or
        `on_worker_loss` unknown.
    """
    super().__init__()
    if max_concurrent_clients is not None and max_concurrent_clients < 1:
      raise ValueError(
          f'max_concurrent_clients={max_concurrent_clients} must be at least 1.'
      )
    if cluster is None:
      self._devices = devices_lib.LocalDevices(
          client_devices, max_concurrent_clients
      )
    else:
      self._devices = cluster_lib.Cluster(
          cluster, client_devices, max_concurrent_clients, on_worker_loss
      )
    if server_device is None:
      device, *others = self._devices.devices
      is_only_one = not others and device.worker is None
      server_device = device.name if is_only_one else remote_worker.HOST
    self._server_device = devices_lib.full_name(server_device)
    self._graphs = plan_lib.GraphCache()
    self._plans: dict[int, plan_lib.Plan] = {}
    self._lock = threading.Lock()

  def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation; TFF calls this."""
    if tf.executing_eagerly():
      return self._invoke(comp, arg)
    # The caller is building a graph; a new thread is not.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      return thread.submit(self._invoke, comp, arg).result()

  def _invoke(self, comp: Any, arg: Any) -> Any:
    type_signature = comp.type_signature
    argument = arguments.Argument([], None)
    if type_signature.parameter is not None:
      argument = arguments.flatten_argument(arg, type_signature.parameter)
    plan = self.plan(comp)
    while True:
      devices = self._devices.devices
      try:
        done = execution.Execution(
            plan, argument, self._devices, self._server_device
        )
        done.run()
        return arguments.build_result(
            type_signature.result,
            plan.results,
            len(argument.clients or ()),
            done.server_result,
            done.client_results,
        )
      except tf.errors.OpError as error:
        # Also operations of this process fail while a worker is lost.
        self._devices.recover(devices, error)

  def plan(self, comp: tff.framework.ConcreteComputation) -> plan_lib.Plan:
    """What the context does to run a computation; it is made only once.

    Args:
      comp: The computation.

    Returns:
      Its plan.
    """
    # By identity: to compare computations would mean to serialize them.
    key = id(comp)
    with self._lock:
      plan = self._plans.get(key)
      if plan is None:
        plan = self._plans[key] = make_plan(comp, self._graphs)
        weakref.finalize(comp, self._plans.pop, key, None)
      return plan

  @property
  def workers(self) -> list[remote_worker.Worker]:
    """The workers of the cluster that are left; none without a cluster."""
    workers = dict.fromkeys(d.worker for d in self._devices.devices)
    return [worker for worker in workers if worker is not None]

  def recover(self, error: tf.errors.OpError) -> None:
    """Goes on after an error if a worker was lost; raises it if not.

    Computations do this themselves. But TensorFlow tells workers of every
    function of this process, so any TensorFlow code fails, with an
    `UnavailableError`, from the loss of a worker until somebody notices. It can
    call this and start again.

    Args:
      error: The error.

    Raises:
      WorkerLostError: If a worker was lost, and the others shall or can not go
        on.
      tf.errors.OpError: The error, if no worker was lost.
    """
    self._devices.recover(self._devices.devices, error)

  def close(self) -> None:
    """Ends the context's threads and frees memory; workers go on serving."""
    self._devices.close()
    # TensorFlow keeps whatever it has compiled, also of functions that are
    # gone. What is still needed is compiled again.
    eager_context.context().clear_kernel_cache()


def make_plan(
    comp: tff.framework.ConcreteComputation, graphs: plan_lib.GraphCache
) -> plan_lib.Plan:
  """Makes a plan of a computation, with its secure sums as ordinary ones.

  Args:
    comp: The computation.
    graphs: Where imported graphs are found.

  Returns:
    The plan.
  """
  proto = tff.framework.ConcreteComputation.get_proto(comp)
  if _SECURE_INTRINSICS & set(plan_lib.intrinsics(proto)):
    _warn_of_insecurity()
    comp = tff.backends.test.replace_secure_intrinsics_with_bodies(comp)
  return plan_lib.Plan(comp, graphs)


_warned_of_insecurity = threading.Event()


def _warn_of_insecurity() -> None:
  if _warned_of_insecurity.is_set():
    return
  _warned_of_insecurity.set()
  warnings.warn(
      'Secure aggregation is simulated here: the sums are right, but computed'
      ' without cryptography.',
      stacklevel=2,
  )


class AsyncInProcessContext(tff.framework.AsyncContext):
  """The same for asynchronous callers, such as `tff.program`.

  For `tff.program.NativeFederatedContext(AsyncInProcessContext())`.
  """

  def __init__(self, **kwargs: Any):
    """Initializes the context.

    Args:
      **kwargs: As for `InProcessContext`.
    """
    super().__init__()
    self._context = InProcessContext(**kwargs)

  async def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation; TFF calls this."""
    if asyncio.iscoroutine(arg):
      arg = await arg
    return await asyncio.to_thread(self._context.invoke, comp, arg)

  def close(self) -> None:
    """Ends the context's threads."""
    self._context.close()


def set_default_in_process_context(**kwargs: Any) -> InProcessContext:
  """Makes TFF computations run in this process, from now on.

  The default context of TFF belongs to one thread. To run computations in
  another one, call `tff.framework.set_default_context` there with what this
  returns.

  Args:
    **kwargs: As for `InProcessContext`: `client_devices`, `server_device`,
      `max_concurrent_clients`, `cluster`, `on_worker_loss`.

  Returns:
    The context.
  """
  context = InProcessContext(**kwargs)
  tff.framework.set_default_context(context)
  return context


@contextlib.contextmanager
def in_process_runtime(**kwargs: Any) -> Iterator[InProcessContext]:
  """Runs TFF computations in this process for a `with` block.

  Args:
    **kwargs: As for `InProcessContext`: `client_devices`, `server_device`,
      `max_concurrent_clients`, `cluster`, `on_worker_loss`.

  Yields:
    The context, installed as the calling thread's default.
  """
  previous = tff.framework.get_context_stack().current
  context = set_default_in_process_context(**kwargs)
  try:
    yield context
  finally:
    tff.framework.set_default_context(previous)
    context.close()
