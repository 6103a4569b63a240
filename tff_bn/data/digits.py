"""scikit-learn's handwritten digits: real data without a download.

In five domains of different appearance, they stand in for the benchmark of the
FedBN paper (Li et al., ICLR 2021, section 5.1: SVHN, USPS, SynthDigits, MNIST-M
and MNIST): the domains look different and share the labels, the label
distribution and the size.
"""

import dataclasses
from typing import Optional

import numpy as np
from scipy import ndimage
from sklearn import datasets
from sklearn import model_selection

from tff_bn.catalog import datasets as catalog
from tff_bn.common import seeding
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import label_shares

_TEST_SIZE = 360
_SPLIT_SEED = 0
_DOMAIN_SEED = 0
# A value counts the black pixels in a 4x4 block.
_LARGEST_VALUE = 16


def load_digits() -> dataset_lib.Dataset:
  """Loads the digits with a fixed split into training and test data.

  Returns:
    1,437 training and 360 test images of shape `[8, 8, 1]`, float32 in [0, 1],
    of 10 classes, stratified by class.
  """
  digits = datasets.load_digits()
  x_train, x_test, y_train, y_test = model_selection.train_test_split(
      (digits.images / _LARGEST_VALUE).astype(np.float32),
      digits.target,
      test_size=_TEST_SIZE,
      stratify=digits.target,
      random_state=_SPLIT_SEED,
  )
  return dataset_lib.create_dataset(
      'digits', x_train, y_train, x_test, y_test, divisor=_LARGEST_VALUE
  )


def _plain(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  del rng  # Unused.
  return x


def _inverted(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  del rng  # Unused.
  return 1 - x


def _low_contrast(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  del rng  # Unused.
  return 0.4 + 0.2 * x


def _noisy_background(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  # The darker a pixel is, the less noise it gets.
  return x + (1 - x) * rng.uniform(0, 0.7, x.shape)


def _blurred_shifted(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  del rng  # Unused.
  blurred = ndimage.gaussian_filter(x, (0, 0.7, 0.7, 0), mode='constant')
  shifted = np.zeros_like(blurred)
  # One pixel down and to the right.
  shifted[:, 1:, 1:] = blurred[:, :-1, :-1]
  return shifted


# Name -> function of images [n, 8, 8, 1] in [0, 1] and a generator.
_DOMAINS = {
    'plain': _plain,
    'inverted': _inverted,
    'low_contrast': _low_contrast,
    'noisy_background': _noisy_background,
    'blurred_shifted': _blurred_shifted,
}


def load_digits_domains(
    domain_strength: Optional[float] = None,
) -> dataset_lib.Dataset:
  """Loads the digits, each in one of five domains.

  Args:
    domain_strength: How much the domains differ, see
      `tff_bn.catalog.datasets.DOMAIN_STRENGTH`.

  Returns:
    The data of `load_digits`, divided into five domains of the same size
    and label distribution (up to one sample): plain; inverted; low contrast
    (0.4 to 0.6); noisy background; blurred and shifted by one pixel. Each image
    belongs to one domain. The strength changes the images only, not their
    domains.
  """
  strength = catalog.DOMAIN_STRENGTH.default
  if domain_strength is not None:
    strength = domain_strength
  plain = load_digits()
  rng = seeding.generator(None, _DOMAIN_SEED)
  x_train, domain_train = _to_domains(
      plain.x_train, plain.y_train, strength, rng
  )
  x_test, domain_test = _to_domains(plain.x_test, plain.y_test, strength, rng)
  return dataclasses.replace(
      plain,
      name='digits_domains',
      x_train=x_train,
      x_test=x_test,
      domain_train=domain_train,
      domain_test=domain_test,
      domain_names=tuple(_DOMAINS),
  )


def _to_domains(
    x: np.ndarray, y: np.ndarray, strength: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Returns each image as one of the domains shows it, and its domain."""
  changed = np.empty_like(x)
  domain: np.ndarray = np.empty(len(x), np.int32)
  parts = label_shares.deal_by_label(y, len(_DOMAINS), rng)
  for number, (indices, change) in enumerate(zip(parts, _DOMAINS.values())):
    own = x[indices]
    changed[indices] = strength * change(own, rng) + (1 - strength) * own
    domain[indices] = number
  return changed, domain
