"""A dataset that is split over clients, and the batches they train on."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
from typing import Optional, Protocol

import numpy as np
import tensorflow as tf

from tff_bn.common import spelling
from tff_bn.data import batches
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import names
from tff_bn.data import seeding
from tff_bn.data import splits

_DEFAULT_NUM_CLIENTS = 5


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
    return _label_counts(self.dataset, self.train_indices.values())

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


def split_dataset(
    dataset: dataset_lib.Dataset,
    split: str,
    num_clients: Optional[int],
    seed: int,
    *,
    classes_per_client: Optional[int] = None,
    dirichlet_alpha: Optional[float] = None,
    gamma: Optional[float] = None,
    imbalance: Optional[float] = None,
) -> FederatedData:
  """Splits a dataset over clients.

  The functions of `tff_bn.data.splits` say what each split does to the training
  data. The test data is split so that each client's test data has the label
  distribution of its training data; with `domains` it is of its domain, with
  `natural` it is the writer's own.

  Args:
    dataset: The dataset.
    split: One of `names.SPLIT_NAMES`.
    num_clients: Number of clients. None: with `domains` one for each
      domain, with `natural` one for each writer, otherwise 5.
    seed: Decides every random choice.
    classes_per_client: For `classes`; other splits ignore it.
    dirichlet_alpha: For `dirichlet`; other splits ignore it.
    gamma: For `gamma`; other splits ignore it.
    imbalance: For `unbalanced`; other splits ignore it.

  Returns:
    The split data. Clients are called `client_0`, ...; with `domains` after
    their domain, with `natural` after their writer.

  Raises:
    ValueError: If the split is unknown, lacks its argument, or can't be made of
      this dataset; the message names the argument.
  """
  if split not in names.SPLIT_NAMES:
    raise ValueError(
        f'split={split} is unknown; the splits are'
        f' {", ".join(names.SPLIT_NAMES)}.'
        f'{spelling.suggestion(split, names.SPLIT_NAMES)}'
    )
  labels = dataset.y_train
  if split == 'domains':
    return _split_by_domain(dataset, num_clients, seed)
  if split == 'natural':
    return _split_by_writer(dataset, num_clients, seed)
  if num_clients is None:
    num_clients = _DEFAULT_NUM_CLIENTS
  splits.check_num_clients(
      num_clients, len(labels), f'training samples in {dataset.name}'
  )
  match split:
    case 'iid':
      parts = splits.split_iid(len(labels), num_clients, seed)
    case 'classes':
      parts = splits.split_by_classes(
          labels,
          dataset.num_classes,
          num_clients,
          _required(split, 'classes_per_client', classes_per_client),
          seed,
      )
    case 'dirichlet':
      parts = splits.split_by_dirichlet(
          labels,
          num_clients,
          _required(split, 'dirichlet_alpha', dirichlet_alpha),
          seed,
      )
    case 'gamma':
      parts = splits.split_by_gamma_similarity(
          labels, num_clients, _required(split, 'gamma', gamma), seed
      )
    case 'unbalanced':
      parts = splits.split_unbalanced(
          len(labels),
          num_clients,
          _required(split, 'imbalance', imbalance),
          seed,
      )
  digits = len(str(num_clients - 1))
  client_ids = [f'client_{n:0{digits}}' for n in range(num_clients)]
  test_parts = splits.split_in_proportion(
      _label_counts(dataset, parts),
      dataset.y_test,
      seeding.generator(seeding.Stream.TEST_SETS, seed),
  )
  return _federated_data(dataset, client_ids, parts, test_parts)


def _split_by_domain(
    dataset: dataset_lib.Dataset, num_clients: Optional[int], seed: int
) -> FederatedData:
  """Splits so that each client has one domain."""
  if dataset.domain_train is None:
    raise ValueError(
        f'split=domains needs a dataset of several domains, but'
        f' dataset={dataset.name} has none; use dataset=digits_domains, or'
        ' another split.'
    )
  num_domains = len(dataset.domain_names)
  if num_clients is None:
    num_clients = num_domains
  splits.check_num_clients(
      num_clients,
      len(dataset.y_train),
      f'training samples in {dataset.name}',
  )
  parts = splits.split_by_domain(
      dataset.y_train, dataset.domain_train, num_domains, num_clients, seed
  )
  counts = _label_counts(dataset, parts)
  rng = seeding.generator(seeding.Stream.TEST_SETS, seed)
  test_parts = [None] * num_clients
  for domain in range(num_domains):
    members = np.flatnonzero(dataset.domain_test == domain)
    test_parts[domain::num_domains] = [
        members[indices]
        for indices in splits.split_in_proportion(
            counts[domain::num_domains], dataset.y_test[members], rng
        )
    ]
  client_ids = [
      dataset.domain_names[n % num_domains]
      + (f'_{n // num_domains}' if num_clients > num_domains else '')
      for n in range(num_clients)
  ]
  return _federated_data(dataset, client_ids, parts, test_parts)


def _split_by_writer(
    dataset: dataset_lib.Dataset, num_clients: Optional[int], seed: int
) -> FederatedData:
  """Splits so that each client is a writer."""
  if dataset.writer_train is None:
    raise ValueError(
        f'split=natural needs a dataset with writers, but'
        f' dataset={dataset.name} has none; use dataset=emnist, or another'
        ' split.'
    )
  num_writers = len(np.unique(dataset.writer_train))
  if num_clients is None:
    num_clients = num_writers
  splits.check_num_clients(
      num_clients, num_writers, f'writers in {dataset.name}'
  )
  parts = splits.split_by_writer(dataset.writer_train, num_clients, seed)
  writers = [dataset.writer_train[indices[0]] for indices in parts]
  test_parts = [
      np.flatnonzero(dataset.writer_test == writer) for writer in writers
  ]
  client_ids = [dataset.writer_names[writer] for writer in writers]
  return _federated_data(dataset, client_ids, parts, test_parts)


def _federated_data(
    dataset: dataset_lib.Dataset,
    client_ids: Sequence[str],
    parts: Sequence[np.ndarray],
    test_parts: Sequence[np.ndarray],
) -> FederatedData:
  return FederatedData(
      dataset,
      dict(zip(client_ids, parts)),
      dict(zip(client_ids, test_parts)),
  )


def _label_counts(
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


def _required(split: str, parameter: str, value: Optional[float]) -> float:
  if value is None:
    raise ValueError(f'split={split} needs `{parameter}`.')
  return value
