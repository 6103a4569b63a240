"""The base class of the TFF contexts that run plans."""

import abc
from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import threading
from typing import Any, Optional, TypeVar
import weakref

import tensorflow as tf

# TensorFlow has no public name for this module; Keras imports it, too.
from tensorflow.python.eager import context as eager_context
import tensorflow_federated as tff

from tff_bn.common import garbage
from tff_bn.common import interruptible
from tff_bn.runtime import arguments
from tff_bn.runtime import client_part
from tff_bn.runtime import execution
from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib


class PlanContext(tff.framework.SyncContext, abc.ABC):
  """Runs TFF computations, with the server's part in this process.

  Several threads may use the context concurrently.

  Attributes:
    client_seconds: How long each client of the last invocation with clients was
      computed; `None` before the first one.
  """

  def __init__(self, server_device: str):
    """Initializes the context with the full name of the server's device."""
    super().__init__()
    self._server_device = server_device
    self.client_seconds: Optional[Sequence[float]] = None
    self._graphs = imported_graph.GraphCache()
    self._plans: dict[int, plan_lib.Plan] = {}
    self._lock = threading.Lock()

  @abc.abstractmethod
  def clients(
      self, invocation: execution.Invocation
  ) -> contextlib.AbstractContextManager[execution.Clients]:
    """Returns a context manager that creates and frees an invocation's clients.

    The invocation has at least one client.
    """

  def invoke(self, comp: Any, arg: Any) -> Any:
    """Runs a computation; TFF calls this."""
    if tf.executing_eagerly():
      return self._invoke(comp, arg)
    # The caller is building a graph, but a new thread executes eagerly.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      return interruptible.result(thread.submit(self._invoke, comp, arg))

  def _invoke(self, comp: Any, arg: Any) -> Any:
    type_signature = comp.type_signature
    argument = arguments.Argument([], None)
    if type_signature.parameter is not None:
      argument = arguments.flatten_argument(arg, type_signature.parameter)
    with contextlib.ExitStack() as stack:
      if id(comp) not in self._plans:
        # Its functions are traced.
        stack.enter_context(garbage.collected_rarely())
      plan = self.plan(comp)
      with contextlib.suppress(execution.NotCompiledError):
        return self._run(comp, plan, argument)
      return self._run(comp, plan, argument)

  def _run(
      self,
      comp: tff.framework.ConcreteComputation,
      plan: plan_lib.Plan,
      argument: arguments.Argument,
  ) -> Any:
    """Runs a computation with a checked argument."""
    if any(isinstance(leaf.type, tff.SequenceType) for leaf in plan.results):
      # Its elements are computed later, when the caller's arrays may differ.
      argument = argument.copied()
    server = {
        leaf: client_part.to_tensor(value, self._server_device)
        for leaf, value in zip(plan.server_inputs, argument.server, strict=True)
    }
    invocation = execution.Invocation(
        comp, plan, argument.clients or [], server
    )
    with contextlib.ExitStack() as stack:
      clients = None
      if invocation.values:
        clients = stack.enter_context(self.clients(invocation))
      done = execution.Execution(invocation, clients, self._server_device)
      done.run()
      if clients is not None:
        self.client_seconds = clients.seconds
      return arguments.build_result(
          comp.type_signature.result,
          plan.results,
          len(invocation.values),
          done.server_result,
          done.client_results,
      )

  def plan(self, comp: tff.framework.ConcreteComputation) -> plan_lib.Plan:
    """Returns the plan of a computation, which is made only once."""
    # The key is the identity: comparing computations would serialize them.
    key = id(comp)
    with self._lock:
      plan = self._plans.get(key)
      if plan is None:
        plan = self._plans[key] = plan_lib.Plan(comp, self._graphs)
        weakref.finalize(comp, self._plans.pop, key, None)
      return plan

  def close(self) -> None:
    """Frees memory; call this after the last use of the context."""
    # TensorFlow keeps all compiled kernels, even for deleted functions. It
    # compiles a kernel again if something still needs it.
    eager_context.context().clear_kernel_cache()


_Context = TypeVar('_Context', bound=PlanContext)


@contextlib.contextmanager
def installed(context: _Context) -> Iterator[_Context]:
  """Makes a context the thread's default for a `with` block, then closes it."""
  previous = tff.framework.get_context_stack().current
  tff.framework.set_default_context(context)
  try:
    yield context
  finally:
    tff.framework.set_default_context(previous)
    context.close()
