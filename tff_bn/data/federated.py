"""A dataset split over clients, and the batches that they train on."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
from typing import Any, Optional, Protocol

import numpy as np
import tensorflow as tf

from tff_bn.catalog import value_types
from tff_bn.common import batch_arrays
from tff_bn.common import checks
from tff_bn.common import seeding
from tff_bn.common import spelling
from tff_bn.data import augmentation as augmentation_lib
from tff_bn.data import batches
from tff_bn.data import client_scalings as client_scalings_lib
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import label_counts
from tff_bn.data import labels
from tff_bn.data import scaling as scaling_lib


def check_client_ids(client_ids: Iterable[str]) -> None:
  """Checks the ids of clients.

  Raises:
    TypeError: If an id is not a string.
    ValueError: If an id can't be encoded as UTF-8.
  """
  for client_id in client_ids:
    if not isinstance(client_id, str):
      raise TypeError(
          f'The client id {client_id!r} is of type {type(client_id).__name__};'
          f" client ids are strings, such as '{client_id}'."
      )
    if not checks.is_utf8(client_id):
      raise ValueError(
          f'The client id {client_id!r} cannot be encoded as UTF-8.'
      )


# The positions of clients' samples -> the part of the dataset that has these.
_SPLITS = {
    'train_indices': 'train',
    'test_indices': 'test',
    'validation_indices': 'train',
}


class Recipe(Protocol):
  """A picklable function that loads data. Equal recipes load equal data."""

  def __call__(self) -> 'FederatedData':
    """Loads the data."""

  def __hash__(self) -> int:
    """Returns the same number for equal recipes."""


@dataclasses.dataclass(frozen=True, eq=False)
class FederatedData:
  """A dataset and the positions of each client's samples.

  The constructor checks all positions and stores them as arrays.

  Attributes:
    dataset: The dataset.
    train_indices: Client id -> positions of its samples in the training data,
      at least one. The order of the ids is the order of the clients.
    test_indices: Client id -> positions of its samples in the test data,
      possibly none, for the same clients.
    recipe: Loads the same data in another process, possibly on another machine.
      Without a recipe, the data itself is sent there.
    augmentation: How training images are changed at random, a key of
      `tff_bn.data.augmentation.AUGMENTATIONS`.
    validation_indices: Client id -> positions in the training data of samples
      on which no client trains, for the choice of a round, see
      `with_validation`. Clients may have none.
    client_scalings: The scalings of the clients, at least of these ones; a
      model without a client uses `dataset.scaling`. Default: all images are
      scaled as `dataset.scaling` says.

  Raises:
    TypeError: If a client's id is not a string, or an argument has the wrong
      type.
    ValueError: If a client's id can't be encoded as UTF-8, if a client has no
      training data or no scaling, if a position does not exist, or if the
      augmentation is unknown or impossible.
  """

  dataset: dataset_lib.Dataset
  train_indices: Mapping[str, np.ndarray]
  test_indices: Mapping[str, np.ndarray]
  recipe: Optional[Recipe] = None
  augmentation: str = 'none'
  validation_indices: Mapping[str, np.ndarray] = dataclasses.field(
      default_factory=dict
  )
  client_scalings: Optional[client_scalings_lib.ClientScalings] = None

  def __post_init__(self):
    checks.check_type(
        'dataset',
        self.dataset,
        dataset_lib.Dataset,
        'be a tff_bn.data.Dataset, such as tff_bn.data.load_dataset(name)',
    )
    for name, split in _SPLITS.items():
      checks.check_type(
          name,
          getattr(self, name),
          Mapping,
          'map the id of each client to the positions of its samples',
      )
      indices = _positions(
          name, getattr(self, name), len(getattr(self.dataset, f'y_{split}'))
      )
      object.__setattr__(self, name, indices)
    check_client_ids(self.train_indices)
    for client_id, positions in self.train_indices.items():
      if not len(positions):
        raise ValueError(
            f'train_indices: the client {client_id!r} has no samples; each'
            ' client needs at least one.'
        )
    if self.train_indices.keys() != self.test_indices.keys():
      different = self.train_indices.keys() ^ self.test_indices.keys()
      raise ValueError(
          'train_indices and test_indices must have the same clients, but only'
          f' one of them has {sorted(different, key=repr)[0]!r}. A client'
          ' without test data has an empty list.'
      )
    unknown = self.validation_indices.keys() - self.train_indices.keys()
    if unknown:
      raise ValueError(
          'validation_indices has the client'
          f' {sorted(unknown, key=repr)[0]!r}, which train_indices has not.'
      )
    if self.client_scalings is not None:
      known = self.client_scalings.by_client
      unscaled = [c for c in self.train_indices if c not in known]
      if unscaled:
        raise ValueError(
            f'client_scalings has no scaling of the client {unscaled[0]!r}.'
        )
    augmentation_lib.check_augmentation(
        self.augmentation, self.dataset.name, self.dataset.input_shape
    )

  @functools.cached_property
  def client_ids(self) -> tuple[str, ...]:
    """The ids of all clients."""
    return tuple(self.train_indices)

  @property
  def task(self) -> str:
    """The dataset's task, a key of `tff_bn.catalog.tasks.TASKS`."""
    return self.dataset.task

  @property
  def num_outputs(self) -> int:
    """The number of outputs of a model, see `Dataset.num_outputs`."""
    return self.dataset.num_outputs

  @property
  def num_classes(self) -> Optional[int]:
    """The number of classes of the dataset; None for a regression."""
    return self.dataset.num_classes

  @property
  def class_names(self) -> tuple[str, ...]:
    """The names of the classes; empty if they have numbers only."""
    return self.dataset.class_names

  @functools.cached_property
  def element_spec(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """The type of a batch (x, y): x is float32 `[None, ...]`.

    `tff_bn.data.labels.label_spec` gives the type of y: int32 `[None]` for
    classes.
    """
    return (
        tf.TensorSpec((None, *self.dataset.input_shape), tf.float32),
        labels.label_spec(
            self.task, self.dataset.input_shape, self.num_outputs
        ),
    )

  def client_number(self, client_id: str) -> int:
    """Returns a client's position in `client_ids`.

    Raises:
      ValueError: If the client is unknown.
    """
    try:
      return self._client_numbers[client_id]
    except KeyError:
      raise ValueError(f'There is no client {client_id!r}.') from None

  def client_dataset(
      self,
      client_ids: Sequence[str],
      *,
      seed: int,
      round_num: int,
      batch_size: int,
      local_steps: Optional[int] = None,
      local_epochs: Optional[int] = None,
      augment: bool = True,
  ) -> tf.data.Dataset:
    """Builds the dataset on which a client trains in a round.

    The same arguments give the same batches in the same order. The dataset
    stores only the samples that occur in it, each once.

    Args:
      client_ids: The client. Several clients are treated as one that has the
        union of their samples.
      seed: Determines the order of the samples and their augmentation, together
        with the clients and the round.
      round_num: The round, not negative.
      batch_size: The number of samples in a batch.
      local_steps: The number of full batches. The samples are shuffled again
        for each pass over them.
      local_epochs: The number of passes over the samples, each shuffled again.
        The last batch of a pass may be smaller. Give either `local_steps` or
        `local_epochs`.
      augment: Whether images are augmented as `augmentation` says, and scaled
        as random clients' if `client_scalings` says so. Otherwise, the scaling
        is the client's; with several clients, it is `dataset.scaling`.

    Returns:
      A dataset of batches of the type `element_spec`.

    Raises:
      ValueError: If a client is unknown, if a number is less than 1, or unless
        exactly one of `local_steps` and `local_epochs` is given.
    """
    return self.client_batches(
        client_ids,
        seed=seed,
        round_num=round_num,
        batch_size=batch_size,
        local_steps=local_steps,
        local_epochs=local_epochs,
        augment=augment,
    ).dataset(self.dataset.x_train, self.dataset.y_train, self.dataset.scaling)

  def client_batches(
      self,
      client_ids: Sequence[str],
      *,
      seed: int,
      round_num: int,
      batch_size: int,
      local_steps: Optional[int] = None,
      local_epochs: Optional[int] = None,
      augment: bool = True,
  ) -> batches.Batches:
    """Returns the batches of `client_dataset`, without the samples.

    The arguments and errors are the same as for `client_dataset`.
    """
    checks.check_integer('seed', seed)
    value_types.COUNT.check('round_num', round_num)
    value_types.POSITIVE_INTEGER.check('batch_size', batch_size)
    if not client_ids:
      raise ValueError('client_ids is empty; give at least one client.')
    if isinstance(client_ids, str):
      raise TypeError(
          'client_ids must be a list of ids, but is a single one; use'
          f' [{client_ids!r}].'
      )
    clients = [self.client_number(client_id) for client_id in client_ids]
    samples = np.concatenate(
        [self.train_indices[client_id] for client_id in client_ids]
    )
    rng = seeding.generator(seeding.Stream.BATCHES, seed, round_num, *clients)
    if local_epochs is not None and local_steps is None:
      value_types.POSITIVE_INTEGER.check('local_epochs', local_epochs)
      passes = [rng.permutation(samples) for _ in range(local_epochs)]
    elif local_steps is not None and local_epochs is None:
      value_types.POSITIVE_INTEGER.check('local_steps', local_steps)
      length = local_steps * batch_size
      order = np.concatenate(
          [rng.permutation(samples) for _ in range(-(-length // len(samples)))]
      )
      passes = [order[:length]]
    else:
      raise ValueError(
          f'local_steps={local_steps} and local_epochs={local_epochs}: give'
          ' exactly one of the two.'
      )
    transforms = None
    scaling = None
    if len(client_ids) == 1:
      scaling = self._own_scaling(client_ids[0])
    num_images = sum(map(len, passes))
    if augment:
      # A generator takes as long as the rest, which matters for small clients.
      if self.augmentation != 'none':
        transforms = augmentation_lib.draw_transforms(
            self.augmentation,
            num_images,
            self.dataset.input_shape,
            seeding.generator(
                seeding.Stream.AUGMENTATION, seed, round_num, *clients
            ),
        )
      if self.client_scalings is not None and self.client_scalings.are_drawn:
        rng = seeding.generator(
            seeding.Stream.CLIENT_SCALINGS, seed, round_num, *clients
        )
        scaling = self.client_scalings.draw(num_images, rng)
    return batches.Batches(passes, batch_size, transforms, scaling)

  def hold_out(
      self, client_ids: Sequence[str]
  ) -> tuple['FederatedData', 'FederatedData']:
    """Separates clients from the others.

    Args:
      client_ids: The clients.

    Returns:
      The data of the other clients, and the data of these clients, both in the
      old order and without a recipe. The dataset remains the same.

    Raises:
      ValueError: If a client is unknown, or no other client is left.
    """
    unknown = [c for c in client_ids if c not in self._client_numbers]
    if unknown:
      raise ValueError(
          f'held_out_clients={",".join(client_ids)}: there is no client'
          f' {unknown[0]}. The {len(self.client_ids)} clients are'
          f' {spelling.name_some(self.client_ids)}.'
          f'{spelling.suggestion(unknown[0], self.client_ids, are_given=True)}'
      )
    held_out = set(client_ids)
    if len(held_out) == len(self.client_ids):
      raise ValueError(
          f'held_out_clients={",".join(client_ids)} leaves no client for'
          ' training.'
      )

    def only(are_held_out: bool) -> 'FederatedData':
      kept = [c for c in self.client_ids if (c in held_out) is are_held_out]
      indices: dict[str, Any] = {
          name: {c: found[c] for c in kept if c in found}
          for name in _SPLITS
          for found in [getattr(self, name)]
      }
      return dataclasses.replace(
          self,
          **indices,
          recipe=None,
      )

    return only(False), only(True)

  def with_validation(self, share: float, seed: int) -> 'FederatedData':
    """Sets a part of each client's training data apart, for validation.

    No client trains on a sample that another one validates on. If clients share
    samples, their shares can therefore differ from the given one.

    Args:
      share: The share of each client's samples, between 0 and 1. It is rounded
        to whole samples; a client with a single sample has no validation data.
      seed: Determines the samples, together with the client.

    Returns:
      The data, with `validation_indices` and without a recipe.

    Raises:
      ValueError: If the share is not between 0 and 1, if there is validation
        data already, or if a client would have no training data.
    """
    value_types.PART.check('share', share)
    if self.validation_indices:
      raise ValueError('The data has validation_indices already.')
    is_known: np.ndarray = np.zeros(len(self.dataset.y_train), bool)
    is_chosen = np.zeros_like(is_known)
    for number, positions in enumerate(self.train_indices.values()):
      own = np.unique(positions)
      wanted = min(round(share * len(own)), len(own) - 1)
      free = own[~is_known[own]]
      missing = max(0, wanted - np.count_nonzero(is_chosen[own]))
      rng = seeding.generator(seeding.Stream.VALIDATION, seed, number)
      is_chosen[rng.permutation(free)[:missing]] = True
      is_known[own] = True
    train, validation = {}, {}
    for client_id, positions in self.train_indices.items():
      chosen = is_chosen[positions]
      if chosen.all():
        raise ValueError(
            f'share={share} leaves the client {client_id!r} no training data,'
            ' because it shares all its samples with others.'
        )
      train[client_id] = positions[~chosen]
      validation[client_id] = np.unique(positions[chosen])
    if not is_chosen.any():
      raise ValueError(
          f'share={share} leaves no validation data: the largest client has'
          f' {max(map(len, self.train_indices.values()))} samples.'
      )
    return dataclasses.replace(
        self, train_indices=train, validation_indices=validation, recipe=None
    )

  def scaled(self, name: str) -> 'FederatedData':
    """Returns the data with scaled pixels or features.

    Args:
      name: A key of `tff_bn.data.scaling.PIXEL_SCALINGS`. `standardized` takes
        its means and deviations from the training data of these clients, and
        `random_client` computes `client_scalings` from it.

    Returns:
      The data, with the same recipe.

    Raises:
      ValueError: See `tff_bn.data.scaling.pixel_scaling`.
    """
    if name == scaling_lib.RANDOM_CLIENT:
      return self.with_client_scalings({}, are_drawn=True)
    used = np.unique(np.concatenate(list(self.train_indices.values())))
    return self.with_scaling(
        scaling_lib.pixel_scaling(name, self.dataset, used)
    )

  def with_scaling(
      self, scaling: Optional[dataset_lib.Scaling]
  ) -> 'FederatedData':
    """Returns the data with another scaling of its pixels."""
    dataset = self.dataset.unchecked(scaling=scaling)
    return dataclasses.replace(self, dataset=dataset)

  def with_client_scalings(
      self,
      known: Mapping[str, dataset_lib.Scaling],
      *,
      are_drawn: bool,
      default: Optional[dataset_lib.Scaling] = None,
  ) -> 'FederatedData':
    """Returns the data with a scaling for each client (FedRDN).

    Args:
      known: Scalings by client. The other clients' are computed from their
        training data.
      are_drawn: Whether training draws a client's scaling for each image.
      default: The scaling for a model without a client. Default: the mean over
        these clients.

    Raises:
      ValueError: If the samples are no images, or a channel is constant in each
        image of a client.
    """
    scalings = client_scalings_lib.ClientScalings(
        {
            client_id: known.get(client_id)
            or scaling_lib.image_scaling(self.dataset, positions)
            for client_id, positions in self.train_indices.items()
        },
        are_drawn,
    )
    return dataclasses.replace(
        self.with_scaling(default or scalings.mean()), client_scalings=scalings
    )

  def test_dataset(
      self, batch_size: int, client_id: Optional[str] = None
  ) -> tf.data.Dataset:
    """Builds a dataset of the whole test data in its order.

    Args:
      batch_size: The number of samples in a batch. The last may be smaller.
      client_id: The client whose scaling is used. Default: `dataset.scaling`.

    Returns:
      A dataset of batches of the type `element_spec`.
    """
    return self._in_order(
        'test', np.arange(len(self.dataset.y_test)), batch_size, client_id
    )

  def client_test_dataset(
      self, client_id: str, batch_size: int
  ) -> tf.data.Dataset:
    """Builds a dataset of a client's own test data.

    Args:
      client_id: The client.
      batch_size: The number of samples in a batch. The last may be smaller.

    Returns:
      A dataset of batches of the type `element_spec`, empty if the client has
      no test data.

    Raises:
      ValueError: If the client is unknown.
    """
    self.client_number(client_id)
    return self._in_order(
        'test', self.test_indices[client_id], batch_size, client_id
    )

  def lazy_client_test_dataset(
      self, client_id: str, batch_size: int
  ) -> batch_arrays.LazyDataset:
    """Returns `client_test_dataset`, built only if it is needed."""
    self.client_number(client_id)
    return self.lazy_test_dataset(
        self.test_indices[client_id], batch_size, client_id
    )

  def lazy_test_dataset(
      self,
      positions: np.ndarray,
      batch_size: int,
      client_id: Optional[str] = None,
  ) -> batch_arrays.LazyDataset:
    """Returns a dataset of some of the test data, built only if it is needed.

    `tff_bn.training.evaluation.Evaluator` needs it for many samples only.

    Args:
      positions: The positions of the samples in the test data.
      batch_size: The number of samples in a batch. The last may be smaller.
      client_id: The client whose scaling is used. Default: `dataset.scaling`.
    """
    value_types.POSITIVE_INTEGER.check('batch_size', batch_size)
    found = batches.Batches(
        [positions], batch_size, scaling=self._own_scaling(client_id)
    )
    arrays = found.to_arrays(
        self.dataset.x_test, self.dataset.y_test, self.dataset.scaling
    )
    assert arrays is not None  # Test data is not augmented.
    return batch_arrays.LazyDataset(
        self.element_spec,
        arrays,
        functools.partial(
            self._in_order, 'test', positions, batch_size, client_id
        ),
    )

  def client_validation_dataset(
      self, client_id: str, batch_size: int
  ) -> tf.data.Dataset:
    """Builds a dataset of a client's validation data, like its test data."""
    self.client_number(client_id)
    return self._in_order(
        'train',
        self.validation_indices.get(client_id, np.zeros(0, np.int64)),
        batch_size,
        client_id,
    )

  def fingerprint(self) -> str:
    """Returns a hexadecimal hash of all samples, clients and their order."""
    return self._fingerprint

  @functools.cached_property
  def _fingerprint(self) -> str:
    digest = hashlib.sha256(self.dataset.fingerprint().encode())
    for indices_of in (getattr(self, name) for name in _SPLITS):
      for client_id, indices in indices_of.items():
        name = client_id.encode()
        digest.update(f'{len(name)},{len(indices)};'.encode() + name)
        digest.update(np.ascontiguousarray(indices, np.int64))
    if self.augmentation != 'none':
      digest.update(self.augmentation.encode())
    if self.client_scalings is not None:
      scalings = self.client_scalings
      digest.update(f'{scalings.are_drawn} {scalings.to_json()}'.encode())
    return digest.hexdigest()

  def label_distribution(self) -> np.ndarray:
    """Counts each client's training samples of each class.

    Returns:
      Integers of shape `[num_clients, num_columns]`, whose columns have the
      names `label_names`. The columns are the classes; for a multi-label task,
      the labels, which count the samples that have them; for a segmentation,
      the classes, which count pixels; for a regression, ten ranges of the first
      target, of equal width, which cover the whole training data.
    """
    return label_counts.count(self.dataset, self.train_indices.values())

  @property
  def label_names(self) -> tuple[str, ...]:
    """The names of the columns of `label_distribution`.

    They are the names or the numbers of the classes or labels; for a
    regression, ranges such as '0.5 to 1'.
    """
    return label_counts.column_names(self.dataset)

  def class_counts(self) -> np.ndarray:
    """Counts the training samples, or pixels, of each class over all clients.

    Returns:
      Integers of shape `[num_classes]`. For a multi-label task, they are the
      samples that have each label.

    Raises:
      ValueError: If the task is a regression, which has no classes.
    """
    if self.num_classes is None:
      raise ValueError(
          f'dataset={self.dataset.name} has no classes, because its task is'
          f' {self.task}.'
      )
    return self.label_distribution().sum(axis=0)

  @functools.cached_property
  def _client_numbers(self) -> dict[str, int]:
    return {client_id: n for n, client_id in enumerate(self.client_ids)}

  def _own_scaling(
      self, client_id: Optional[str]
  ) -> Optional[dataset_lib.Scaling]:
    """Returns the scaling of a client; None: it is the dataset's."""
    if client_id is None or self.client_scalings is None:
      return None
    return self.client_scalings.by_client[client_id]

  def _in_order(
      self,
      split: str,
      indices: np.ndarray,
      batch_size: int,
      client_id: Optional[str],
  ) -> tf.data.Dataset:
    """Returns batches of samples of the dataset's part `split`."""
    value_types.POSITIVE_INTEGER.check('batch_size', batch_size)
    scaling = self._own_scaling(client_id)
    return batches.Batches([indices], batch_size, scaling=scaling).dataset(
        getattr(self.dataset, f'x_{split}'),
        getattr(self.dataset, f'y_{split}'),
        self.dataset.scaling,
    )


def _positions(
    name: str, indices: Mapping[str, Any], num_samples: int
) -> dict[str, np.ndarray]:
  """Checks the positions of the clients' samples and returns them as arrays."""
  arrays = {}
  for client_id, values in indices.items():
    array = np.asarray(values)
    if not array.size:
      array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in 'iu':
      raise TypeError(
          f'{name}: the positions of the client {client_id!r} must be a list of'
          f' integers, but have the dtype {array.dtype} and the shape'
          f' {array.shape}.'
      )
    arrays[client_id] = array
  joined = np.concatenate([np.zeros(0, np.int64), *arrays.values()])
  if joined.size and not 0 <= joined.min() <= joined.max() < num_samples:
    wrong = next(
        client_id
        for client_id, array in arrays.items()
        if array.size and not 0 <= array.min() <= array.max() < num_samples
    )
    raise ValueError(
        f'{name}: the client {wrong!r} has positions from {arrays[wrong].min()}'
        f' to {arrays[wrong].max()}, but the dataset has {num_samples} samples,'
        ' whose positions count from 0.'
    )
  return arrays
