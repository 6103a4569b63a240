"""Stages of a plan: TensorFlow functions traced on first use."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import itertools
import threading
from typing import Any, Optional

import tensorflow as tf

# TensorFlow has no public names for these modules.
from tensorflow.python.eager import cancellation as eager_cancellation
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute as eager_execute

from tff_bn.runtime import symbols

# TensorFlow's tracing is not thread-safe.
_tracing_lock = threading.RLock()


# A serialized `ConfigProto` without Grappler, TensorFlow's graph optimizer. On
# a CPU it takes up to half of the time of a function's first call, and training
# steps are not faster with it.
_WITHOUT_GRAPPLER = tf.compat.v1.ConfigProto(
    graph_options=tf.compat.v1.GraphOptions(
        rewrite_options={'disable_meta_optimizer': True}
    )
).SerializeToString()


@functools.lru_cache
def _is_cpu(device: str) -> bool:
  return tf.DeviceSpec.from_string(device).device_type == 'CPU'


class _Function:
  """A traced function, and what the operation that calls it needs.

  Attributes:
    function: The function.
    captured_inputs: The tensors that the function captured. The operation takes
      them after the function's arguments.
    num_outputs: The number of its outputs.
    attributes: The names and values of its attributes.
  """

  def __init__(self, function: Any):
    self.function = function
    self.captured_inputs = list(function.captured_inputs)
    self.num_outputs = len(function.outputs)
    types_in, types_out = (
        [tensor.dtype.as_datatype_enum for tensor in tensors]
        for tensors in (function.inputs, function.outputs)
    )
    attributes = dict(
        Tin=types_in,
        Tout=types_out,
        f=function,
        config='',
        config_proto=_WITHOUT_GRAPPLER,
        executor_type='',
    )
    self.attributes = tuple(itertools.chain(*attributes.items()))


class Cancellation:
  """Ends calls of stages before they have computed their outputs.

  They end between two iterations of a loop and raise a `CancelledError`.
  A call on a GPU, and a function that XLA has compiled, go on until their end.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._started = False
    self._managers: set[eager_cancellation.CancellationManager] = set()

  def start(self) -> None:
    """Ends the calls with this object, those that run and later ones."""
    with self._lock:
      self._started = True
      for manager in self._managers:
        manager.start_cancel()

  def call(self, function: _Function, values: Sequence[Any]) -> list[tf.Tensor]:
    """Calls a function on a CPU.

    Args:
      function: The function.
      values: Its inputs, tensors or arrays.

    Returns:
      The outputs.
    """
    # Calling the operation skips the check of the Python signature, which takes
    # longer than aggregating a small model. On a GPU the operation would copy
    # all its inputs to the device, which is impossible for datasets.
    tensors = [
        v if isinstance(v, tf.Tensor) else tf.constant(v) for v in values
    ]
    with self._manager() as manager:
      return eager_execute.execute_with_cancellation(
          'StatefulPartitionedCall',
          function.num_outputs,
          tensors + function.captured_inputs,
          function.attributes,
          eager_context.context(),
          manager,
      )

  @contextlib.contextmanager
  def _manager(self) -> Iterator[eager_cancellation.CancellationManager]:
    """Yields the manager of one call."""
    # A call that fails cancels all calls with its manager, later ones, too.
    manager = eager_cancellation.CancellationManager()
    with self._lock:
      self._managers.add(manager)
      if self._started:
        manager.start_cancel()
    try:
      yield manager
    finally:
      with self._lock:
        self._managers.remove(manager)


# Of calls that nothing ends.
NEVER = Cancellation()


class Stage:
  """A TensorFlow function of a plan, traced on its first call.

  Attributes:
    inputs: The leaves of the function's arguments.
    outputs: The leaves of its results.
    body: Maps input tensors to output tensors, in a graph.
  """

  def __init__(
      self,
      inputs: Sequence[symbols.Leaf],
      outputs: Sequence[symbols.Leaf],
      body: Callable[[list[tf.Tensor]], list[tf.Tensor]],
      input_specs: Optional[Sequence[tf.TensorSpec]] = None,
  ):
    """Initializes the stage.

    Args:
      inputs: The leaves of the function's arguments.
      outputs: The leaves of its results.
      body: Maps input tensors to output tensors.
      input_specs: The specs of the arguments, if they are not the leaves.
    """
    self.inputs = tuple(inputs)
    self.outputs = tuple(outputs)
    self.body = body
    self._input_specs = input_specs or [leaf.spec for leaf in self.inputs]
    self._function: Optional[_Function] = None
    # The CPU devices for which TensorFlow has compiled the function, and for
    # each device a lock that is held during the first call.
    self._compiled: set[str] = set()
    self._first_calls: dict[str, threading.Lock] = {}

  def __call__(
      self,
      values: Sequence[Any],
      device: str,
      cancellation: Cancellation = NEVER,
  ) -> list[tf.Tensor]:
    """Computes the output tensors.

    Args:
      values: The inputs, tensors or arrays.
      device: The device's full name.
      cancellation: Can end the call.

    Returns:
      The outputs.
    """
    if not self.outputs:
      return []
    if self._function is None:
      with _tracing_lock:
        if self._function is None:
          self._function = self._trace()
    function = self._function
    with tf.device(device):
      if not _is_cpu(device):
        return function.function(*values)
      if device not in self._compiled:
        # TensorFlow compiles a function during its first call, and once more
        # for each thread that calls it before the compilation ends.
        with self._first_calls.setdefault(device, threading.Lock()):
          if device not in self._compiled:
            outputs = cancellation.call(function, values)
            self._compiled.add(device)
            return outputs
      return cancellation.call(function, values)

  def _trace(self) -> _Function:
    def compute(*tensors):
      # A function that is called as an operation must not return a tensor that
      # TensorFlow knows to be a shape.
      return [
          tf.raw_ops.DeepCopy(x=result) if result.dtype == tf.int32 else result
          for result in self.body(list(tensors))
      ]

    return _Function(tf.compat.v1.wrap_function(compute, self._input_specs))
