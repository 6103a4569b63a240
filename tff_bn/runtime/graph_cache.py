"""A cache of imported TensorFlow computations."""

import functools
import hashlib
import threading
from typing import Any
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import imported_graph


class GraphCache:
  """Weak references to imported graphs, by the hash of their content.

  Computations that contain the same TensorFlow graph share its function.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._graphs: weakref.WeakValueDictionary[bytes, _Graph] = (
        weakref.WeakValueDictionary()
    )

  def get(self, computation: tff.framework.CompiledComputation) -> '_Graph':
    """Returns the function of a TensorFlow computation.

    Args:
      computation: The computation.

    Raises:
      NotImplementedError: If it is not a computation of TensorFlow.
    """
    kind = computation.proto.WhichOneof('computation')
    if kind != 'tensorflow':
      raise NotImplementedError(
          f'A computation of kind {kind!r} can not run in process; only a'
          ' tff.tensorflow.computation can.'
      )
    proto = computation.proto.tensorflow
    key = hashlib.sha256(proto.SerializeToString(deterministic=True)).digest()
    with self._lock:
      graph = self._graphs.get(key)
      if graph is None:
        graph = self._graphs[key] = _Graph(proto)
    return graph


class _Graph:
  """The function of a TensorFlow computation, imported on its first call."""

  def __init__(self, proto: Any):
    self._proto = proto

  @functools.cached_property
  def _function(self) -> tf.types.experimental.ConcreteFunction:
    return imported_graph.import_graph(self._proto)

  def __call__(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
    return self._function(*arguments)
