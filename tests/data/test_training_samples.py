"""Tests of using only some of the training data."""

import numpy as np
import parts
import pytest

from tff_bn.data import training_samples

_SIZES = (40, 25, 100)


def make(**groups):
  return parts.numbered(sum(_SIZES), 9, **groups)


@pytest.fixture
def domains():
  order = np.random.default_rng(0).permutation(sum(_SIZES))
  domain = np.repeat(np.arange(3, dtype=np.int32), _SIZES)[order]
  return make(
      domain_train=domain,
      domain_test=np.zeros(9, np.int32),
      domain_names=('a', 'b', 'c'),
  )


def draw(dataset, seed=0, **arguments):
  return training_samples.draw_training_samples(dataset, seed, **arguments)


def positions(dataset):
  return dataset.x_train[:, 0].astype(int)


def test_without_arguments_nothing_changes(domains):
  assert draw(domains) is domains


@pytest.mark.parametrize(
    'arguments, sizes',
    [
        (dict(train_share=0.1), [4, 2, 10]),
        (dict(train_share=1.0), _SIZES),
        (dict(train_share=1e-1, samples_per_domain=3), [3, 2, 3]),
        (dict(samples_per_domain=30), [30, 25, 30]),
    ],
)
def test_sizes_of_domains(domains, arguments, sizes):
  subset = draw(domains, **arguments)
  np.testing.assert_array_equal(np.bincount(subset.domain_train), sizes)
  kept = positions(subset)
  assert (np.diff(kept) > 0).all()
  np.testing.assert_array_equal(subset.y_train, kept % 4)
  np.testing.assert_array_equal(subset.domain_train, domains.domain_train[kept])
  np.testing.assert_array_equal(subset.x_test, domains.x_test)


def test_smaller_shares_are_parts_of_larger_ones(domains):
  small, large = (
      set(positions(draw(domains, train_share=share))) for share in (0.2, 0.6)
  )
  assert small < large


def test_seed_decides_the_samples(domains):
  a, b, c = (
      positions(draw(domains, seed, train_share=0.5)) for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(a, b)
  assert set(a) != set(c)


def test_all_samples_are_equally_likely(domains):
  counts = np.zeros(sum(_SIZES))
  for seed in range(400):
    counts[positions(draw(domains, seed, train_share=0.4))] += 1
  # Binomial with 400 draws: the deviation of a mean is 0.024.
  np.testing.assert_allclose(counts / 400, 0.4, atol=0.11)


def test_dataset_without_domains():
  subset = draw(
      make(client_train=np.arange(165), client_names=map(str, range(165))),
      0,
      train_share=0.2,
  )
  assert len(subset.y_train) == 33
  np.testing.assert_array_equal(subset.client_train, positions(subset))


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(train_share=0.0), 'train_share=0.0 must be .* greater than 0'),
        (dict(train_share=1.5), 'train_share=1.5 .* at most 1'),
        (
            dict(samples_per_domain=0),
            'samples_per_domain=0 must be .* at least 1',
        ),
        (
            dict(train_share=0.015),
            'train_share=0.015 leaves none of the 25 .* the domain b of'
            ' numbers; use a larger share',
        ),
    ],
)
def test_wrong_arguments(domains, arguments, message):
  with pytest.raises(ValueError, match=message):
    draw(domains, **arguments)


def test_dataset_without_domains_has_no_samples_of_a_domain():
  with pytest.raises(
      ValueError,
      match='samples_per_domain=3 needs .* dataset=numbers has none; use train',
  ):
    draw(make(), samples_per_domain=3)
  with pytest.raises(ValueError, match='none of the 165 .* samples of numbers'):
    draw(make(), train_share=0.001)
