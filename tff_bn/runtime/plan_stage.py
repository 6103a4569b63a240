"""A part of a plan that is one TensorFlow function."""

from collections.abc import Callable, Sequence
import itertools
import threading
from typing import Any

import tensorflow as tf

from tff_bn.runtime import symbols

# TensorFlow's tracing is not thread-safe.
_tracing_lock = threading.RLock()


def _without_grappler() -> bytes:
  """Makes a serialized `ConfigProto` that turns Grappler off."""
  config = tf.compat.v1.ConfigProto()
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config.SerializeToString()


_WITH_GRAPPLER, _WITHOUT_GRAPPLER = b'', _without_grappler()


def _config(function: Any) -> bytes:
  """Chooses the configuration of a function's calls on a CPU.

  Grappler, TensorFlow's graph optimizer, takes a large part of the time of a
  function's first call. Later calls make up for that if the function repeats
  its operations, as local training does.

  Args:
    function: A traced function.

  Returns:
    A serialized `ConfigProto`: Grappler is on if the function has a loop.
  """
  graph = function.graph.as_graph_def()
  nodes = itertools.chain(
      graph.node, *(f.node_def for f in graph.library.function)
  )
  has_loop = any(node.op in ('While', 'StatelessWhile') for node in nodes)
  return _WITH_GRAPPLER if has_loop else _WITHOUT_GRAPPLER


class Stage:
  """A TensorFlow function of a plan, traced at its first use.

  Attributes:
    inputs: The leaves that it takes.
    outputs: The leaves that it returns.
  """

  def __init__(
      self,
      inputs: Sequence[symbols.Leaf],
      outputs: Sequence[symbols.Leaf],
      body: Callable[[list[tf.Tensor]], list[tf.Tensor]],
  ):
    """Initializes the stage.

    Args:
      inputs: The leaves that it takes.
      outputs: The leaves that it returns.
      body: Makes the tensors of the outputs of those of the inputs.
    """
    self.inputs = tuple(inputs)
    self.outputs = tuple(outputs)
    self._body = body
    self._dtypes = [leaf.spec.dtype for leaf in self.outputs]
    self._function: Any = None
    self._cpu_config = _WITH_GRAPPLER
    # The CPU devices for which TensorFlow has compiled the function, and a lock
    # for each device on which the first call may still be running.
    self._compiled: set[str] = set()
    self._first_calls: dict[str, threading.Lock] = {}

  def __call__(
      self, tensors: Sequence[tf.Tensor], device: str
  ) -> list[tf.Tensor]:
    """Computes the outputs.

    Args:
      tensors: The tensors of the inputs.
      device: Where.

    Returns:
      The tensors of the outputs.
    """
    if not self.outputs:
      return []
    if self._function is None:
      with _tracing_lock:
        if self._function is None:
          function = self._trace()
          self._cpu_config = _config(function)
          self._function = function
    function = self._function
    with tf.device(device):
      if tf.DeviceSpec.from_string(device).device_type != 'CPU':
        return function(*tensors)
      if device not in self._compiled:
        # TensorFlow compiles a function during its first call, and again for
        # each thread that calls it before that is done.
        with self._first_calls.setdefault(device, threading.Lock()):
          if device not in self._compiled:
            outputs = self._call_on_cpu(function, tensors)
            self._compiled.add(device)
            return outputs
      return self._call_on_cpu(function, tensors)

  def _call_on_cpu(
      self, function: Any, tensors: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    # Without the function's Python signature, to check which takes longer than
    # to add up a small model. Not on a GPU, to which everything that an
    # operation takes is copied, and a dataset can't be.
    return tf.raw_ops.StatefulPartitionedCall(
        args=list(tensors),
        Tout=self._dtypes,
        f=function,
        config_proto=self._cpu_config,
    )

  def _compute(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    # What TensorFlow knows to be a shape must not be the result of a function
    # that is called as an operation.
    return [
        tf.raw_ops.DeepCopy(x=result) if result.dtype == tf.int32 else result
        for result in self._body(tensors)
    ]

  def _trace(self) -> Any:
    return tf.compat.v1.wrap_function(
        lambda *tensors: self._compute(list(tensors)),
        [leaf.spec for leaf in self.inputs],
    )
