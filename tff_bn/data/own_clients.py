"""Data that is divided into clients already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from tff_bn.common import checks
from tff_bn.data import arrays
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import federated
from tff_bn.data import splitting

if TYPE_CHECKING:
  import tensorflow as tf

_NAME = 'clients'
_ELEMENTS = (
    'be a tf.data.Dataset of pairs (x, y): samples and their labels, one at a'
    ' time or in batches'
)


def from_clients(
    train: Mapping[str, tuple[Any, Any]],
    test: Optional[Mapping[str, tuple[Any, Any]]] = None,
    *,
    num_classes: Optional[int] = None,
    class_names: Sequence[str] = (),
    task: Optional[str] = None,
) -> federated.FederatedData:
  """Returns the data of clients, given each client's arrays.

  Example:
  ```
  federated = data.from_clients(
      {'north': (x_north, y_north), 'south': (x_south, y_south)},
      test={'north': (x_test, y_test)},
  )
  ```

  Args:
    train: The id of each client -> its training samples `x` and labels `y`, at
      least one. `x` is images `[n, height, width, channels]`, vectors `[n,
      features]` or series `[n, steps, features]`, with the same shape and dtype
      for all clients; see `Dataset` for dtypes and labels.
    test: Test data of the clients, in the same form. Clients may lack some.
    num_classes: The number of classes, see `Dataset`.
    class_names: The names of the classes, see `Dataset`.
    task: What a model learns from the labels, see `Dataset`.

  Returns:
    The data, with the clients in the order of `train`.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If a client has no training samples, arrays of clients differ,
      or the samples or labels can't be used, see `Dataset`.
  """
  parts = _Parts('train', train)
  test_parts = _Parts('test', {} if test is None else test)
  if parts.empty or not parts.clients:
    which = f'the client {parts.empty[0]!r}' if parts.empty else 'any client'
    raise ValueError(
        f'train has no samples of {which}; each client needs at least one.'
    )
  unknown = test_parts.clients.keys() - train.keys()
  if unknown:
    raise ValueError(
        f'test has the client {min(unknown)!r}, which train lacks; give'
        ' training samples of each client.'
    )
  test_parts.check_like(parts)
  x_train, y_train = parts.joined()
  x_test, y_test = (
      test_parts.joined() if test_parts.clients else (x_train[:0], y_train[:0])
  )
  ids = tuple(parts.clients)
  numbers = {name: number for number, name in enumerate(ids)}
  described: dict[str, Any] = dict(
      num_classes=num_classes, class_names=tuple(class_names), task=task
  )
  dataset = dataset_lib.Dataset(
      _NAME,
      x_train,
      y_train,
      x_test,
      y_test,
      client_train=parts.client_of_samples(numbers),
      client_test=test_parts.client_of_samples(numbers),
      client_names=ids,
      **described,
  )
  return splitting.split_natural(dataset, num_clients=None, seed=0)


def from_datasets(
    train: Mapping[str, tf.data.Dataset],
    test: Optional[Mapping[str, tf.data.Dataset]] = None,
    *,
    num_classes: Optional[int] = None,
    class_names: Sequence[str] = (),
    task: Optional[str] = None,
) -> federated.FederatedData:
  """Returns the data of clients, given each client's `tf.data.Dataset`.

  The datasets are read into memory.

  Args:
    train: The id of each client -> its training data: pairs `(x, y)` of a
      sample and its label, or batches of them. They are batches if both have a
      first axis of unknown size, as `tf.data.Dataset.batch` makes it.
    test: Test data of the clients, in the same form. Clients may lack some.
    num_classes: The number of classes, see `Dataset`.
    class_names: The names of the classes, see `Dataset`.
    task: What a model learns from the labels, see `Dataset`.

  Returns:
    See `from_clients`.

  Raises:
    TypeError: If an argument has the wrong type, or a dataset has other
      elements.
    ValueError: If a dataset does not end, or its samples have different shapes;
      see also `from_clients`.
  """
  return from_clients(
      _read('train', train),
      None if test is None else _read('test', test),
      num_classes=num_classes,
      class_names=class_names,
      task=task,
  )


class _Parts:
  """The arrays of clients.

  Attributes:
    clients: The id of each client with samples -> its samples and labels.
    empty: The ids of the other clients.
  """

  def __init__(self, argument: str, clients: Mapping[str, Any]):
    checks.check_type(
        argument,
        clients,
        Mapping,
        'map the id of each client to its samples and labels (x, y)',
    )
    self._argument = argument
    federated.check_client_ids(clients)
    pairs = {name: self._pair(name, value) for name, value in clients.items()}
    self.clients = {name: pair for name, pair in pairs.items() if len(pair[1])}
    self.empty = [name for name in pairs if name not in self.clients]
    self.check_like(self)

  def _place(self, name: str) -> str:
    return f'{self._argument}[{name!r}]'

  def _pair(self, name: str, value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the arrays of a client."""
    place = self._place(name)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
      raise TypeError(
          f'{place} must be a pair (x, y) of samples and labels, but is'
          f' {_brief(value)}.'
      )
    x, y = (
        arrays.to_array(place, part, values)
        for part, values in zip('xy', value)
    )
    if not x.ndim or not y.ndim or len(x) != len(y):
      raise ValueError(
          f'{place}: x has the shape {x.shape} and y {y.shape}; the first axis'
          ' of both is the samples.'
      )
    return x, y

  def check_like(self, others: _Parts) -> None:
    """Checks that samples and labels have the form of the first client's.

    Raises:
      ValueError: If they have another shape or kind of dtype.
    """
    if not others.clients:
      return
    first, model = next(iter(others.clients.items()))
    for name, pair in self.clients.items():
      for part, array, expected in zip('xy', pair, model):
        if _form(part, array) != _form(part, expected):
          raise ValueError(
              f'{self._place(name)}: {part} has the dtype {array.dtype} and'
              f' samples of the shape {array.shape[1:]}, but'
              f' {others._place(first)} has {expected.dtype} and'
              f' {expected.shape[1:]}; all clients need the same.'
          )

  def joined(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the samples and labels of all clients, one after the other."""
    x, y = map(np.concatenate, zip(*self.clients.values()))
    return x, y

  def client_of_samples(self, numbers: Mapping[str, int]) -> np.ndarray:
    """Returns the number of each sample's client."""
    return np.repeat(
        np.array([numbers[name] for name in self.clients], np.int32),
        [len(y) for _, y in self.clients.values()],
    )


def _form(part: str, array: np.ndarray) -> tuple[str, tuple[int, ...]]:
  """Returns what the samples, or the labels, of all clients have in common."""
  # Samples of uint8 are scaled. Otherwise, the size of integers means nothing.
  is_pixels = part == 'x' and array.dtype == np.uint8
  kind = 'uint8' if is_pixels else array.dtype.kind.replace('u', 'i')
  return kind, array.shape[1:]


def _brief(value: Any) -> str:
  if isinstance(value, (tuple, list)):
    return f'a {type(value).__name__} of {len(value)}'
  return f'of type {type(value).__name__}'


def _read(
    argument: str, datasets: Mapping[str, tf.data.Dataset]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Returns the arrays of the clients' datasets."""
  checks.check_type(
      argument,
      datasets,
      Mapping,
      'map the id of each client to its tf.data.Dataset',
  )
  return {
      name: _read_client(f'{argument}[{name!r}]', dataset)
      for name, dataset in datasets.items()
  }


def _read_client(
    place: str, dataset: tf.data.Dataset
) -> tuple[np.ndarray, np.ndarray]:
  import tensorflow as tf  # Arrays need none.

  checks.check_type(place, dataset, tf.data.Dataset, _ELEMENTS)
  spec = dataset.element_spec
  if (
      not isinstance(spec, tuple)
      or len(spec) != 2
      or not all(isinstance(part, tf.TensorSpec) for part in spec)
  ):
    raise TypeError(f'{place} must {_ELEMENTS}, but has elements {spec}.')
  if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
    raise ValueError(f'{place} does not end; remove repeat().')
  are_batches = all(part.shape.rank and part.shape[0] is None for part in spec)
  elements = list(dataset.as_numpy_iterator())
  if not elements:
    return np.empty((0, 0)), np.empty(0)
  try:
    x, y = map(np.concatenate if are_batches else np.stack, zip(*elements))
  except ValueError as error:
    raise ValueError(
        f'{place}: the samples, or the labels, have different shapes ({error}).'
    ) from error
  return x, y
