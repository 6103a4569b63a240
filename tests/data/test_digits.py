"""The digits and their five domains."""

import numpy as np
import pytest
from scipy import signal
from sklearn import datasets

from tff_bn import data as tff_bn_data


@pytest.fixture(scope='module')
def digits():
  return tff_bn_data.load_dataset('digits')


@pytest.fixture(scope='module')
def domains():
  return tff_bn_data.load_dataset('digits_domains')


def flat(x):
  return x.reshape(len(x), -1)


class TestDigits:

  def test_shapes(self, digits):
    assert digits.x_train.shape == (1437, 8, 8, 1)
    assert digits.x_test.shape == (360, 8, 8, 1)
    assert digits.x_train.dtype == np.float32
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 1)
    assert digits.num_classes == 10

  def test_each_digit_of_scikit_learn_occurs_once(self, digits):
    original = datasets.load_digits()
    ours = np.column_stack(
        [
            flat(np.concatenate([digits.x_train, digits.x_test])) * 16,
            np.concatenate([digits.y_train, digits.y_test]),
        ]
    )
    theirs = np.column_stack([original.data, original.target])
    # As sets of rows; all 1,797 are different.
    assert len({tuple(row) for row in theirs}) == 1797
    assert {tuple(row) for row in ours} == {tuple(row) for row in theirs}

  def test_split_is_stratified(self, digits):
    train, test = np.bincount(digits.y_train), np.bincount(digits.y_test)
    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.005)


class TestStrengthOfDomains:

  @pytest.mark.parametrize('part', ['train', 'test'])
  def test_between_the_plain_digits_and_the_domains(
      self, digits, domains, part
  ):
    plain, full = (getattr(each, f'x_{part}') for each in (digits, domains))
    labels = f'domain_{part}'
    for strength in (0, 0.25, 0.5, 1):
      found = tff_bn_data.load_dataset(
          'digits_domains', domain_strength=strength
      )
      x = getattr(found, f'x_{part}')
      np.testing.assert_array_equal(
          getattr(found, labels), getattr(domains, labels)
      )
      if strength == 0:
        np.testing.assert_array_equal(x, plain)
      elif strength == 1:
        np.testing.assert_array_equal(x, full)
      else:
        np.testing.assert_allclose(
            x, plain + strength * (full - plain), atol=1e-6
        )
      assert x.dtype == np.float32

  def test_the_default_changes_no_bit_of_a_domain(self, digits, domains):
    images = [digits.x_train[domains.domain_train == d] for d in range(3)]
    expected = images[0], 1 - images[1], 0.4 + 0.2 * images[2]
    for number, x in enumerate(expected):
      np.testing.assert_array_equal(
          domains.x_train[domains.domain_train == number], x
      )

  def test_the_domains_differ_the_more_the_stronger_they_are(self):
    spreads = []
    for strength in np.linspace(0, 1, 6):
      found = tff_bn_data.load_dataset(
          'digits_domains', domain_strength=float(strength)
      )
      clients = tff_bn_data.split_dataset(found, 'domains', None, 0)
      means = np.stack(
          [found.x_train[own].mean(0) for own in clients.train_indices.values()]
      )
      spreads.append(np.square(means - means.mean(0)).mean())
    assert (np.diff(spreads) > 0).all()
    # The domains of plain digits are random parts of them.
    assert spreads[0] < 0.01 * spreads[-1]

  @pytest.mark.parametrize('strength', [-0.1, 1.5, float('nan'), 'much', True])
  def test_wrong_strengths(self, strength):
    with pytest.raises((TypeError, ValueError), match='domain_strength'):
      tff_bn_data.load_dataset('digits_domains', domain_strength=strength)

  @pytest.mark.parametrize(
      'name', ['digits', 'discs', 'domains:a=digits_domains,b=digits']
  )
  def test_other_datasets(self, name):
    message = (
        'domain_strength=0.5 is for digits_domains and fashion_mnist_domains,'
        f' but dataset={name}'
    )
    with pytest.raises(ValueError, match=message):
      tff_bn_data.load_dataset(name, domain_strength=0.5)


class TestDomains:
  NAMES = (
      'plain',
      'inverted',
      'low_contrast',
      'noisy_background',
      'blurred_shifted',
  )

  def test_sizes_and_labels(self, digits, domains):
    assert domains.domain_names == self.NAMES
    np.testing.assert_array_equal(domains.y_train, digits.y_train)
    np.testing.assert_array_equal(domains.y_test, digits.y_test)
    for domain, labels in (
        (domains.domain_train, domains.y_train),
        (domains.domain_test, domains.y_test),
    ):
      assert domain.dtype == np.int32
      assert np.ptp(np.bincount(domain)) <= 1
      counts = np.array([np.bincount(labels[domain == d]) for d in range(5)])
      assert counts.shape == (5, 10)
      assert (np.ptp(counts, axis=0) <= 1).all()

  def test_values_stay_in_the_unit_interval(self, domains):
    for x in (domains.x_train, domains.x_test):
      assert x.dtype == np.float32
      assert x.min() >= 0
      assert x.max() <= 1

  def test_each_image_is_one_digit_in_the_style_of_its_domain(
      self, digits, domains
  ):
    """This also shows that no digit occurs in two domains."""
    kernel = np.exp(-(np.arange(-3, 4) ** 2) / (2 * 0.7**2))
    kernel = np.outer(kernel, kernel) / kernel.sum() ** 2
    for x, changed, domain in (
        (digits.x_train, domains.x_train, domains.domain_train),
        (digits.x_test, domains.x_test, domains.domain_test),
    ):
      x, changed = x[..., 0], changed[..., 0]
      pairs = [(x[domain == d], changed[domain == d]) for d in range(5)]
      np.testing.assert_array_equal(*pairs[0])
      np.testing.assert_allclose(1 - pairs[1][0], pairs[1][1], atol=1e-6)
      np.testing.assert_allclose(
          0.4 + 0.2 * pairs[2][0], pairs[2][1], atol=1e-6
      )
      before, after = pairs[3]
      noise = (after - before)[before < 1] / (1 - before[before < 1])
      assert noise.min() > -1e-5
      np.testing.assert_allclose(noise.mean(), 0.35, atol=0.02)
      np.testing.assert_allclose(noise.max(), 0.7, atol=0.01)
      np.testing.assert_array_equal(after[before == 1], 1)
      before, after = pairs[4]
      blurred = np.array(
          [signal.convolve2d(image, kernel, 'same') for image in before]
      )
      np.testing.assert_allclose(
          after[:, 1:, 1:], blurred[:, :-1, :-1], atol=1e-3
      )
      assert not after[:, 0].any()
      assert not after[:, :, 0].any()
