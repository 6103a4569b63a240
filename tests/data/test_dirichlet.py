"""Splits with a Dirichlet distribution against their definitions."""

import numpy as np
import parts as parts_lib
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.data import dirichlet


class TestDirichlet:

  @pytest.mark.parametrize('alpha', [0.05, 0.5, 5.0])
  def test_shares_have_mean_and_variance_of_the_distribution(self, alpha):
    num_classes, per_class, num_clients = 1500, 100, 8
    labels = np.repeat(np.arange(num_classes), per_class)
    parts = dirichlet.split_by_dirichlet(labels, num_clients, alpha, seed=0)
    shares = parts_lib.label_counts(parts, labels, num_classes) / per_class
    # A client's share of a class is Beta(α, (n-1)α).
    mean = 1 / num_clients
    variance = mean * (1 - mean) / (num_clients * alpha + 1)
    np.testing.assert_allclose(shares.mean(axis=1), mean, atol=0.03)
    np.testing.assert_allclose(shares.var(), variance, rtol=0.06)
    # The shares of different classes are independent.
    assert abs(np.corrcoef(shares[0, 1:], shares[0, :-1])[0, 1]) < 0.1

  @pytest.mark.parametrize('alpha', [1e-12, 1e-3, 1e6])
  def test_extreme_concentrations(self, alpha):
    labels = np.repeat(np.arange(40), 100)
    parts = dirichlet.split_by_dirichlet(labels, 4, alpha, seed=0)
    shares = parts_lib.label_counts(parts, labels, 40) / 100
    if alpha < 1:
      assert (shares.max(axis=0) > 0.98).all()
    else:
      np.testing.assert_allclose(shares, 0.25, atol=0.011)

  def test_every_client_gets_a_sample_of_the_largest(self):
    # One class that goes to one client; the others get one sample each.
    parts = dirichlet.split_by_dirichlet(np.zeros(50, int), 10, 1e-9, seed=0)
    assert sorted(len(part) for part in parts) == [1] * 9 + [41]
    parts_lib.assert_cover(parts, 50)

  def test_empty_clients_take_from_the_largest_of_the_moment(self):
    sizes = [0, 7, 0, 9, 0, 0, 9, 1, 0, 0, 0]
    labels = np.repeat(np.arange(35), 1)
    shares = np.zeros(len(sizes))
    with pytest.MonkeyPatch.context() as monkeypatch:
      # Each class goes to the next client that still lacks samples.
      owners = iter(np.repeat(np.arange(len(sizes)), sizes))

      def draw(alphas, rng):
        del alphas, rng
        share = shares.copy()
        share[next(owners)] = 1
        return share

      monkeypatch.setattr(dirichlet, '_dirichlet', draw)
      parts = dirichlet.split_by_dirichlet(
          labels[: sum(sizes)], len(sizes), 1.0, seed=0
      )
    # The first of the largest gives first: 3, 6, 3, 6, then 1 (7), 3 (7), 6.
    assert [len(part) for part in parts] == [1, 6, 1, 6, 1, 1, 6, 1, 1, 1, 1]
    parts_lib.assert_cover(parts, sum(sizes))

  @pytest.mark.parametrize('alpha', [0, -1.0, np.inf, np.nan])
  def test_refuses_bad_concentration(self, alpha):
    with pytest.raises(ValueError, match='dirichlet_alpha=.*greater than 0'):
      dirichlet.split_by_dirichlet(np.zeros(9, int), 2, alpha, 0)


@pytest.fixture
def draws(monkeypatch):
  """Returns a list of all draws from the Dirichlet distribution."""
  found = []
  draw = dirichlet._dirichlet

  def record(*arguments):
    found.append(draw(*arguments))
    return found[-1]

  monkeypatch.setattr(dirichlet, '_dirichlet', record)
  return found


class TestClientDirichlet:

  @pytest.mark.parametrize('alpha', [0.1, 1.0, 10.0])
  def test_sizes_are_equal(self, alpha):
    labels = np.random.default_rng(0).integers(0, 10, 1003)
    parts = dirichlet.split_by_client_dirichlet(labels, 10, 8, alpha, 0)
    parts_lib.assert_cover(parts, 1003)
    assert sorted(map(len, parts)) == [125] * 5 + [126] * 3

  def test_shares_are_the_draws_while_no_class_runs_out(self, draws):
    labels = np.repeat(np.arange(5), 800)
    parts = dirichlet.split_by_client_dirichlet(labels, 5, 40, 1.0, 0)
    counts = parts_lib.label_counts(parts, labels, 5)
    assert len(draws) == 40
    order = []
    # The first ones take at most 700 of 800.
    for shares in draws[:7]:
      (client,) = np.flatnonzero((abs(counts - 100 * shares) < 1).all(axis=1))
      order.append(client)
    assert order != sorted(order)

  @pytest.mark.parametrize('proportional', [False, True])
  def test_moments_of_the_draws(self, draws, proportional):
    """The mean of Dir(a) is a / |a|, the variance mean (1-mean) / (|a| + 1)."""
    labels = np.repeat(np.arange(3), [100, 300, 400])
    for seed in range(500):
      dirichlet.split_by_client_dirichlet(
          labels, 4, 8, 0.8, seed, proportional=proportional
      )
    alphas = np.array([0.1, 0.3, 0.4, 0] if proportional else [0.8] * 4)
    mean = alphas / alphas.sum()
    variance = mean * (1 - mean) / (alphas.sum() + 1)
    assert len(draws) == 4000
    # The deviation of the mean of 4000 is at most 0.006.
    np.testing.assert_allclose(np.mean(draws, axis=0), mean, atol=0.025)
    np.testing.assert_allclose(np.var(draws, axis=0), variance, atol=0.015)

  def test_a_class_that_runs_out_is_replaced_in_proportion(self, monkeypatch):
    # Each client wants half of class 0, and three times as much of 1 as of 2.
    shares = np.array([0.5, 0.375, 0.125, 0])
    monkeypatch.setattr(dirichlet, '_dirichlet', lambda *_: shares)

    def split(*sizes):
      labels = np.repeat(np.arange(4), sizes)
      parts = dirichlet.split_by_client_dirichlet(labels, 4, 2, 1.0, 0)
      counts = parts_lib.label_counts(parts, labels, 4).tolist()
      return sorted(counts, reverse=True)

    assert split(100, 700, 600, 600) == [
        [100, 675, 225, 0],
        [0, 25, 375, 600],
    ]
    # Nothing is left of what the second one wants.
    assert split(100, 600, 300, 1000) == [[100, 600, 300, 0], [0, 0, 0, 1000]]

  def test_what_nobody_wants_is_dealt_in_proportion(self, monkeypatch):
    shares = np.array([1.0, 0, 0])
    monkeypatch.setattr(dirichlet, '_dirichlet', lambda *_: shares)
    labels = np.repeat(np.arange(3), [10, 600, 200])
    parts = dirichlet.split_by_client_dirichlet(labels, 3, 2, 1.0, 0)
    counts = parts_lib.label_counts(parts, labels, 3).tolist()
    # 395 samples as 600 to 200, and the rest.
    assert sorted(counts) == [[0, 304, 101], [10, 296, 99]]

  @pytest.mark.parametrize('alpha', [1e-12, 1e6])
  def test_extreme_concentrations(self, alpha):
    labels = np.repeat(np.arange(40), 100)
    parts = dirichlet.split_by_client_dirichlet(labels, 40, 4, alpha, seed=0)
    parts_lib.assert_cover(parts, 4000)
    if alpha > 1:
      counts = parts_lib.label_counts(parts, labels, 40)
      np.testing.assert_allclose(counts / 100, 0.25, atol=0.021)

  def test_samples_of_a_class_are_shuffled(self):
    labels = np.zeros(100, int)
    parts = dirichlet.split_by_client_dirichlet(labels, 1, 2, 1.0, 0)
    assert abs(parts[0].mean() - parts[1].mean()) < 20

  @pytest.mark.parametrize('alpha', [0, -1.0, np.inf, np.nan])
  def test_refuses_bad_concentration(self, alpha):
    with pytest.raises(ValueError, match='dirichlet_alpha=.*greater than 0'):
      dirichlet.split_by_client_dirichlet(np.zeros(9, int), 1, 2, alpha, 0)

  def test_by_name(self):
    dataset = tff_bn_data.load_dataset('generated:3:5:100')
    by_client, by_class, default, uniform, proportional = (
        tff_bn_data.split_dataset(
            dataset, 'dirichlet', 4, 3, dirichlet_alpha=0.5, **variant
        ).label_distribution()
        for variant in (
            dict(dirichlet_by='client'),
            dict(dirichlet_by='class'),
            {},
            dict(dirichlet_by='client', dirichlet_prior='uniform'),
            dict(dirichlet_by='client', dirichlet_prior='proportional'),
        )
    )
    np.testing.assert_array_equal(by_client.sum(axis=1), 25)
    np.testing.assert_array_equal(by_class, default)
    np.testing.assert_array_equal(by_client, uniform)
    assert (by_client != proportional).any()
    assert len(set(by_class.sum(axis=1))) > 1
    with pytest.raises(
        ValueError, match="dirichlet_by='x' must be one of class, client"
    ):
      tff_bn_data.split_dataset(
          dataset, 'dirichlet', 4, 3, dirichlet_alpha=0.5, dirichlet_by='x'
      )
