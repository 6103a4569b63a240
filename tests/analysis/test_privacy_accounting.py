"""Tests of ε against closed forms and an independent bound."""

import math

import numpy as np
import pytest
from scipy import special
from scipy import stats

from tff_bn.analysis import privacy_accounting
from tff_bn.analysis.privacy_accounting import Sampling

_ALL = Sampling(100, 100)


def _to_epsilon(orders, rdp, delta):
  """Canonne, Kamath, Steinke, arXiv:2004.00010, proposition 12."""
  return np.min(
      rdp
      + np.log1p(-1 / orders)
      - (math.log(delta) + np.log(orders)) / (orders - 1)
  )


def _exact_delta(epsilon, noise):
  """Balle, Wang, arXiv:1805.06530, theorem 8, for sensitivity 1."""
  a, b = 1 / (2 * noise), epsilon * noise
  return stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b)


@pytest.mark.parametrize(('noise', 'rounds'), [(8.0, 1), (20.0, 30)])
def test_all_clients_in_each_round(noise, rounds):
  found = privacy_accounting.epsilon(noise, _ALL, rounds, 1e-5)

  # A client that is replaced changes a sum of vectors with norm 1 by 2.
  orders = np.linspace(1.05, 200, 40000)
  rdp = rounds * orders / (2 * (noise / 2) ** 2)
  assert found == pytest.approx(_to_epsilon(orders, rdp, 1e-5), rel=1e-3)
  # Rényi differential privacy is an upper bound, not far from the exact value.
  exact_noise = noise / 2 / math.sqrt(rounds)
  assert _exact_delta(found, exact_noise) < 1e-5
  assert _exact_delta(0.85 * found, exact_noise) > 1e-5


def _sampled_rdp(order, share, noise):
  """Wang, Balle, Kasiviswanathan, theorem 9, for the Gaussian mechanism."""

  def gaussian(j):
    return j / (2 * noise**2)

  terms = [
      share**2
      * special.comb(order, 2)
      * min(4 * math.expm1(gaussian(2)), 2 * math.exp(gaussian(2)))
  ]
  terms += [
      2 * share**j * special.comb(order, j) * math.exp((j - 1) * gaussian(j))
      for j in range(3, order + 1)
  ]
  return math.log1p(sum(terms)) / (order - 1)


def _attacked_rdp(order, share, noise):
  """Returns what one attack reveals: a client sends 1 or -1, all others 0."""
  x = np.linspace(-12 * noise, 12 * noise, 40001)

  def log_density(message):
    return np.logaddexp(
        math.log(1 - share) + stats.norm.logpdf(x, 0, noise),
        math.log(share) + stats.norm.logpdf(x, message, noise),
    )

  ratio = np.exp(order * log_density(1) + (1 - order) * log_density(-1))
  return math.log(np.trapezoid(ratio, x)) / (order - 1)


@pytest.mark.parametrize('noise', [6.0, 10.0])
def test_sampled_clients(noise):
  sampling, rounds = Sampling(1000, 50), 100
  found = privacy_accounting.epsilon(noise, sampling, rounds, 1e-6)

  orders = np.arange(2, 60)
  rdp = [rounds * _sampled_rdp(order, 0.05, noise / 2) for order in orders]
  bound = _to_epsilon(orders, np.array(rdp), 1e-6)
  least = [rounds * _attacked_rdp(order, 0.05, noise) for order in orders]
  # The library has a better bound than the paper's.
  assert found <= bound
  assert found >= _to_epsilon(orders, np.array(least), 1e-6) * (1 - 1e-6)
  # Far less than without sampling.
  assert found < 0.3 * privacy_accounting.epsilon(
      noise, Sampling(50, 50), rounds, 1e-6
  )


def test_more_noise_or_fewer_rounds_are_more_private():
  numbers = [
      privacy_accounting.epsilon(noise, _ALL, rounds, 1e-5)
      for noise, rounds in [(9, 5), (9, 10), (6, 10)]
  ]
  assert numbers == sorted(numbers)


def test_nothing_and_no_noise():
  assert privacy_accounting.epsilon(1.0, _ALL, 0, 1e-5) == 0
  assert privacy_accounting.epsilon(0.0, _ALL, 1, 1e-5) == math.inf


@pytest.mark.parametrize('sampling', [_ALL, Sampling(500, 20)])
def test_noise_for_an_epsilon(sampling):
  noise = privacy_accounting.noise_multiplier(3.0, sampling, 20, 1e-5)
  found = privacy_accounting.epsilon(noise, sampling, 20, 1e-5)
  assert 2.95 < found <= 3


def test_an_epsilon_without_noise_is_an_error():
  with pytest.raises(ValueError, match='epsilon=1e.09 and delta=1e-05 after 2'):
    privacy_accounting.noise_multiplier(1e9, _ALL, 2, 1e-5)
