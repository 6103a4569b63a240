"""Five appearances of the same grey images, as five clients may have them.

They stand in for the benchmark of the FedBN paper (Li et al., ICLR 2021,
section 5.1: SVHN, USPS, SynthDigits, MNIST-M and MNIST): the domains look
different and share the labels.
"""

from collections.abc import Sequence
from typing import Optional

import numpy as np
from scipy import ndimage

from tff_bn.catalog import datasets

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


def show(
    x: np.ndarray,
    parts: Sequence[np.ndarray],
    strength: Optional[float],
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
  """Shows each image in the appearance of its domain.

  Args:
    x: Images `[n, height, width, 1]`, floating point in [0, 1].
    parts: The indices of the images of each domain, in the order of `NAMES`;
      each image is in one of them.
    strength: How much the domains differ, see
      `tff_bn.catalog.datasets.DOMAIN_STRENGTH`. None: its default.
    rng: The source of the noise.

  Returns:
    The images, of the shape and dtype of `x`, and the number of each one's
    domain, int32.
  """
  if strength is None:
    strength = datasets.DOMAIN_STRENGTH.default
  changed = np.empty_like(x)
  domain: np.ndarray = np.empty(len(x), np.int32)
  for number, (indices, change) in enumerate(zip(parts, _APPEARANCES.values())):
    own = x[indices]
    changed[indices] = strength * change(own, rng) + (1 - strength) * own
    domain[indices] = number
  return changed, domain
