"""The splits against their definitions."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import parts as parts_lib
import pytest

from tff_bn.data import dirichlet
from tff_bn.data import splits

# FedTAN, Appendix D: which of ten classes five clients have.
APPENDIX_D = {
    2: ['1100000000', '0011000000', '0000110000', '0000001100', '0000000011'],
    4: ['1111000000', '0011110000', '0000111100', '0000001111', '1100000011'],
    6: ['1111110000', '0011111100', '0000111111', '1100001111', '1111000011'],
    8: ['1111111100', '0011111111', '1100111111', '1111001111', '1111110011'],
    10: ['1111111111'] * 5,
}


def assert_equal_parts(a, b):
  assert len(a) == len(b)
  for x, y in zip(a, b):
    np.testing.assert_array_equal(x, y)


def differ(a, b):
  return any(len(x) != len(y) or (x != y).any() for x, y in zip(a, b))


# Every split with an argument of each kind, as a function of (labels,
# num_clients, seed), if it covers all samples.
COVERING = {
    'iid': lambda y, n, s: splits.split_iid(len(y), n, s),
    'dirichlet': lambda y, n, s: dirichlet.split_by_dirichlet(y, n, 0.3, s),
    'dirichlet by client': lambda y, n, s: dirichlet.split_by_client_dirichlet(
        y, 5, n, 0.3, s
    ),
    'gamma': lambda y, n, s: splits.split_by_gamma_similarity(y, n, 0.4, s),
    'unbalanced': lambda y, n, s: splits.split_unbalanced(len(y), n, 1.5, s),
}


@st.composite
def labels_and_clients(draw):
  labels = draw(st.lists(st.integers(0, 4), min_size=1, max_size=60))
  num_clients = draw(st.integers(1, len(labels)))
  return np.array(labels), num_clients


class TestEverySplit:

  @pytest.mark.parametrize('name', COVERING)
  @settings(max_examples=30, deadline=None)
  @given(data=labels_and_clients(), seed=st.integers(0, 2**40))
  def test_is_a_disjoint_cover_and_depends_only_on_the_seed(
      self, name, data, seed
  ):
    labels, num_clients = data
    parts = COVERING[name](labels, num_clients, seed)
    assert len(parts) == num_clients
    parts_lib.assert_cover(parts, len(labels))
    assert all(part.size for part in parts)
    np.random.seed(0)
    assert_equal_parts(parts, COVERING[name](labels, num_clients, seed))

  @pytest.mark.parametrize('name', COVERING)
  def test_differs_with_the_seed(self, name):
    labels = np.arange(200) % 5
    first, second = (COVERING[name](labels, 4, seed) for seed in (0, 1))
    assert differ(first, second)

  @pytest.mark.parametrize('name', COVERING)
  def test_refuses_more_clients_than_samples(self, name):
    with pytest.raises(
        ValueError,
        match=(
            'num_clients=8 asks for more clients than the 7 training samples;'
            ' use at most 7'
        ),
    ):
      COVERING[name](np.zeros(7, int), 8, 0)

  @pytest.mark.parametrize('name', COVERING)
  def test_refuses_no_clients(self, name):
    with pytest.raises(ValueError, match='num_clients=-1 .* at least 1'):
      COVERING[name](np.zeros(7, int), -1, 0)

  @pytest.mark.parametrize('name', COVERING)
  def test_refuses_negative_seed(self, name):
    with pytest.raises(ValueError, match='seed=-1'):
      COVERING[name](np.zeros(7, int), 2, -1)


class TestIid:

  def test_sizes_differ_by_one_at_most(self):
    sizes = [len(part) for part in splits.split_iid(23, 5, 0)]
    assert sorted(sizes) == [4, 4, 5, 5, 5]

  def test_samples_are_shuffled(self):
    # A client's mean index would be 49.5 or so far from it if they were not.
    means = [part.mean() for part in splits.split_iid(1000, 2, 0)]
    np.testing.assert_allclose(means, 499.5, atol=50)


class TestDrawIid:

  def _draw(self, num_samples, num_clients, samples_per_client, seed=0):
    rng = np.random.default_rng(seed)
    return splits.draw_iid(num_samples, num_clients, samples_per_client, rng)

  @settings(max_examples=30, deadline=None)
  @given(data=st.data(), num_samples=st.integers(1, 40))
  def test_samples_of_a_client_are_different(self, data, num_samples):
    samples_per_client = data.draw(st.integers(1, num_samples))
    num_clients = data.draw(st.integers(1, 100))
    parts = self._draw(num_samples, num_clients, samples_per_client)
    assert len(parts) == num_clients
    for part in parts:
      assert part.shape == (samples_per_client,)
      assert (np.diff(part) > 0).all()
      assert part[0] >= 0
      assert part[-1] < num_samples

  def test_depends_on_the_seed_and_not_on_the_number_of_clients(self):
    parts = self._draw(50, 3, 8)
    assert_equal_parts(parts, self._draw(50, 3, 8))
    assert_equal_parts(parts, self._draw(50, 9, 8)[:3])
    assert differ(parts, self._draw(50, 3, 8, seed=1))

  def test_all_pairs_of_samples_are_equally_likely(self):
    parts = np.array(self._draw(5, 20_000, 2))
    pairs, counts = np.unique(parts, axis=0, return_counts=True)
    assert len(pairs) == 10
    # Five standard deviations of a binomial distribution.
    np.testing.assert_allclose(counts, 2000, atol=5 * 2000**0.5)


class TestClasses:

  @pytest.mark.parametrize('classes_per_client', APPENDIX_D)
  def test_appendix_d(self, classes_per_client):
    labels = np.random.default_rng(0).permutation(np.arange(1200) % 10)
    parts = splits.split_by_classes(labels, 10, 5, classes_per_client, seed=0)
    counts = parts_lib.label_counts(parts, labels, 10)
    shares = counts / counts.sum(axis=1, keepdims=True)
    expected = [[int(c) for c in row] for row in APPENDIX_D[classes_per_client]]
    np.testing.assert_allclose(
        shares, np.array(expected) / classes_per_client, rtol=1e-12
    )
    # All clients have the same size, and every class is fully used.
    assert set(counts.sum(axis=1)) == {1200 // 5}
    parts_lib.assert_cover(parts, 1200)

  @settings(max_examples=30, deadline=None)
  @given(
      num_classes=st.integers(1, 12),
      num_clients=st.integers(1, 12),
      data=st.data(),
  )
  def test_all_clients_have_the_same_of_each_of_their_classes(
      self, num_classes, num_clients, data
  ):
    per_client = data.draw(st.integers(1, num_classes))
    sizes = data.draw(
        st.lists(
            st.integers(num_clients, 40),
            min_size=num_classes,
            max_size=num_classes,
        )
    )
    labels = np.repeat(np.arange(num_classes), sizes)
    parts = splits.split_by_classes(
        labels, num_classes, num_clients, per_client, seed=3
    )
    chosen = np.concatenate(parts)
    assert len(np.unique(chosen)) == len(chosen)
    counts = parts_lib.label_counts(parts, labels, num_classes)
    assert ((counts > 0).sum(axis=1) == per_client).all()
    assert len(np.unique(counts[counts > 0])) == 1

  def test_uses_all_that_the_scarcest_class_allows(self):
    labels = np.repeat([0, 1, 2], [9, 7, 20])
    # Each class has two of the three clients, so class 1 gives 7 // 2 each.
    parts = splits.split_by_classes(labels, 3, 3, 2, seed=0)
    np.testing.assert_array_equal(
        parts_lib.label_counts(parts, labels, 3),
        [[3, 3, 0], [3, 0, 3], [0, 3, 3]],
    )

  def test_one_class_per_client_gives_all_classes(self):
    labels = np.repeat(np.arange(10), 6)
    counts = parts_lib.label_counts(
        splits.split_by_classes(labels, 10, 12, 1, seed=0), labels, 10
    )
    # Clients 10 and 11 share the classes of clients 0 and 1.
    np.testing.assert_array_equal(counts.argmax(axis=1), np.arange(12) % 10)
    np.testing.assert_array_equal(counts.sum(axis=1), 3)

  def test_few_classes_start_at_every_second_too(self):
    labels = np.repeat(np.arange(4), 6)
    first, second = splits.split_by_classes(labels, 4, 2, 2, seed=0)
    assert set(labels[first]) == {0, 1}
    assert set(labels[second]) == {2, 3}

  def test_twenty_of_a_hundred_classes_are_disjoint_for_five_clients(self):
    labels = np.repeat(np.arange(100), 5)
    parts = splits.split_by_classes(labels, 100, 5, 20, seed=0)
    parts_lib.assert_cover(parts, 500)
    for client, part in enumerate(parts):
      assert set(labels[part]) == set(range(20 * client, 20 * client + 20))

  def test_seed_decides_the_samples(self):
    labels = np.repeat(np.arange(2), 50)
    # Both clients have both classes.
    first, second = (
        splits.split_by_classes(labels, 2, 2, 2, seed) for seed in (0, 1)
    )
    assert differ(first, second)
    assert_equal_parts(first, splits.split_by_classes(labels, 2, 2, 2, 0))

  @pytest.mark.parametrize('classes_per_client', [0, -1, 4])
  def test_refuses_wrong_number_of_classes(self, classes_per_client):
    with pytest.raises(
        ValueError,
        match=f'classes_per_client={classes_per_client} .* between 1 .* 3',
    ):
      splits.split_by_classes(np.arange(9) % 3, 3, 2, classes_per_client, 0)

  def test_refuses_more_clients_than_a_class_has_samples(self):
    labels = np.repeat([0, 1], [20, 2])
    with pytest.raises(
        ValueError, match='num_clients=6 .* class 1 to 3 clients.* 2 training'
    ):
      splits.split_by_classes(labels, 2, 6, 1, 0)

  def test_refuses_class_without_samples(self):
    with pytest.raises(ValueError, match='class 1 to 1 clients.* 0 training'):
      splits.split_by_classes(np.array([0, 0, 2, 2]), 3, 3, 1, 0)


class TestGammaSimilarity:

  @settings(max_examples=40, deadline=None)
  @given(
      num_samples=st.integers(1, 80),
      gamma=st.floats(0, 1, width=32, allow_subnormal=False),
      data=st.data(),
  )
  def test_sizes_differ_by_one_at_most(self, num_samples, gamma, data):
    num_clients = data.draw(st.integers(1, num_samples))
    labels = np.arange(num_samples) % 3
    parts = splits.split_by_gamma_similarity(labels, num_clients, gamma, 0)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    parts_lib.assert_cover(parts, num_samples)

  def test_zero_is_sorted_by_label(self):
    labels = np.random.default_rng(0).permutation(np.arange(1000) % 10)
    parts = splits.split_by_gamma_similarity(labels, 10, 0.0, seed=0)
    np.testing.assert_array_equal(
        parts_lib.label_counts(parts, labels, 10), 100 * np.eye(10)
    )

  def test_one_is_iid(self):
    labels = np.arange(10_000) % 10
    parts = splits.split_by_gamma_similarity(labels, 5, 1.0, seed=0)
    # Mean 200, standard deviation 12.
    counts = parts_lib.label_counts(parts, labels, 10)
    np.testing.assert_allclose(counts, 200, atol=60)
    assert np.ptp(counts) > 0

  def test_gamma_is_the_share_that_is_random(self):
    labels = np.arange(20_000) % 10
    parts = splits.split_by_gamma_similarity(labels, 10, 0.3, seed=0)
    counts = parts_lib.label_counts(parts, labels, 10)
    # 600 of each client's 2,000 samples are random, a tenth of these of its
    # own class; the borders of the chunks move by some tens.
    np.testing.assert_allclose(np.diag(counts), 1400 + 60, atol=100)
    far = counts[np.abs(np.subtract.outer(range(10), range(10))) > 1]
    np.testing.assert_allclose(far, 60, atol=35)

  @pytest.mark.parametrize('gamma', [-0.1, 1.1, np.nan])
  def test_refuses_shares_outside_0_and_1(self, gamma):
    with pytest.raises(ValueError, match='gamma=.*at least 0 and at most 1'):
      splits.split_by_gamma_similarity(np.zeros(9, int), 2, gamma, 0)


class TestDomains:

  def split(self, num_clients, seed=0):
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 4, 300)
    domains = rng.permutation(np.repeat([0, 1, 2], [90, 100, 110]))
    parts = splits.split_by_domain(labels, domains, 3, num_clients, seed)
    return labels, domains, parts

  @pytest.mark.parametrize('num_clients', [3, 6, 12])
  def test_clients_of_a_domain_have_equal_label_distributions(
      self, num_clients
  ):
    labels, domains, parts = self.split(num_clients)
    parts_lib.assert_cover(parts, 300)
    counts = parts_lib.label_counts(parts, labels, 4)
    for client, part in enumerate(parts):
      assert set(domains[part]) == {client % 3}
    for domain in range(3):
      assert np.ptp(counts[domain::3].sum(axis=1)) <= 1
      assert (np.ptp(counts[domain::3], axis=0) <= 1).all()

  def test_depends_on_the_seed(self):
    parts = self.split(6)[-1]
    assert_equal_parts(parts, self.split(6)[-1])
    assert differ(parts, self.split(6, seed=1)[-1])

  @pytest.mark.parametrize('num_clients', [1, 4, 5])
  def test_refuses_other_than_multiples(self, num_clients):
    with pytest.raises(
        ValueError,
        match=f'num_clients={num_clients} .* the 3 domains.*a multiple of 3,',
    ):
      self.split(num_clients)

  def test_refuses_more_clients_than_the_smallest_domain_has_samples(self):
    with pytest.raises(
        ValueError, match='num_clients=276 .* has 90 .* at most 270'
    ):
      self.split(276)


class TestUnbalanced:

  def test_sizes_are_log_normal(self):
    parts = splits.split_unbalanced(1_000_000, 1000, 0.7, seed=0)
    logarithms = np.log([len(part) for part in parts])
    np.testing.assert_allclose(logarithms.std(), 0.7, rtol=0.1)
    # Symmetric: mean and median agree.
    np.testing.assert_allclose(
        logarithms.mean(), np.median(logarithms), atol=0.1
    )

  def test_zero_gives_equal_sizes(self):
    sizes = [len(part) for part in splits.split_unbalanced(23, 5, 0, seed=0)]
    assert sorted(sizes) == [4, 4, 5, 5, 5]

  def test_labels_are_iid(self):
    labels = np.arange(10_000) % 2
    for part in splits.split_unbalanced(10_000, 3, 0.3, seed=0):
      np.testing.assert_allclose(labels[part].mean(), 0.5, atol=0.05)

  def test_extreme_imbalance_leaves_everybody_a_sample(self):
    parts = splits.split_unbalanced(1000, 10, 1e6, seed=0)
    assert sorted(len(part) for part in parts) == [1] * 9 + [991]

  @pytest.mark.parametrize('imbalance', [-0.1, np.inf, np.nan])
  def test_refuses_bad_imbalance(self, imbalance):
    with pytest.raises(ValueError, match='imbalance=.* at least 0'):
      splits.split_unbalanced(9, 2, imbalance, 0)


class TestNatural:
  CLIENTS = np.array([4, 0, 4, 2, 2, 2, 0, 7])

  def test_all_clients(self):
    parts = splits.split_by_client(self.CLIENTS, 4, seed=0)
    assert_equal_parts(parts, [[1, 6], [3, 4, 5], [0, 2], [7]])

  def test_seed_decides_which_are_taken(self):
    clients = np.repeat(np.arange(50), 2)
    first = splits.split_by_client(clients, 10, seed=0)
    taken = [set(clients[part]) for part in first]
    assert all(len(client) == 1 for client in taken)
    assert len(set.union(*taken)) == 10
    assert all(len(part) == 2 for part in first)
    assert_equal_parts(first, splits.split_by_client(clients, 10, seed=0))
    assert differ(first, splits.split_by_client(clients, 10, seed=1))

  def test_refuses_more_clients(self):
    with pytest.raises(
        ValueError,
        match='num_clients=5 .* than the 4 natural clients; use at most 4',
    ):
      splits.split_by_client(self.CLIENTS, 5, seed=0)
