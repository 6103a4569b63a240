"""Label flipping: attackers whose training labels are wrong on purpose.

Unlike in the attacks of `tff_bn.aggregators.attacks`, the attackers follow the
algorithm; only their data is poisoned.
"""

import dataclasses

import numpy as np

from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.data import attackers
from tff_bn.data import federated


def flip_labels(labels: np.ndarray, num_classes: int) -> np.ndarray:
  """Replaces each label y by `num_classes - 1 - y`.

  Reference:
    Allen-Zhu et al., Byzantine-Resilient Non-Convex Stochastic Gradient
    Descent, ICLR 2021.

  Args:
    labels: Classes, integers in `0..num_classes - 1`.
    num_classes: The number of classes.

  Returns:
    The flipped labels, of the same shape and dtype.

  Raises:
    TypeError: If the labels are not integers.
    ValueError: If a label is not a class, or there is no class.
  """
  value_types.POSITIVE_INTEGER.check('num_classes', num_classes)
  labels = np.asarray(labels)
  if labels.size and not np.issubdtype(labels.dtype, np.integer):
    raise TypeError(
        f'labels must be integers, but have the dtype {labels.dtype}.'
    )
  wrong = labels[(labels < 0) | (labels >= num_classes)]
  if wrong.size:
    raise ValueError(
        f'labels contain {wrong[0]}, but must be from 0 to {num_classes - 1},'
        f' because num_classes={num_classes}.'
    )
  return (num_classes - 1 - labels).astype(labels.dtype)


def with_flipped_labels(
    data: federated.FederatedData, num_attackers: int
) -> federated.FederatedData:
  """Flips the training labels of the first clients.

  Test labels do not change. `label_distribution` counts the flipped labels. Of
  samples with several labels, each label is flipped; of masks, each pixel.

  Args:
    data: The clients' data.
    num_attackers: The number of attackers, which are the first clients of
      `data.client_ids`.

  Returns:
    The data with flipped labels. It has no recipe, because the recipe of `data`
    does not flip labels.

  Raises:
    TypeError: If `data` is not `FederatedData`, or `num_attackers` no integer.
    ValueError: If `num_attackers` is negative or larger than the number of
      clients, if an attacker shares a sample with another client, or if the
      task is a regression, which has no labels to flip.
  """
  attackers.check_arguments(data, num_attackers)
  dataset = data.dataset
  num_classes = dataset.num_classes
  if num_classes is None:
    raise ValueError(
        f'dataset={dataset.name} has the task {dataset.task}, whose targets are'
        ' numbers; flipping labels needs classes.'
    )
  if dataset.task == tasks.MULTILABEL:
    num_classes = 2  # Each label is 0 or 1.
  flipped = attackers.training_samples(data, num_attackers, 'flipping labels')
  labels = dataset.y_train.copy()
  labels[flipped] = flip_labels(labels[flipped], num_classes)
  return dataclasses.replace(
      data, dataset=dataclasses.replace(dataset, y_train=labels), recipe=None
  )
