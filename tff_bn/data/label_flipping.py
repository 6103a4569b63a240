"""Label flipping: clients whose training labels are wrong on purpose.

Unlike the attacks of `tff_bn.aggregators.attacks`, the attackers train and send
what the algorithm asks for, on poisoned data.
"""

import dataclasses

import numpy as np

from tff_bn.data import federated


def flip_labels(labels: np.ndarray, num_classes: int) -> np.ndarray:
  """Exchanges the first class with the last, the second with the last but one.

  Reference:
    Allen-Zhu et al., Byzantine-Resilient Non-Convex Stochastic Gradient
    Descent, ICLR 2021.

  Args:
    labels: Classes, integers in `0..num_classes - 1`.
    num_classes: Number of classes.

  Returns:
    `num_classes - 1 - labels`, of the same shape and dtype.
  """
  return (num_classes - 1 - labels).astype(labels.dtype)


def with_flipped_labels(
    data: federated.FederatedData, num_clients: int
) -> federated.FederatedData:
  """Flips the training labels of the first clients.

  Test labels stay as they are, the clients' own ones too; `label_distribution`
  counts the labels that clients train on, the flipped ones.

  Args:
    data: The clients' data.
    num_clients: How many clients are attackers: the first of
      `data.client_ids`.

  Returns:
    Other data, without a recipe: that of `data` would make labels that are not
    flipped.

  Raises:
    ValueError: If `num_clients` is negative or more than there are, or if an
      attacker has a sample that a client with correct labels has too.
  """
  client_ids = data.client_ids
  if not 0 <= num_clients <= len(client_ids):
    raise ValueError(
        f'num_attackers={num_clients} must be between 0 and the number of'
        f' clients, {len(client_ids)}.'
    )
  flipped, correct = (
      np.unique(
          np.concatenate(
              [np.array([], int), *(data.train_indices[c] for c in clients)]
          )
      )
      for clients in (client_ids[:num_clients], client_ids[num_clients:])
  )
  shared = np.intersect1d(flipped, correct)
  if shared.size:
    raise ValueError(
        f'num_attackers={num_clients}: {shared.size} of the samples whose'
        ' labels would be flipped belong to other clients too, the first at'
        f' position {shared[0]}; flipping labels needs clients that share no'
        ' samples.'
    )
  dataset = data.dataset
  labels = dataset.y_train.copy()
  labels[flipped] = flip_labels(labels[flipped], dataset.num_classes)
  return dataclasses.replace(
      data, dataset=dataclasses.replace(dataset, y_train=labels), recipe=None
  )
