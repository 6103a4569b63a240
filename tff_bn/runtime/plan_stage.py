"""Stages of a plan: TensorFlow functions traced on first use."""

from collections.abc import Callable, Sequence
import functools
import threading
from typing import Any, Optional

import tensorflow as tf

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
    self._dtypes = [leaf.spec.dtype for leaf in self.outputs]
    self._function: Any = None
    # The CPU devices for which TensorFlow has compiled the function, and for
    # each device a lock that is held during the first call.
    self._compiled: set[str] = set()
    self._first_calls: dict[str, threading.Lock] = {}

  def __call__(
      self, tensors: Sequence[tf.Tensor], device: str
  ) -> list[tf.Tensor]:
    """Computes the output tensors on the device with a full name."""
    if not self.outputs:
      return []
    if self._function is None:
      with _tracing_lock:
        if self._function is None:
          self._function = self._trace()
    function = self._function
    with tf.device(device):
      if not _is_cpu(device):
        return function(*tensors)
      if device not in self._compiled:
        # TensorFlow compiles a function during its first call, and once more
        # for each thread that calls it before the compilation ends.
        with self._first_calls.setdefault(device, threading.Lock()):
          if device not in self._compiled:
            outputs = self._call_on_cpu(function, tensors)
            self._compiled.add(device)
            return outputs
      return self._call_on_cpu(function, tensors)

  def _call_on_cpu(
      self, function: Any, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    # Calling the operation skips the check of the Python signature, which takes
    # longer than aggregating a small model. On a GPU the operation would copy
    # all its inputs to the device, which is impossible for datasets.
    return tf.raw_ops.StatefulPartitionedCall(
        args=list(tensors),
        Tout=self._dtypes,
        f=function,
        config_proto=_WITHOUT_GRAPPLER,
    )

  def _trace(self) -> Any:
    def compute(*tensors):
      # A function that is called as an operation must not return a tensor that
      # TensorFlow knows to be a shape.
      return [
          tf.raw_ops.DeepCopy(x=result) if result.dtype == tf.int32 else result
          for result in self.body(list(tensors))
      ]

    return tf.compat.v1.wrap_function(compute, self._input_specs)
