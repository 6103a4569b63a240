"""The differential privacy of training with noisy sums."""

import functools
from typing import NamedTuple

import dp_accounting
from dp_accounting import mechanism_calibration
from dp_accounting import rdp
import numpy as np

# The search for a noise multiplier starts between these.
_NOISE_RANGE = mechanism_calibration.LowerEndpointAndGuess(1e-2, 1.0)


class Sampling(NamedTuple):
  """How clients take part in training.

  Attributes:
    num_clients: The number of all clients.
    clients_per_round: The number of clients in a round, which are drawn
      uniformly without replacement, independently of other rounds.
  """

  num_clients: int
  clients_per_round: int


def epsilon(
    noise_multiplier: float, sampling: Sampling, rounds: int, delta: float
) -> float:
  """Computes ε of (ε, δ)-differential privacy at client level.

  Neighboring data sets differ in all data of one client, which are replaced by
  others ("replace one"). So a sum of vectors with norm C changes by up to 2 C,
  and Rényi differential privacy is computed for noise with half the multiplier:
  Wang, Balle, Kasiviswanathan, Subsampled Rényi Differential Privacy and
  Analytical Moments Accountant, AISTATS 2019, arXiv:1808.00087, as in
  `dp_accounting.rdp.RdpAccountant`. It holds for everybody who sees all noisy
  sums of all rounds, but does not know which clients took part.

  Args:
    noise_multiplier: The standard deviation of a round's noise divided by C,
      see `tff_bn.aggregators.DpSums`.
    sampling: How clients take part.
    rounds: The number of rounds.
    delta: δ.

  Returns:
    ε; infinite without noise, and 0 without rounds.
  """
  if not rounds:
    return 0.0
  if not noise_multiplier:
    return float('inf')
  orders, of_round = _of_round(noise_multiplier, sampling)
  found, _ = rdp.compute_epsilon(orders, rounds * of_round, delta)
  return float(found)


# The search takes seconds, and a run needs the number several times.
@functools.lru_cache(maxsize=16)
def noise_multiplier(
    epsilon: float, sampling: Sampling, rounds: int, delta: float
) -> float:
  """Computes the smallest noise multiplier for an ε, see `epsilon`.

  Args:
    epsilon: The largest ε after all rounds.
    sampling: How clients take part.
    rounds: The number of rounds.
    delta: δ.

  Raises:
    ValueError: If no noise multiplier is known to be enough.
  """
  try:
    return float(
        dp_accounting.calibrate_dp_mechanism(
            _accountant,
            lambda noise: dp_accounting.SelfComposedDpEvent(
                _round_event(noise, sampling), rounds
            ),
            epsilon,
            delta,
            _NOISE_RANGE,
            tol=1e-3,
        )
    )
  except mechanism_calibration.NoBracketIntervalFoundError as error:
    raise ValueError(
        f'No noise multiplier is known for epsilon={epsilon:g} and'
        f' delta={delta:g} after {rounds} rounds of'
        f' {sampling.clients_per_round} of {sampling.num_clients} clients.'
    ) from error


def _accountant() -> rdp.RdpAccountant:
  return rdp.RdpAccountant(
      neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
  )


def _round_event(
    noise_multiplier: float, sampling: Sampling
) -> dp_accounting.DpEvent:
  """Returns what a round reveals."""
  event = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
  if sampling.clients_per_round == sampling.num_clients:
    return event
  return dp_accounting.SampledWithoutReplacementDpEvent(
      sampling.num_clients, sampling.clients_per_round, event
  )


@functools.lru_cache(maxsize=16)
def _of_round(
    noise_multiplier: float, sampling: Sampling
) -> tuple[np.ndarray, np.ndarray]:
  """Returns orders, and the Rényi differential privacy of a round for each."""
  accountant = _accountant()
  accountant.compose(_round_event(noise_multiplier, sampling))
  return accountant.orders, accountant.rdp
