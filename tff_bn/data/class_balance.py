"""Balances the classes in the training data of clients."""

import dataclasses

import numpy as np

from tff_bn.catalog import tasks
from tff_bn.common import seeding
from tff_bn.data import federated


def class_counts(data: federated.FederatedData, client_id: str) -> np.ndarray:
  """Counts the training samples of each class of a client.

  Args:
    data: The clients' data, of a task with one class for each sample.
    client_id: The client.

  Returns:
    Integers of shape `[num_classes]`.

  Raises:
    ValueError: If samples have no single class, or the client is unknown.
  """
  if not tasks.has_sample_classes(data.task):
    raise ValueError(
        'Classes can be balanced only where each sample has one class, but the'
        f' task of dataset={data.dataset.name} is {data.task}.'
    )
  data.client_number(client_id)
  labels = data.dataset.y_train[data.train_indices[client_id]]
  return np.bincount(labels.reshape(-1), minlength=data.num_classes or 0)


def with_balanced_classes(
    data: federated.FederatedData, seed: int
) -> federated.FederatedData:
  """Repeats training samples until each class of a client is equally frequent.

  Statistics of the new data, such as those of batch normalization, count each
  class of a client alike, as in Balanced Batch Normalization (pFedBBN, Iftee et
  al. 2025, https://arxiv.org/abs/2511.18066). That paper predicts the classes;
  here, the labels are known. Classes that a client lacks stay missing.

  Each class gets as many samples as the largest one: each of its samples as
  often as possible, and a rest that the seed chooses among them.

  Args:
    data: The clients' data, of a task with one class for each sample.
    seed: Determines the rests, together with the client and the class.

  Returns:
    The data with other `train_indices`, and without a recipe.

  Raises:
    ValueError: If samples have no single class.
  """
  balanced = {}
  for number, (client_id, positions) in enumerate(data.train_indices.items()):
    largest = class_counts(data, client_id).max()
    labels = data.dataset.y_train[positions]
    parts = []
    for label in np.unique(labels):
      own = positions[labels == label]
      rng = seeding.generator(
          seeding.Stream.BALANCED_CLASSES, seed, number, int(label)
      )
      parts += [np.tile(own, largest // len(own))]
      parts += [rng.permutation(own)[: largest % len(own)]]
    balanced[client_id] = np.concatenate(parts)
  return dataclasses.replace(data, train_indices=balanced, recipe=None)
