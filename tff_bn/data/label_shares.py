"""Shares of classes, and the check of the number of clients, for splits."""

from typing import Optional

import numpy as np


def check_num_clients(
    num_clients: int, most: Optional[int] = None, what: str = ''
) -> None:
  """Checks the number of clients.

  Args:
    num_clients: The number of clients.
    most: The largest possible number. Default: any.
    what: The noun that `most` counts in the error, such as 'writers in emnist'.

  Raises:
    ValueError: If the number is less than 1 or more than `most`.
  """
  if num_clients < 1:
    raise ValueError(f'num_clients={num_clients} is too small; use at least 1.')
  if most is not None and num_clients > most:
    raise ValueError(
        f'num_clients={num_clients} asks for more clients than the {most}'
        f' {what}; use at most {most}.'
    )


def deal_by_label(
    labels: np.ndarray, num_parts: int, rng: np.random.Generator
) -> list[np.ndarray]:
  """Splits samples into parts with the same size and label distribution.

  Returns each part's indices. Sizes differ by at most 1, in each class too.
  """
  shuffled = rng.permutation(len(labels))
  order = shuffled[np.argsort(labels[shuffled], kind='stable')]
  return [np.sort(order[part::num_parts]) for part in range(num_parts)]


def split_in_proportion(
    counts: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
  """Splits samples so that clients get the label distribution of their counts.

  Args:
    counts: The number of samples of each class that each client already has,
      integers of shape `[num_clients, num_classes]`.
    labels: The classes of the samples to split, integers of shape `[n]`.
    rng: Determines each client's samples.

  Returns:
    Each client's indices. Classes of which no client has a sample are left out.
  """
  parts: list[list[np.ndarray]] = [[] for _ in counts]
  for label in np.flatnonzero(counts.sum(axis=0)):
    pool = rng.permutation(np.flatnonzero(labels == label))
    sizes = apportion(len(pool), counts[:, label], rng)
    for part, samples in zip(parts, np.split(pool, np.cumsum(sizes)[:-1])):
      part.append(samples)
  return [np.sort(np.concatenate(part)) for part in parts]


def apportion(
    total: int, weights: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
  """Divides a number into whole numbers that are proportional to weights.

  Args:
    total: The number, at least 0.
    weights: The weights, not negative and not all 0, of shape `[n]`.
    rng: Decides which of equal remainders are rounded up.

  Returns:
    Integers of shape `[n]` with the sum `total`.
  """
  exact = total * (weights / weights.sum())
  sizes = np.floor(exact).astype(int)
  # The largest remainders are rounded up, equal ones in random order.
  order = np.lexsort((rng.random(len(weights)), sizes - exact))
  sizes[order[: total - sizes.sum()]] += 1
  return sizes
