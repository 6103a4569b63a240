"""Splits of samples over clients with label distributions from a Dirichlet."""

import heapq

import numpy as np

from tff_bn.catalog import value_types
from tff_bn.common import seeding
from tff_bn.data import label_shares


def split_by_dirichlet(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int
) -> list[np.ndarray]:
  """Splits each class in proportions drawn from a Dirichlet distribution.

  The clients' shares of each class are drawn from Dir(α, ..., α). With a small
  α, few clients have most of a class; with a large α, all have similar shares.
  A client without samples gets one from the client that has the most.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    num_clients: The number of clients.
    alpha: The concentration α > 0.
    seed: Determines the shares and each client's samples.

  Returns:
    Each client's indices, at least one.

  Raises:
    ValueError: If α is not positive or not finite, if there are no clients, or
      more clients than samples.
  """
  label_shares.check_num_clients(num_clients, len(labels), 'training samples')
  value_types.POSITIVE.check('dirichlet_alpha', alpha)
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  shares: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
  for label in np.unique(labels):
    pool = rng.permutation(np.flatnonzero(labels == label))
    cumulative = np.cumsum(_dirichlet(np.full(num_clients, alpha), rng))
    cuts = np.round(cumulative[:-1] * len(pool)).astype(int)
    for share, samples in zip(shares, np.split(pool, cuts)):
      share.append(samples)
  parts = [np.concatenate(share) for share in shares]
  # The largest part comes first; of equal parts, the first client's.
  by_size = [(-part.size, client) for client, part in enumerate(parts)]
  heapq.heapify(by_size)
  for client, part in enumerate(parts):
    if not part.size:
      _, largest = by_size[0]
      taken = rng.integers(parts[largest].size)
      parts[client] = parts[largest][taken : taken + 1]
      parts[largest] = np.delete(parts[largest], taken)
      heapq.heapreplace(by_size, (-parts[largest].size, largest))
  return [np.sort(part) for part in parts]


def split_by_client_dirichlet(
    labels: np.ndarray,
    num_classes: int,
    num_clients: int,
    alpha: float,
    seed: int,
    *,
    proportional: bool = False,
) -> list[np.ndarray]:
  """Draws a label distribution for each client from a Dirichlet distribution.

  Client k has the label distribution p_k, drawn from Dir(α, ..., α) over the
  classes (FedPAN, appendix A), or from Dir(α·p), where p are the shares of the
  classes in the data (Hsu et al. 2019, section 3; FBN, appendix C.2). All
  clients have the same size. The clients choose in random order: the number of
  a client's samples of each class is proportional to p_k, up to rounding. If a
  class has too few samples left, the client takes them all, and its missing
  samples are divided in proportion to p_k among the classes that have samples
  left. If p_k is 0 for all of these, they are divided in proportion to what is
  left of each class. So the last clients are less like their p_k than the first
  ones.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    num_classes: The number of classes.
    num_clients: The number of clients.
    alpha: The concentration α > 0.
    seed: Determines the distributions and each client's samples.
    proportional: Whether to draw from Dir(α·p). With C classes of the same
      size, this is Dir(α/C, ..., α/C).

  Returns:
    Each client's indices; sizes differ by at most 1.

  Raises:
    ValueError: If α is not positive or not finite, if there are no clients, or
      more clients than samples.
  """
  label_shares.check_num_clients(num_clients, len(labels), 'training samples')
  value_types.POSITIVE.check('dirichlet_alpha', alpha)
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  pools = [
      rng.permutation(np.flatnonzero(labels == label))
      for label in range(num_classes)
  ]
  left = np.array([len(pool) for pool in pools])
  concentrations = np.full(num_classes, alpha)
  if proportional:
    concentrations *= left / len(labels)
  small, larger = divmod(len(labels), num_clients)
  parts: list[np.ndarray] = [np.array([], int)] * num_clients
  for client in rng.permutation(num_clients):
    shares = _dirichlet(concentrations, rng)
    before = left
    missing = small + (client < larger)
    while missing:
      weights = np.where(left > 0, shares, 0)
      if not weights.any():
        weights = left
      wanted = label_shares.apportion(missing, weights, rng)
      taken = np.minimum(wanted, left)
      left = left - taken
      missing -= taken.sum()
    parts[client] = np.concatenate(
        [pool[after:end] for pool, after, end in zip(pools, left, before)]
    )
  return [np.sort(part) for part in parts]


def _dirichlet(alphas: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Draws from a Dirichlet distribution; an entry with α = 0 is 0.

  NumPy's function hangs if α is 1e-12. This one uses logarithms: G·U^(1/α) has
  the distribution Gamma(α) if G has Gamma(α + 1) and U is uniform (Marsaglia
  and Tsang 2000).
  """
  is_positive = alphas > 0
  positive = alphas[is_positive]
  log_gamma = np.log(rng.standard_gamma(positive + 1))
  log_gamma += np.log1p(-rng.random(len(positive))) / positive
  shares = np.zeros(len(alphas))
  shares[is_positive] = np.exp(log_gamma - log_gamma.max())
  return shares / shares.sum()
