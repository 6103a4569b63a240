"""A dataset that is split over clients, and the batches they train on."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
from typing import Optional, Protocol

import numpy as np
import tensorflow as tf

from tff_bn.data import batches
from tff_bn.data import dataset as dataset_lib
from tff_bn.common import seeding


def check_client_ids(client_ids: Iterable[str]) -> None:
  """Checks the ids of clients.

  Args:
    client_ids: The ids.

  Raises:
    TypeError: If an id is not a string.
    ValueError: If an id is not a text that can be written to a file.
  """
  for client_id in client_ids:
    if not isinstance(client_id, str):
      raise TypeError(
          f'The client id {client_id!r} is of type {type(client_id).__name__};'
          f" client ids are strings, such as '{client_id}'."
      )
    try:
      client_id.encode()
    except UnicodeEncodeError as error:
      raise ValueError(
          f'The client id {client_id!r} cannot be encoded as UTF-8.'
      ) from error


class Recipe(Protocol):
  """A function that can be pickled, and that equals others that do the same."""

  def __call__(self) -> 'FederatedData':
    """Makes the data."""

  def __hash__(self) -> int:
    """Returns the same number for functions that do the same."""


@dataclasses.dataclass(frozen=True, eq=False)
class FederatedData:
  """A dataset and which of its samples each client has.

  Attributes:
    dataset: The dataset.
    train_indices: Client id -> positions of its samples in the training data,
      at least one. The order of the ids is the order of the clients.
    test_indices: Client id -> positions in the test data of the samples on
      which a model of its own is evaluated; none, one or more.
    recipe: Makes the same data in another process, on whatever machine. `None`:
      the data itself is sent there.

  Raises:
    TypeError: If a client's id is not a string.
    ValueError: If a client's id is not a text that can be written to a file.
  """

  dataset: dataset_lib.Dataset
  train_indices: Mapping[str, np.ndarray]
  test_indices: Mapping[str, np.ndarray]
  recipe: Optional[Recipe] = None

  def __post_init__(self):
    check_client_ids(self.train_indices)

  @property
  def client_ids(self) -> tuple[str, ...]:
    """The ids of all clients."""
    return tuple(self.train_indices)

  @property
  def num_classes(self) -> int:
    """Number of classes of the dataset."""
    return self.dataset.num_classes

  @property
  def element_spec(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """The type of a batch (x, y): float32 `[None, ...]` and int32 `[None]`."""
    return (
        tf.TensorSpec((None, *self.dataset.input_shape), tf.float32),
        tf.TensorSpec((None,), tf.int32),
    )

  def client_dataset(
      self,
      client_ids: Sequence[str],
      *,
      seed: int,
      round_num: int,
      batch_size: int,
      local_steps: Optional[int] = None,
      local_epochs: Optional[int] = None,
  ) -> tf.data.Dataset:
    """The batches on which a client, or several as one, trains in a round.

    The same arguments give the same batches in the same order. The dataset
    holds the samples that occur in it, each once, and no others.

    Args:
      client_ids: The client; several stand for the union of their samples.
      seed: Decides the order of the samples, together with the clients and the
        round.
      round_num: The round, not negative.
      batch_size: Samples in a batch.
      local_steps: The dataset has exactly so many full batches; the samples are
        shuffled anew after each pass over them.
      local_epochs: The dataset has so many passes over the samples, each
        shuffled anew; the last batch of each pass may be smaller. Exactly one
        of `local_steps` and `local_epochs` is given.

    Returns:
      A dataset of batches of the type `element_spec`.

    Raises:
      ValueError: If there is no such client, if a number is less than 1, or if
        not exactly one of `local_steps` and `local_epochs` is given.
    """
    return self.client_batches(
        client_ids,
        seed=seed,
        round_num=round_num,
        batch_size=batch_size,
        local_steps=local_steps,
        local_epochs=local_epochs,
    ).dataset(self.dataset.x_train, self.dataset.y_train)

  def client_batches(
      self,
      client_ids: Sequence[str],
      *,
      seed: int,
      round_num: int,
      batch_size: int,
      local_steps: Optional[int] = None,
      local_epochs: Optional[int] = None,
  ) -> batches.Batches:
    """Which samples the batches of `client_dataset` consist of.

    Args:
      client_ids: See `client_dataset`.
      seed: See `client_dataset`.
      round_num: See `client_dataset`.
      batch_size: See `client_dataset`.
      local_steps: See `client_dataset`.
      local_epochs: See `client_dataset`.

    Returns:
      The positions of the samples in the training data.

    Raises:
      ValueError: As `client_dataset`.
    """
    if (local_steps is None) == (local_epochs is None):
      raise ValueError('Give one of local_steps and local_epochs.')
    _check_positive('batch_size', batch_size)
    if not client_ids:
      raise ValueError('client_batches needs at least one client.')
    clients = [self._client_number(client_id) for client_id in client_ids]
    samples = np.concatenate(
        [self.train_indices[client_id] for client_id in client_ids]
    )
    rng = seeding.generator(seeding.Stream.BATCHES, seed, round_num, *clients)
    if local_epochs is not None:
      _check_positive('local_epochs', local_epochs)
      passes = [rng.permutation(samples) for _ in range(local_epochs)]
    else:
      _check_positive('local_steps', local_steps)
      length = local_steps * batch_size
      order = np.concatenate(
          [rng.permutation(samples) for _ in range(-(-length // len(samples)))]
      )
      passes = [order[:length]]
    return batches.Batches(passes, batch_size)

  def test_dataset(self, batch_size: int) -> tf.data.Dataset:
    """The whole test data in its order, in batches of type `element_spec`.

    Args:
      batch_size: Samples in a batch; the last may have fewer.

    Returns:
      The batches.
    """
    return self._test_batches(np.arange(len(self.dataset.y_test)), batch_size)

  def client_test_dataset(
      self, client_id: str, batch_size: int
  ) -> tf.data.Dataset:
    """A client's own test data, in batches of the type `element_spec`.

    Args:
      client_id: The client.
      batch_size: Samples in a batch; the last may have fewer.

    Returns:
      The batches; none if the client has no test data.

    Raises:
      ValueError: If there is no such client.
    """
    self._client_number(client_id)
    return self._test_batches(self.test_indices[client_id], batch_size)

  def fingerprint(self) -> str:
    """A number in hexadecimal digits that depends on all data.

    Returns:
      The same for the same samples, clients and order of both.
    """
    return self._fingerprint

  @functools.cached_property
  def _fingerprint(self) -> str:
    digest = hashlib.sha256(self.dataset.fingerprint().encode())
    for indices_of in (self.train_indices, self.test_indices):
      for client_id, indices in indices_of.items():
        name = client_id.encode()
        digest.update(f'{len(name)},{len(indices)};'.encode() + name)
        digest.update(np.ascontiguousarray(indices, np.int64))
    return digest.hexdigest()

  def label_distribution(self) -> np.ndarray:
    """How many training samples of each class each client has.

    Returns:
      Integers of shape `[num_clients, num_classes]`.
    """
    return label_counts(self.dataset, self.train_indices.values())

  @functools.cached_property
  def _client_numbers(self) -> dict[str, int]:
    return {client_id: n for n, client_id in enumerate(self.client_ids)}

  def _client_number(self, client_id: str) -> int:
    try:
      return self._client_numbers[client_id]
    except KeyError:
      raise ValueError(f'There is no client {client_id!r}.') from None

  def _test_batches(
      self, indices: np.ndarray, batch_size: int
  ) -> tf.data.Dataset:
    _check_positive('batch_size', batch_size)
    return batches.Batches([indices], batch_size).dataset(
        self.dataset.x_test, self.dataset.y_test
    )


def label_counts(
    dataset: dataset_lib.Dataset, parts: Iterable[np.ndarray]
) -> np.ndarray:
  """Training samples of each part and class: `[num_parts, num_classes]`."""
  return np.stack(
      [
          np.bincount(dataset.y_train[indices], minlength=dataset.num_classes)
          for indices in parts
      ]
  )


def _check_positive(parameter: str, number: int):
  if number < 1:
    raise ValueError(f'{parameter}={number} is too small; use at least 1.')
