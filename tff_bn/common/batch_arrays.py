"""Clients' batches as NumPy arrays, also those of a `tf.data.Dataset`."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple, Optional, Union
import weakref

import numpy as np
import tensorflow as tf

from tff_bn.common import joined_tensors

# By their names, since their module is private: datasets that yield what their
# input yields,
_SAME = ('_OptionsDataset', '_PrefetchDataset')
# and those that have tensors.
_SLICES, _TENSORS = '_TensorSliceDataset', '_TensorDataset'


class BatchArrays(NamedTuple):
  """A client's batches as NumPy arrays.

  Attributes:
    sizes: The number of samples in each batch, an int64 vector.
    load: Returns the samples of all batches, one batch after another: an array
      for each tensor of a batch, depth first.
  """

  sizes: np.ndarray
  load: Callable[[], Sequence[np.ndarray]]


class LazyDataset(NamedTuple):
  """A dataset whose batches are at hand as arrays.

  A `tf.data.Dataset` takes longer to make than a small model to evaluate, so it
  is built only for those who need it.

  Attributes:
    element_spec: The type of a batch.
    arrays: The batches.
    build: Returns the dataset.
  """

  element_spec: Any
  arrays: BatchArrays
  build: Callable[[], tf.data.Dataset]


Source = Union[tf.data.Dataset, LazyDataset]

_remembered: weakref.WeakKeyDictionary[tf.data.Dataset, BatchArrays] = (
    weakref.WeakKeyDictionary()
)


def remember(dataset: tf.data.Dataset, arrays: BatchArrays) -> None:
  """Makes the batches of a dataset known to `of_dataset`."""
  _remembered[dataset] = arrays


def of_dataset(dataset: Source) -> Optional[BatchArrays]:
  """Returns the batches of a dataset, or `None` if only reading tells.

  They are known of `Dataset.from_tensor_slices(...).batch(...)`, of datasets
  whose elements are batches in tensors, and of datasets that were remembered;
  also after `take`, `prefetch` and `with_options`.
  """
  if isinstance(dataset, LazyDataset):
    return dataset.arrays
  if dataset in _remembered:
    return _remembered[dataset]
  try:
    return _of_kind(type(dataset).__name__, dataset)
  except AttributeError:  # Of another version of TensorFlow.
    return None


def _of_kind(kind: str, dataset: Any) -> Optional[BatchArrays]:
  """Returns the batches of a dataset, given the name of its class."""
  if kind in _SAME:
    return of_dataset(dataset._input_dataset)
  if kind == '_TakeDataset':
    arrays = of_dataset(dataset._input_dataset)
    count = int(dataset._count)
    return arrays if arrays is None or count < 0 else _first(arrays, count)
  if kind in (_SLICES, _TENSORS):
    tensors = _tensors(dataset)
    if tensors is None or any(t.shape.rank < 1 for t in tensors):
      return None
    if kind == _TENSORS:
      tensors = [tensor[tf.newaxis] for tensor in tensors]
    if any(tensor.shape.rank < 2 for tensor in tensors):
      return None
    count, size = tensors[0].shape[:2]
    return BatchArrays(
        np.full(count, size, np.int64),
        functools.partial(_joined_batches, tensors),
    )
  if kind == '_BatchDataset':
    if type(dataset._input_dataset).__name__ != _SLICES:
      return None
    tensors = _tensors(dataset._input_dataset)
    if not tensors:
      return None
    count, rest = divmod(tensors[0].shape[0], int(dataset._batch_size))
    sizes = [int(dataset._batch_size)] * count
    if rest and not dataset._drop_remainder:
      sizes.append(rest)
    return BatchArrays(
        np.asarray(sizes, np.int64),
        functools.partial(_first_rows, tensors, sum(sizes)),
    )
  return None


def _tensors(dataset: Any) -> Optional[list[tf.Tensor]]:
  """Returns the tensors of a dataset, depth first in its element."""
  tensors = dataset._tensors
  if any(not hasattr(t, 'numpy') or t.dtype == tf.variant for t in tensors):
    return None
  return [tensors[place] for place in leaf_order(dataset.element_spec)]


def leaf_order(spec: Any) -> list[int]:
  """Returns the positions of an element's leaves in a dataset's tensors."""
  # Data can be loaded without TFF.
  import tensorflow_federated as tff

  places = range(len(tf.nest.flatten(spec)))
  return tff.structure.flatten(
      tff.structure.from_container(
          (tf.nest.pack_sequence_as(spec, places),), recursive=True
      )
  )


class Joined(NamedTuple):
  """The batches of several clients, see `client_batches.ClientBatches`.

  Attributes:
    samples: The samples of all batches, depth first in a batch.
    bounds: Where each batch begins, and where the last one ends.
    firsts: The number of each client's first batch.
    sizes: Each client's number of batches.
  """

  samples: list[tf.Tensor]
  bounds: np.ndarray
  firsts: np.ndarray
  sizes: np.ndarray


def join(
    data: Sequence[BatchArrays], num_batches: Optional[int] = None
) -> Joined:
  """Joins the batches of at least one client.

  Args:
    data: The clients' batches.
    num_batches: If given, the samples have the batches along a new first axis
      of this length. The clients' batches, which must all have the same size,
      come first, and batches of zeros follow them.
  """
  loaded = [arrays.load() for arrays in data]
  sizes = np.asarray([len(arrays.sizes) for arrays in data], np.int64)
  batch_sizes = np.concatenate([arrays.sizes for arrays in data])
  bounds = np.concatenate([[0], np.cumsum(batch_sizes)])
  lengths = [bounds[-1]]
  if num_batches is not None:
    lengths = [num_batches, batch_sizes[0]]
  samples = [
      joined_tensors.joined(parts, [*lengths, *parts[0].shape[1:]])
      for parts in zip(*loaded)
  ]
  return Joined(samples, bounds, np.cumsum(sizes) - sizes, sizes)


def _first(arrays: BatchArrays, count: int) -> BatchArrays:
  """Returns the first batches."""
  sizes = arrays.sizes[:count]

  def load():
    return [samples[: sum(sizes)] for samples in arrays.load()]

  return BatchArrays(sizes, load)


def _first_rows(tensors: Sequence[tf.Tensor], count: int) -> list[np.ndarray]:
  return [tensor.numpy()[:count] for tensor in tensors]


def _joined_batches(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
  return [tensor.numpy().reshape([-1, *tensor.shape[2:]]) for tensor in tensors]
