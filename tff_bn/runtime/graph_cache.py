"""TensorFlow computations, imported once."""

import functools
import hashlib
import threading
from typing import Any
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import imported_graph


class GraphCache:
  """Imported graphs by their content, as long as somebody uses them.

  Computations that share a TensorFlow computation share its function.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._graphs = weakref.WeakValueDictionary()

  def get(self, computation: tff.framework.CompiledComputation) -> '_Graph':
    """Returns the graph of a TensorFlow computation."""
    imported_graph.check_is_tensorflow(computation)
    proto = computation.proto.tensorflow
    key = hashlib.sha256(proto.SerializeToString(deterministic=True)).digest()
    with self._lock:
      graph = self._graphs.get(key)
      if graph is None:
        graph = self._graphs[key] = _Graph(proto)
    return graph


class _Graph:
  """A TensorFlow computation, imported at its first use."""

  def __init__(self, proto: Any):
    self._proto = proto

  @functools.cached_property
  def _function(self) -> tf.types.experimental.ConcreteFunction:
    return imported_graph.import_graph(self._proto)

  def __call__(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
    return self._function(*arguments)
