"""Makes values such that they can be sent to other processes.

Tensors become NumPy arrays, and datasets become the graphs that make them, with
their data. What many messages have in common, such as all training data, is not
put into each of them: it is put once into a store that all processes can read.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import io
import pickle
import threading
from typing import Any, Optional
import weakref

import cloudpickle
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import arguments
from tff_bn.runtime import client_dataset
from tff_bn.runtime import devices
from tff_bn.runtime import element_structure
from tff_bn.runtime import symbols

# Arrays of this size and more are stored instead of sent.
_LARGE_BYTES = 10_000
# They call a Python function of the process in which the dataset was made.
_PYTHON_OPS = frozenset(['EagerPyFunc', 'PyFunc', 'PyFuncStateless'])


@dataclasses.dataclass(frozen=True)
class Parcel:
  """A dataset on its way.

  Attributes:
    data: The pickled object, without its large arrays.
    stored: Where these are.
  """

  data: bytes
  stored: tuple[Any, ...]


class Sender:
  """Prepares what is sent."""

  def __init__(self, put: Callable[[np.ndarray], Any]):
    """Initializes the sender.

    Args:
      put: Puts an array into the store; returns what finds it there again.
    """
    self._put = put
    self._lock = threading.Lock()
    self._stored: dict[int, Any] = {}
    self._datasets = weakref.WeakKeyDictionary()

  def pack(self, value: Any) -> Any:
    """Prepares a part of an argument.

    Args:
      value: An array, a tensor, a `tf.data.Dataset` or a `ClientDataset`.

    Returns:
      What `unpack` takes.

    Raises:
      ValueError: If a dataset needs this process.
    """
    if isinstance(value, tf.data.Dataset):
      value = self._as_graph(value)
    if isinstance(value, client_dataset.ClientDataset):
      return self._parcel(value)
    return value.numpy() if isinstance(value, tf.Tensor) else value

  def _as_graph(self, dataset: tf.data.Dataset) -> '_GraphDataset':
    with self._lock:
      if dataset not in self._datasets:
        variant = client_dataset.to_variant(dataset)
        self._datasets[dataset] = _GraphDataset(
            dataset_to_array(variant), dataset.element_spec
        )
      return self._datasets[dataset]

  def _parcel(self, dataset: client_dataset.ClientDataset) -> Parcel:
    text = io.BytesIO()
    pickler = _Pickler(text, self._store)
    pickler.dump(dataset)
    return Parcel(text.getvalue(), tuple(pickler.stored))

  def _store(self, array: np.ndarray) -> Any:
    key = id(array)
    with self._lock:
      if key not in self._stored:
        self._stored[key] = self._put(array)
        weakref.finalize(array, self._stored.pop, key, None)
      return self._stored[key]


class _Pickler(cloudpickle.Pickler):
  """Leaves large arrays out."""

  def __init__(self, file: io.BytesIO, store: Callable[[np.ndarray], Any]):
    super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
    self.stored = []
    self._store = store

  def persistent_id(self, obj: Any) -> Optional[int]:
    """Returns the position of what stands for a large array."""
    if not isinstance(obj, np.ndarray) or obj.dtype.hasobject:
      return None
    if obj.nbytes < _LARGE_BYTES:
      return None
    self.stored.append(self._store(obj))
    return len(self.stored) - 1


class _Unpickler(pickle.Unpickler):
  """Puts large arrays in again."""

  def __init__(self, file: io.BytesIO, arrays: Sequence[np.ndarray]):
    super().__init__(file)
    self._arrays = arrays

  def persistent_load(self, pid: int) -> np.ndarray:
    """Returns the array at a position."""
    return self._arrays[pid]


def unpack(
    value: Any, get: Callable[[Sequence[Any]], Sequence[np.ndarray]]
) -> Any:
  """Reverses `Sender.pack`.

  Args:
    value: What it returned.
    get: Returns arrays from the store.

  Returns:
    An array or a `ClientDataset`.
  """
  if not isinstance(value, Parcel):
    return value
  arrays = get(list(value.stored)) if value.stored else ()
  return _Unpickler(io.BytesIO(value.data), arrays).load()


class _GraphDataset(client_dataset.ClientDataset):
  """A `tf.data.Dataset`, as the graph that makes it."""

  def __init__(self, graph: np.ndarray, element_spec: Any):
    self._graph = graph
    self._element_spec = element_spec

  @property
  def element_spec(self) -> Any:
    """See the base class."""
    return self._element_spec

  def build(self) -> tf.Tensor:
    """See the base class."""
    return variant_from_array(self._graph)


def dataset_to_array(variant: tf.Tensor) -> np.ndarray:
  """Writes a dataset, with its data, as the graph that makes it.

  Args:
    variant: Its variant tensor.

  Returns:
    The serialized graph, as uint8.

  Raises:
    ValueError: If the dataset calls a Python function.
  """
  with tf.device(devices.HOST):
    text = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, strip_device_assignment=True
    ).numpy()
  graph = tf.compat.v1.GraphDef.FromString(text)
  nodes = [*graph.node]
  for function in graph.library.function:
    nodes += function.node_def
  if any(node.op in _PYTHON_OPS for node in nodes):
    raise ValueError(
        'A dataset calls a Python function (tf.data.Dataset.from_generator,'
        ' tf.numpy_function or tf.py_function), which exists in this process'
        ' only, so that it can not be sent to a worker. Make it of arrays, or'
        ' write a tff_bn.runtime.ClientDataset.'
    )
  return np.frombuffer(text, np.uint8)


def variant_from_array(graph: np.ndarray) -> tf.Tensor:
  """Reverses `dataset_to_array`."""
  with tf.device(devices.HOST):
    return tf.raw_ops.DatasetFromGraph(graph_def=graph.tobytes())


@dataclasses.dataclass(frozen=True)
class _Rows:
  """The elements of a dataset that can't be written as a graph.

  Attributes:
    rows: For each element the arrays of its leaves, depth first.
  """

  rows: list[list[Any]]


def to_arrays(
    leaves: Iterable[symbols.Leaf], tensors: Iterable[tf.Tensor]
) -> list[Any]:
  """Makes tensors arrays.

  Args:
    leaves: Their leaves.
    tensors: The tensors.

  Returns:
    The arrays; for a dataset, something else that can be pickled.
  """
  return [
      _from_variant(tensor, leaf.type.element)
      if isinstance(leaf.type, tff.SequenceType)
      else tensor.numpy()
      for leaf, tensor in zip(leaves, tensors, strict=True)
  ]


def _from_variant(
    variant: tf.Tensor, element_type: tff.Type
) -> np.ndarray | _Rows:
  try:
    return dataset_to_array(variant)
  except tf.errors.FailedPreconditionError:
    # It uses a table of the function that made it, and that has ended.
    dataset = element_structure.from_variant(variant, element_type)
    return _Rows(
        [
            [leaf.numpy() for leaf in element_structure.unpack(element_type, e)]
            for e in dataset
        ]
    )


def from_array(leaf: symbols.Leaf, array: Any) -> Any:
  """Reverses `to_arrays` for one leaf.

  Args:
    leaf: The leaf.
    array: What stands for it.

  Returns:
    The array, or a dataset's variant tensor.
  """
  if not isinstance(leaf.type, tff.SequenceType):
    return array
  if isinstance(array, _Rows):
    return client_dataset.to_variant(
        arguments.dataset_of_rows(array.rows, leaf.type.element)
    )
  return variant_from_array(array)
