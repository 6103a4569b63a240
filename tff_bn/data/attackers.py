"""The samples of attackers who falsify their data."""

import numpy as np

from tff_bn.common import checks
from tff_bn.data import federated


def check_arguments(data: federated.FederatedData, num_attackers: int) -> None:
  """Checks the arguments of a function that falsifies data.

  Args:
    data: The clients' data.
    num_attackers: The number of attackers, which are the first clients of
      `data.client_ids`.

  Raises:
    TypeError: If `data` is not `FederatedData`, or `num_attackers` no integer.
    ValueError: If `num_attackers` is negative or larger than the number of
      clients.
  """
  checks.check_type(
      'data',
      data,
      federated.FederatedData,
      'be tff_bn.data.FederatedData, as split_dataset returns it',
  )
  checks.check_integer('num_attackers', num_attackers)
  if not 0 <= num_attackers <= len(data.client_ids):
    raise ValueError(
        f'num_attackers={num_attackers} must be between 0 and the number of'
        f' clients, {len(data.client_ids)}.'
    )


def training_samples(
    data: federated.FederatedData, num_attackers: int, change: str
) -> np.ndarray:
  """Returns the positions of the attackers' training samples.

  Args:
    data: See `check_arguments`.
    num_attackers: See `check_arguments`.
    change: What attackers do to the samples, for the error: a noun.

  Raises:
    ValueError: If an attacker shares a sample with another client.
  """
  client_ids = data.client_ids
  falsified, correct = (
      np.unique(
          np.concatenate(
              [np.array([], int), *(data.train_indices[c] for c in clients)]
          )
      )
      for clients in (client_ids[:num_attackers], client_ids[num_attackers:])
  )
  shared = np.intersect1d(falsified, correct)
  if shared.size:
    raise ValueError(
        f'num_attackers={num_attackers}: {shared.size} samples of the attackers'
        ' belong to other clients too, the first at position'
        f' {shared[0]}; {change} needs clients that share no samples.'
    )
  return falsified
