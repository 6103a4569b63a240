"""Serializes values for other processes.

Tensors become NumPy arrays; datasets become the graphs that produce them, with
their data. Large arrays, such as the training data, are not part of each
message: they are put once into a store that all processes can read.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import io
import pickle
import threading
from typing import Any, Optional
import weakref

import cloudpickle
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import batch_arrays
from tff_bn.common import joined_tensors
from tff_bn.runtime import arguments
from tff_bn.runtime import client_dataset
from tff_bn.runtime import devices
from tff_bn.runtime import element_structure
from tff_bn.runtime import symbols

# Arrays of at least this size are stored instead of sent.
_LARGE_BYTES = 10_000
# These call a Python function of the process that created the dataset.
_PYTHON_OPS = frozenset(['EagerPyFunc', 'PyFunc', 'PyFuncStateless'])


@dataclasses.dataclass(frozen=True)
class Parcel:
  """A serialized `ClientDataset`, or a list of several clients' data."""

  data: bytes  # The pickled object without its large arrays.
  stored: tuple[Any, ...]  # The references to these arrays in the store.


class Sender:
  """Packs values for other processes."""

  def __init__(self, put: Callable[[np.ndarray], Any]):
    """Initializes the sender; `put` stores an array and returns a reference."""
    self._put = put
    self._lock = threading.Lock()
    self._stored: dict[int, Any] = {}
    self._datasets: weakref.WeakKeyDictionary[
        tf.data.Dataset, _GraphDataset
    ] = weakref.WeakKeyDictionary()
    self._arrays: weakref.WeakKeyDictionary[
        tf.data.Dataset, batch_arrays.BatchArrays
    ] = weakref.WeakKeyDictionary()

  def pack(self, value: Any) -> Any:
    """Packs an array, tensor or dataset as an array or a `Parcel`.

    Raises:
      ValueError: If a dataset calls a Python function.
    """
    if isinstance(value, tf.data.Dataset):
      value = self._as_graph(value)
    if isinstance(value, client_dataset.ClientDataset):
      return self._parcel(value)
    return value.numpy() if isinstance(value, tf.Tensor) else value

  def pack_several(self, values: Sequence[Any]) -> Any:
    """Packs several clients' values of a leaf, whose batches are known.

    Returns:
      The values, stacked in an array. For datasets, a `Parcel` of a list that
      has a `BatchArrays` or a `ClientDataset` for each client.
    """
    if isinstance(values[0], (tf.data.Dataset, client_dataset.ClientDataset)):
      return self._parcel(
          [
              self._in_arrays(v) if isinstance(v, tf.data.Dataset) else v
              for v in values
          ]
      )
    return joined_tensors.stacked(values).numpy()

  def _in_arrays(self, dataset: tf.data.Dataset) -> batch_arrays.BatchArrays:
    with self._lock:
      if dataset not in self._arrays:
        arrays = batch_arrays.of_dataset(dataset)
        assert arrays is not None
        # `load` of the original can't be pickled.
        self._arrays[dataset] = arrays._replace(
            load=functools.partial(list, arrays.load())
        )
      return self._arrays[dataset]

  def _as_graph(self, dataset: tf.data.Dataset) -> '_GraphDataset':
    with self._lock:
      if dataset not in self._datasets:
        variant = client_dataset.to_variant(dataset)
        self._datasets[dataset] = _GraphDataset(
            dataset_to_array(variant), dataset.element_spec
        )
      return self._datasets[dataset]

  def _parcel(self, data: Any) -> Parcel:
    text = io.BytesIO()
    pickler = _Pickler(text, self._store)
    pickler.dump(data)
    return Parcel(text.getvalue(), tuple(pickler.stored))

  def _store(self, array: np.ndarray) -> Any:
    key = id(array)
    with self._lock:
      if key not in self._stored:
        self._stored[key] = self._put(array)
        weakref.finalize(array, self._stored.pop, key, None)
      return self._stored[key]


class _Pickler(cloudpickle.Pickler):
  """Replaces large arrays by positions in `stored`."""

  def __init__(self, file: io.BytesIO, store: Callable[[np.ndarray], Any]):
    super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
    # The position of each reference; several clients may share an array.
    self.stored: dict[Any, int] = {}
    self._store = store

  def persistent_id(self, obj: Any) -> Optional[int]:
    """Stores a large array and returns its position."""
    if not isinstance(obj, np.ndarray) or obj.dtype.hasobject:
      return None
    if obj.nbytes < _LARGE_BYTES:
      return None
    return self.stored.setdefault(self._store(obj), len(self.stored))


class _Unpickler(pickle.Unpickler):
  """Replaces positions by large arrays."""

  def __init__(self, file: io.BytesIO, arrays: Sequence[np.ndarray]):
    super().__init__(file)
    self._arrays = arrays

  def persistent_load(self, pid: int) -> np.ndarray:
    """Returns the array at a position."""
    return self._arrays[pid]


def unpack(
    value: Any, get: Callable[[Sequence[Any]], Sequence[np.ndarray]]
) -> Any:
  """Reverses `Sender.pack`; `get` returns the arrays of references."""
  if not isinstance(value, Parcel):
    return value
  arrays = get(list(value.stored)) if value.stored else ()
  return _Unpickler(io.BytesIO(value.data), arrays).load()


class _GraphDataset(client_dataset.ClientDataset):
  """A `tf.data.Dataset` as the graph that produces it."""

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
  """Serializes, as uint8, the graph that produces a dataset, with its data.

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
        ' tf.numpy_function or tf.py_function), which exists only in this'
        ' process and can not be sent to a worker. Build the dataset from'
        ' arrays, or write a tff_bn.runtime.ClientDataset.'
    )
  return np.frombuffer(text, np.uint8)


def variant_from_array(graph: np.ndarray) -> tf.Tensor:
  """Reverses `dataset_to_array`."""
  with tf.device(devices.HOST):
    return tf.raw_ops.DatasetFromGraph(graph_def=graph.tobytes())


def to_arrays(
    leaves: Iterable[symbols.Leaf], tensors: Iterable[tf.Tensor]
) -> list[Any]:
  """Converts tensors to NumPy arrays, which can be pickled.

  A dataset whose graph can't be serialized becomes the list of its elements,
  each as the list of its leaves' arrays, depth first.
  """
  return [
      _from_variant(tensor, leaf.type.element)
      if isinstance(leaf.type, tff.SequenceType)
      else tensor.numpy()
      for leaf, tensor in zip(leaves, tensors, strict=True)
  ]


def _from_variant(
    variant: tf.Tensor, element_type: tff.Type
) -> np.ndarray | list[list[Any]]:
  try:
    return dataset_to_array(variant)
  except tf.errors.FailedPreconditionError:
    # The dataset uses a table of the function that created it.
    dataset = element_structure.from_variant(variant, element_type)
    return [
        [leaf.numpy() for leaf in element_structure.unpack(element_type, e)]
        for e in dataset
    ]


def to_python(leaf: symbols.Leaf, array: Any) -> Any:
  """Reverses `to_arrays` for one leaf, a result; see `arguments.to_python`."""
  if isinstance(leaf.type, tff.SequenceType):
    return arguments.to_python(from_array(leaf, array), leaf.type)
  # A copy, which frees the value in the store.
  return array.copy() if isinstance(array, np.ndarray) else array


def from_array(leaf: symbols.Leaf, array: Any) -> Any:
  """Reverses `to_arrays` for one leaf; a dataset is its variant tensor."""
  if not isinstance(leaf.type, tff.SequenceType):
    return array
  if isinstance(array, list):
    return client_dataset.to_variant(
        arguments.dataset_of_rows(array, leaf.type.element)
    )
  return variant_from_array(array)
