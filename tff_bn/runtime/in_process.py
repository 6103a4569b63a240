"""TFF contexts that run computations in this process, on its devices."""

import asyncio
from collections.abc import Iterator, Sequence
import contextlib
from typing import Any, Optional

import tensorflow_federated as tff

from tff_bn.catalog import value_types
from tff_bn.runtime import devices as devices_lib
from tff_bn.runtime import execution
from tff_bn.runtime import local_clients
from tff_bn.runtime import plan_context
from tff_bn.runtime import portioning as portioning_lib


class InProcessContext(plan_context.PlanContext):
  """Runs TFF computations with this process's TensorFlow.

  TFF's own runtime runs computations in a child process without GPUs. This
  context runs any TFF computation in the Python process itself, on its
  TensorFlow devices.

  Several clients are computed concurrently, but aggregated one by one in their
  order. Results therefore don't depend on the number of threads or devices. A
  client's values are freed after they are aggregated. Several threads may use
  the context concurrently.

  On CPUs, one TensorFlow function computes several small clients whose data are
  known as arrays, see `portioning` and `batch_arrays`.
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
        `['GPU:0', 'GPU:1']`; client i runs on device i modulo their number.
        Default: all GPUs, or the CPU if there is none.
      server_device: The device for the server's part. Default: the clients'
        device if there is only one, else the CPU.
      max_concurrent_clients: The number of clients computed concurrently on
        all devices together. Default: one for each GPU; on a CPU as many as
        keep its cores busy (see `divide_cores`), at least two.

    Raises:
      TypeError: If `client_devices` is a single name, or no list, or
        `max_concurrent_clients` no number.
      ValueError: If a device does not exist or is named twice, if
        `client_devices` is empty, or if `max_concurrent_clients` is below 1.
    """
    if max_concurrent_clients is not None:
      value_types.POSITIVE_INTEGER.check(
          'max_concurrent_clients', max_concurrent_clients
      )
    self._devices = devices_lib.find_devices(
        client_devices, max_concurrent_clients
    )
    if server_device is None:
      device, *others = self._devices
      server_device = devices_lib.HOST if others else device.name
    super().__init__(devices_lib.full_name(server_device))

  @contextlib.contextmanager
  def clients(
      self, invocation: execution.Invocation
  ) -> Iterator[local_clients.LocalClients]:
    """See the base class."""
    portioning = portioning_lib.of(invocation.plan)
    portions = portioning.portions(
        invocation,
        num_threads=sum(device.num_threads for device in self._devices),
        are_cpus=all(device.is_cpu for device in self._devices),
    )
    with portioning.watching(portions):
      clients = local_clients.LocalClients(
          invocation,
          portions,
          self._devices,
          uses_all_cpus=portioning.uses_all_cpus(),
      )
      yield clients
    portioning.saw(clients.seconds)

  def close(self) -> None:
    """Ends the context's threads and frees memory."""
    for device in self._devices:
      device.close()
    super().close()


class AsyncInProcessContext(tff.framework.AsyncContext):
  """Runs TFF computations in this process for asynchronous callers.

  Use it with `tff.program`, as
  `tff.program.NativeFederatedContext(AsyncInProcessContext())`.
  """

  def __init__(self, **kwargs: Any):
    """Initializes the context.

    Args:
      **kwargs: The arguments of `InProcessContext`.
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
  """Makes an `InProcessContext` the calling thread's default context.

  Each thread has its own default context in TFF. To run computations in another
  thread, pass the returned context to `tff.framework.set_default_context` in
  that thread.

  Args:
    **kwargs: The arguments of `InProcessContext`: `client_devices`,
      `server_device`, `max_concurrent_clients`.

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
    **kwargs: The arguments of `InProcessContext`: `client_devices`,
      `server_device`, `max_concurrent_clients`.

  Yields:
    The context, installed as the calling thread's default.
  """
  with plan_context.installed(InProcessContext(**kwargs)) as context:
    yield context
