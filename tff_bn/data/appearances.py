"""Five appearances of the same grey images, as five clients may have them.

They stand in for the benchmark of the FedBN paper (Li et al., ICLR 2021,
section 5.1: SVHN, USPS, SynthDigits, MNIST-M and MNIST): the domains look
different and share the labels.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Optional

import numpy as np
from scipy import ndimage

from tff_bn.catalog import datasets
from tff_bn.common import seeding
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import label_shares

_SEED = 0
_WHITE = 255  # In uint8.
# The side of the images, in pixels, for which these lengths are given.
_SIDE = 8
_BLUR = 0.7
_SHIFT = 1


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
  height, width = x.shape[1:3]
  sigmas = (0, _BLUR * height / _SIDE, _BLUR * width / _SIDE, 0)
  blurred = ndimage.gaussian_filter(x, sigmas, mode='constant')
  down, right = (round(_SHIFT * side / _SIDE) for side in (height, width))
  shifted = np.zeros_like(blurred)
  shifted[:, down:, right:] = blurred[:, : height - down, : width - right]
  return shifted


# Name -> function of images [n, height, width, 1] in [0, 1] and a generator.
_APPEARANCES = {
    'plain': _plain,
    'inverted': _inverted,
    'low_contrast': _low_contrast,
    'noisy_background': _noisy_background,
    'blurred_shifted': _blurred_shifted,
}
NAMES = tuple(_APPEARANCES)


def in_domains(
    plain: dataset_lib.Dataset,
    name: str,
    strength: Optional[float],
    divide_training: Callable[
        [np.ndarray, np.random.Generator], Sequence[np.ndarray]
    ],
) -> dataset_lib.Dataset:
  """Returns a dataset of grey images, each in the appearance of a domain.

  Args:
    plain: The images `[n, height, width, 1]`: floating point in [0, 1], or
      uint8.
    name: The new dataset's name.
    strength: How much the domains differ, see
      `tff_bn.catalog.datasets.DOMAIN_STRENGTH`. None: its default.
    divide_training: Returns the indices of each domain's training images, given
      all labels. Each image is in one domain. The test images are divided by
      `divide_evenly`.

  Returns:
    The images, with the dtype of `plain`, in the domains `NAMES`.
  """
  if strength is None:
    strength = datasets.DOMAIN_STRENGTH.default
  rng = seeding.generator(None, _SEED)
  x_train, domain_train = _shown(
      plain.x_train, divide_training(plain.y_train, rng), strength, rng
  )
  x_test, domain_test = _shown(
      plain.x_test, divide_evenly(plain.y_test, rng), strength, rng
  )
  return dataclasses.replace(
      plain,
      name=name,
      x_train=x_train,
      x_test=x_test,
      domain_train=domain_train,
      domain_test=domain_test,
      domain_names=NAMES,
  )


def divide_evenly(
    labels: np.ndarray, rng: np.random.Generator
) -> Sequence[np.ndarray]:
  """Divides images into domains with as many of each class, up to one."""
  return label_shares.deal_by_label(labels, len(NAMES), rng)


def _shown(
    x: np.ndarray,
    parts: Sequence[np.ndarray],
    strength: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns each image as its domain shows it, and the domains' numbers."""
  is_integer = x.dtype == np.uint8
  unit = x.astype(np.float32) / _WHITE if is_integer else x
  changed = np.empty_like(unit)
  domain: np.ndarray = np.empty(len(x), np.int32)
  for number, (indices, change) in enumerate(zip(parts, _APPEARANCES.values())):
    own = unit[indices]
    changed[indices] = strength * change(own, rng) + (1 - strength) * own
    domain[indices] = number
  if is_integer:
    changed = np.rint(changed * _WHITE).astype(np.uint8)
  return changed, domain
