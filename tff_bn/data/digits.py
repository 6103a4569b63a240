"""scikit-learn's handwritten digits: real data without a download."""

from typing import Optional

import numpy as np
from sklearn import datasets
from sklearn import model_selection

from tff_bn.data import appearances
from tff_bn.data import dataset as dataset_lib

_TEST_SIZE = 360
_SPLIT_SEED = 0
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
  return appearances.in_domains(
      load_digits(),
      'digits_domains',
      domain_strength,
      appearances.divide_evenly,
  )
