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
import contextlib
import threading
from typing import Any, Optional
import warnings
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import arguments
from tff_bn.runtime import devices
from tff_bn.runtime import execution
from tff_bn.runtime import plan as plan_lib

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
  ):
    """Initializes the context.

    Args:
      client_devices: The TensorFlow devices for the clients, such as
        `['GPU:0', 'GPU:1']`; client i is computed on device i modulo their
        number. Default: all GPUs, or the CPU if there is none.
      server_device: The device for what the server computes. Default: the
        clients' if they have only one, else the CPU.
      max_concurrent_clients: How many clients are computed at the same time, on
        all devices together. Default: one on a GPU, two on a CPU.

    Raises:
      ValueError: If there is no such device, or the number is less than 1.
    """
    super().__init__()
    self._devices = devices.client_devices(
        client_devices, max_concurrent_clients
    )
    self._server_device = devices.server_device(server_device, self._devices)
    self._graphs = plan_lib.GraphCache()
    self._plans: dict[int, plan_lib.Plan] = {}
    self._lock = threading.Lock()

  def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation; TFF calls this."""
    type_signature = comp.type_signature
    # A caller may be building a graph.
    with tf.init_scope():
      argument = arguments.Argument([], None)
      if type_signature.parameter is not None:
        argument = arguments.flatten_argument(arg, type_signature.parameter)
      plan = self._plan(comp)
      done = execution.Execution(
          plan, argument, self._devices, self._server_device
      )
      done.run()
      return arguments.build_result(
          type_signature.result,
          plan.results,
          done.server_result,
          done.client_results,
      )

  def _plan(self, comp: Any) -> plan_lib.Plan:
    # By identity: to compare computations would mean to serialize them.
    key = id(comp)
    with self._lock:
      plan = self._plans.get(key)
      if plan is None:
        plan = self._plans[key] = _make_plan(comp, self._graphs)
        weakref.finalize(comp, self._plans.pop, key, None)
      return plan

  def close(self) -> None:
    """Ends the context's threads."""
    for device in self._devices:
      device.lanes.close()


def _make_plan(
    comp: tff.framework.ConcreteComputation, graphs: plan_lib.GraphCache
) -> plan_lib.Plan:
  secure = set()

  def find_secure(block):
    if (
        isinstance(block, tff.framework.Intrinsic)
        and block.uri in _SECURE_INTRINSICS
    ):
      secure.add(block.uri)
    return block, False

  block = comp.to_building_block()
  tff.framework.transform_postorder(block, find_secure)
  if secure:
    _warn_of_insecurity()
    comp = tff.backends.test.replace_secure_intrinsics_with_bodies(comp)
    block = comp.to_building_block()
  block, _ = tff.tensorflow.replace_intrinsics_with_bodies(block)
  return plan_lib.Plan(block, comp.type_signature, graphs)


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


def set_default_in_process_context(
    client_devices: Optional[Sequence[str]] = None,
    server_device: Optional[str] = None,
    max_concurrent_clients: Optional[int] = None,
) -> InProcessContext:
  """Makes TFF computations run in this process, from now on.

  The default context of TFF belongs to one thread. To run computations in
  another one, call `tff.framework.set_default_context` there with what this
  returns.

  Args:
    client_devices: See `InProcessContext`.
    server_device: See `InProcessContext`.
    max_concurrent_clients: See `InProcessContext`.

  Returns:
    The context.
  """
  context = InProcessContext(
      client_devices, server_device, max_concurrent_clients
  )
  tff.framework.set_default_context(context)
  return context


@contextlib.contextmanager
def in_process_runtime(
    client_devices: Optional[Sequence[str]] = None,
    server_device: Optional[str] = None,
    max_concurrent_clients: Optional[int] = None,
) -> Iterator[InProcessContext]:
  """Runs TFF computations in this process for a `with` block.

  Args:
    client_devices: See `InProcessContext`.
    server_device: See `InProcessContext`.
    max_concurrent_clients: See `InProcessContext`.

  Yields:
    The context, installed as the calling thread's default.
  """
  previous = tff.framework.get_context_stack().current
  context = set_default_in_process_context(
      client_devices, server_device, max_concurrent_clients
  )
  try:
    yield context
  finally:
    tff.framework.set_default_context(previous)
    context.close()
