"""How samples are split over clients: pure functions of labels and a seed.

Every function returns one array of indices for each client, in increasing
order. The clients' indices are disjoint, depend on the arguments alone, and
together are all samples, but for `split_by_classes` (which equalises the sizes)
and `split_by_writer` (which may leave out writers). A request that can't be met
is a `ValueError` that names the flag.
"""

from collections.abc import Callable, Mapping
import dataclasses
import heapq
import math
from typing import Any, Optional

import numpy as np

from tff_bn.data import seeding


def check_num_clients(num_clients: int, most: int, what: str):
  """Checks the number of clients.

  Args:
    num_clients: Number of clients asked for.
    most: The most there can be.
    what: What there are `most` of, for the error: 'writers in emnist'.

  Raises:
    ValueError: If the number is less than 1 or more than `most`.
  """
  if num_clients < 1:
    raise ValueError(f'num_clients={num_clients} is too small; use at least 1.')
  if num_clients > most:
    raise ValueError(
        f'num_clients={num_clients} asks for more clients than the {most}'
        f' {what}; use at most {most}.'
    )


def split_iid(
    num_samples: int, num_clients: int, seed: int
) -> list[np.ndarray]:
  """Deals the shuffled samples to the clients.

  Args:
    num_samples: Number of samples.
    num_clients: Number of clients.
    seed: Decides who gets what.

  Returns:
    Each client's indices; sizes differ by at most 1.

  Raises:
    ValueError: If there are more clients than samples, or none.
  """
  check_num_clients(num_clients, num_samples, 'training samples')
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  return _sorted(np.array_split(rng.permutation(num_samples), num_clients))


def split_by_classes(
    labels: np.ndarray,
    num_classes: int,
    num_clients: int,
    classes_per_client: int,
    seed: int,
) -> list[np.ndarray]:
  """Gives each client some consecutive classes (FedTAN, Appendix D).

  Client k = 0, 1, ... has `classes_per_client` classes from class k·s on, where
  the last class is followed by the first. The stride s is 2, or a fifth of the
  classes if there are more than ten, so that five clients go round once; but
  never more than `classes_per_client`, so that no class is left out.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    num_classes: Number of classes.
    num_clients: Number of clients.
    classes_per_client: Number of classes that each client has.
    seed: Decides which of a class's samples a client gets.

  Returns:
    Each client's indices: the same number of samples of each of its classes for
    every client, as many as the scarcest class allows; the rest is not used.

  Raises:
    ValueError: If `classes_per_client` is not in 1..`num_classes`, or if a
      class has fewer samples than clients.
  """
  check_num_clients(num_clients, len(labels), 'training samples')
  if not 1 <= classes_per_client <= num_classes:
    raise ValueError(
        f'classes_per_client={classes_per_client} must be between 1 and the'
        f' number of classes, {num_classes}.'
    )
  stride = min(classes_per_client, max(2, num_classes // 5))
  starts = stride * np.arange(num_clients)[:, np.newaxis]
  # held[client] are the client's classes.
  held = (starts + np.arange(classes_per_client)) % num_classes
  num_holders = np.bincount(held.ravel(), minlength=num_classes)
  num_samples = np.bincount(labels, minlength=num_classes)
  used = np.flatnonzero(num_holders)
  shares = num_samples[used] // num_holders[used]
  scarcest = used[np.argmin(shares)]
  share = shares.min()
  if share == 0:
    raise ValueError(
        f'num_clients={num_clients} with'
        f' classes_per_client={classes_per_client} gives class {scarcest} to'
        f' {num_holders[scarcest]} clients, but it has'
        f' {num_samples[scarcest]} training samples; use fewer clients or'
        ' another split.'
    )
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  parts = [[] for _ in range(num_clients)]
  for label in used:
    pool = rng.permutation(np.flatnonzero(labels == label))
    holders = np.flatnonzero((held == label).any(axis=1))
    for number, client in enumerate(holders):
      parts[client].append(pool[number * share : (number + 1) * share])
  return _sorted([np.concatenate(part) for part in parts])


def split_by_dirichlet(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int
) -> list[np.ndarray]:
  """Splits each class in shares drawn from a Dirichlet distribution.

  The shares of each class are Dir(α, ..., α) over the clients: small α gives
  each class to few clients, large α to all alike. A client that would have
  nothing gets a sample of the client that has most.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    num_clients: Number of clients.
    alpha: The concentration α > 0.
    seed: Decides the shares, and who gets what.

  Returns:
    Each client's indices, at least one.

  Raises:
    ValueError: If α is not positive or not finite, or if there are more clients
      than samples, or none.
  """
  check_num_clients(num_clients, len(labels), 'training samples')
  if not (alpha > 0 and math.isfinite(alpha)):
    raise ValueError(
        f'dirichlet_alpha={alpha} must be a finite number greater than 0.'
    )
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  parts = [[] for _ in range(num_clients)]
  for label in np.unique(labels):
    pool = rng.permutation(np.flatnonzero(labels == label))
    cumulative = np.cumsum(_dirichlet(alpha, num_clients, rng))
    cuts = np.round(cumulative[:-1] * len(pool)).astype(int)
    for part, samples in zip(parts, np.split(pool, cuts)):
      part.append(samples)
  parts = [np.concatenate(part) for part in parts]
  # The largest part first; if two are equal, the first client's.
  by_size = [(-part.size, client) for client, part in enumerate(parts)]
  heapq.heapify(by_size)
  for client, part in enumerate(parts):
    if not part.size:
      _, largest = by_size[0]
      taken = rng.integers(parts[largest].size)
      parts[client] = parts[largest][taken : taken + 1]
      parts[largest] = np.delete(parts[largest], taken)
      heapq.heapreplace(by_size, (-parts[largest].size, largest))
  return _sorted(parts)


def _dirichlet(alpha: float, size: int, rng: np.random.Generator) -> np.ndarray:
  """A draw from Dir(alpha, ..., alpha) for any positive alpha.

  NumPy's own never returns for an alpha of 1e-12. This one works with
  logarithms: G·U^(1/α) has the distribution Gamma(α) if G has Gamma(α + 1) and
  U is uniform (Marsaglia and Tsang 2000).
  """
  log_gamma = np.log(rng.standard_gamma(alpha + 1, size))
  log_gamma += np.log1p(-rng.random(size)) / alpha
  shares = np.exp(log_gamma - log_gamma.max())
  return shares / shares.sum()


def split_by_gamma_similarity(
    labels: np.ndarray, num_clients: int, gamma: float, seed: int
) -> list[np.ndarray]:
  """Splits with γ-similarity (FBN paper, Appendix C.1).

  A share γ of all samples is drawn at random and dealt to the clients evenly;
  the others are sorted by class and cut into as many chunks as there are
  clients. γ = 1 is IID; with γ = 0 each client has few classes.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    num_clients: Number of clients.
    gamma: The share γ in [0, 1].
    seed: Decides who gets what.

  Returns:
    Each client's indices; sizes differ by at most 1.

  Raises:
    ValueError: If γ is outside [0, 1], or if there are more clients than
      samples, or none.
  """
  check_num_clients(num_clients, len(labels), 'training samples')
  if not 0 <= gamma <= 1:
    raise ValueError(f'gamma={gamma} must be between 0 and 1.')
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  order = rng.permutation(len(labels))
  homogeneous, rest = np.split(order, [round(gamma * len(labels))])
  rest = rest[np.argsort(labels[rest], kind='stable')]
  # The greater parts come first in one and last in the other, so that no client
  # has two of them unless all have one.
  return _sorted(
      [
          np.concatenate(parts)
          for parts in zip(
              np.array_split(rest, num_clients),
              reversed(np.array_split(homogeneous, num_clients)),
          )
      ]
  )


def split_by_domain(
    labels: np.ndarray,
    domains: np.ndarray,
    num_domains: int,
    num_clients: int,
    seed: int,
) -> list[np.ndarray]:
  """Gives each client data of one domain (FedBN, section 5.1).

  Client i has data of domain i mod `num_domains`, so that every `num_domains`
  clients add one of each domain.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    domains: The samples' domains, integers of shape `[n]`.
    num_domains: Number of domains.
    num_clients: Number of clients, a multiple of `num_domains`.
    seed: Decides who gets what.

  Returns:
    Each client's indices. The clients of a domain have the same size and label
    distribution, up to one sample.

  Raises:
    ValueError: If the number of clients is no multiple of the number of
      domains, or if a domain has more clients than samples.
  """
  check_num_clients(num_clients, len(labels), 'training samples')
  if num_clients % num_domains:
    raise ValueError(
        f'num_clients={num_clients} is no multiple of the {num_domains}'
        ' domains; split=domains gives each domain to the same number of'
        ' clients.'
    )
  per_domain = num_clients // num_domains
  smallest = np.bincount(domains, minlength=num_domains).min()
  if smallest < per_domain:
    raise ValueError(
        f'num_clients={num_clients} gives each domain to {per_domain}'
        f' clients, but the smallest domain has {smallest} training samples;'
        f' use at most {smallest * num_domains}.'
    )
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  parts: list[Optional[np.ndarray]] = [None] * num_clients
  for domain in range(num_domains):
    members = np.flatnonzero(domains == domain)
    dealt = deal_by_label(labels[members], per_domain, rng)
    parts[domain::num_domains] = [members[indices] for indices in dealt]
  return _sorted(parts)


def split_unbalanced(
    num_samples: int, num_clients: int, imbalance: float, seed: int
) -> list[np.ndarray]:
  """Deals the shuffled samples to clients of different sizes.

  Args:
    num_samples: Number of samples.
    num_clients: Number of clients.
    imbalance: Standard deviation of the sizes' logarithm: the sizes beyond the
      first sample are proportional to draws from a log-normal distribution. 0
      gives equal sizes.
    seed: Decides the sizes, and who gets what.

  Returns:
    Each client's indices, at least one.

  Raises:
    ValueError: If the imbalance is negative or not finite, or if there are more
      clients than samples, or none.
  """
  check_num_clients(num_clients, num_samples, 'training samples')
  if not (imbalance >= 0 and math.isfinite(imbalance)):
    raise ValueError(
        f'imbalance={imbalance} must be a finite number, at least 0.'
    )
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  normal = rng.standard_normal(num_clients)
  # Relative to the greatest: the exponential never overflows.
  weights = np.exp(imbalance * (normal - normal.max()))
  sizes = 1 + _apportion(num_samples - num_clients, weights, rng)
  order = rng.permutation(num_samples)
  return _sorted(np.split(order, np.cumsum(sizes)[:-1]))


def split_by_writer(
    writers: np.ndarray, num_clients: int, seed: int
) -> list[np.ndarray]:
  """Makes each client a writer.

  Args:
    writers: The samples' writers, integers of shape `[n]`.
    num_clients: Number of clients.
    seed: Decides which writers are taken if there are more than clients.

  Returns:
    Each client's indices: all samples of one writer. The writers come in
    increasing order.

  Raises:
    ValueError: If there are more clients than writers, or none.
  """
  present = np.unique(writers)
  check_num_clients(num_clients, len(present), 'writers')
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  chosen = np.sort(rng.choice(present, num_clients, replace=False))
  # One sort for all writers rather than a pass over the data for each.
  order = np.argsort(writers, kind='stable')
  starts = np.searchsorted(writers[order], chosen, side='left')
  ends = np.searchsorted(writers[order], chosen, side='right')
  return [order[start:end] for start, end in zip(starts, ends)]


def deal_by_label(
    labels: np.ndarray, num_parts: int, rng: np.random.Generator
) -> list[np.ndarray]:
  """Deals samples so that all parts have the same size and label distribution.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    num_parts: Number of parts.
    rng: Decides which of a class's samples a part gets.

  Returns:
    Each part's indices. Sizes differ by at most 1, in each class too.
  """
  shuffled = rng.permutation(len(labels))
  order = shuffled[np.argsort(labels[shuffled], kind='stable')]
  return _sorted([order[part::num_parts] for part in range(num_parts)])


def split_in_proportion(
    counts: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
  """Splits each class in proportion to what the clients have of it already.

  So the clients get test data with the label distribution of their training
  data.

  Args:
    counts: The clients' training samples of each class, integers of shape
      `[num_clients, num_classes]`.
    labels: The classes of the samples to be split, integers of shape `[n]`.
    rng: Decides who gets what.

  Returns:
    Each client's indices; disjoint. Samples of a class that no client has are
    left out.
  """
  parts = [[] for _ in counts]
  for label in np.flatnonzero(counts.sum(axis=0)):
    pool = rng.permutation(np.flatnonzero(labels == label))
    sizes = _apportion(len(pool), counts[:, label], rng)
    for part, samples in zip(parts, np.split(pool, np.cumsum(sizes)[:-1])):
      part.append(samples)
  return _sorted([np.concatenate(part) for part in parts])


def _apportion(
    total: int, weights: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
  """Whole numbers that sum to `total`, nearest to proportional to `weights`."""
  exact = total * (weights / weights.sum())
  sizes = np.floor(exact).astype(int)
  # The largest remainders are rounded up, equal ones in random order.
  order = np.lexsort((rng.random(len(weights)), sizes - exact))
  sizes[order[: total - sizes.sum()]] += 1
  return sizes


def _sorted(parts: list[np.ndarray]) -> list[np.ndarray]:
  return [np.sort(part) for part in parts]


@dataclasses.dataclass(frozen=True)
class Split:
  """A way to split the training data over the clients.

  Attributes:
    description: The way, in a few words; a parameter is between backquotes.
    make: Returns each client's indices from the labels, the number of classes,
      the number of clients, the seed and the parameter (or None). None: the
      dataset says which sample belongs to which client.
    parameter: The name of the parameter of `split_dataset` that the split
      needs, if any.
    client: What a client is, if the dataset decides how many there are.
  """

  description: str
  make: Optional[
      Callable[[np.ndarray, int, int, int, Any], list[np.ndarray]]
  ] = None
  parameter: Optional[str] = None
  client: Optional[str] = None


# The splits by name. `split_dataset` and the programs find added entries too.
SPLITS: dict[str, Split] = {
    'iid': Split(
        'evenly at random',
        lambda labels, _, num_clients, seed, __: split_iid(
            len(labels), num_clients, seed
        ),
    ),
    'classes': Split(
        '`classes_per_client` consecutive classes for each client, the same'
        ' number of samples for all (FedTAN, Appendix D)',
        lambda labels, num_classes, num_clients, seed, value: split_by_classes(
            labels, num_classes, num_clients, value, seed
        ),
        parameter='classes_per_client',
    ),
    'dirichlet': Split(
        'shares of each class drawn from a Dirichlet distribution with'
        ' concentration `dirichlet_alpha`',
        lambda labels, _, num_clients, seed, value: split_by_dirichlet(
            labels, num_clients, value, seed
        ),
        parameter='dirichlet_alpha',
    ),
    'gamma': Split(
        "a share `gamma` of each client's data at random, the rest sorted by"
        ' class (gamma-similarity)',
        lambda labels, _, num_clients, seed, value: split_by_gamma_similarity(
            labels, num_clients, value, seed
        ),
        parameter='gamma',
    ),
    'domains': Split(
        'each client has data of one domain (feature shift)', client='domain'
    ),
    'unbalanced': Split(
        'at random, sizes log-normal with standard deviation `imbalance` of'
        ' their logarithm',
        lambda labels, _, num_clients, seed, value: split_unbalanced(
            len(labels), num_clients, value, seed
        ),
        parameter='imbalance',
    ),
    'natural': Split('each client is a writer of the dataset', client='writer'),
}

# Name -> how the training data is split.
SPLIT_NAMES: Mapping[str, str] = {
    name: split.description for name, split in SPLITS.items()
}
