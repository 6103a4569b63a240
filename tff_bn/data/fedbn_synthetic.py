"""The synthetic data of the FedBN paper (Li et al., ICLR 2021, appendix F)."""

import numpy as np

from tff_bn.common import seeding
from tff_bn.data import dataset as dataset_lib

DOMAIN_NAMES = ('identity', 'correlated')

_SEED = 0
_NUM_FEATURES = 10
_MEAN = 1.0
_CORRELATION = 0.5
_NUM_TRAIN = 500
_NUM_TEST = 500


def covariances() -> tuple[np.ndarray, np.ndarray]:
  """Returns the covariance of each domain, of shape `[features, features]`.

  The first is the identity. The second has the same diagonal and the entries
  0.5^|i - j| off it.
  """
  positions: np.ndarray = np.arange(_NUM_FEATURES)
  distances = np.abs(positions[:, np.newaxis] - positions)
  return np.eye(_NUM_FEATURES), _CORRELATION**distances


def load_fedbn_synthetic() -> dataset_lib.Dataset:
  """Generates two pairs of Gaussian classes, one pair for each domain.

  In both domains, class 0 has the mean (-1, ..., -1) and class 1 the mean
  (1, ..., 1). The classes of a domain have the same covariance, which differs
  between the domains, see `covariances`. The paper says that one covariance is
  the identity and that the other has non-zero entries off its diagonal; the
  means, the number of features and of examples, and these entries are not
  legible in its text and were chosen here.

  Returns:
    500 training and 500 test examples of each domain, with balanced labels:
    vectors of 10 features, float32.
  """
  rng = seeding.generator(None, _SEED)
  roots = [np.linalg.cholesky(covariance) for covariance in covariances()]

  def draw(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    domain: np.ndarray = np.repeat(np.arange(2, dtype=np.int32), number)
    y = np.concatenate([rng.permutation(np.arange(number) % 2) for _ in roots])
    normal = rng.standard_normal((len(y), _NUM_FEATURES))
    x = np.concatenate(
        [normal[domain == n] @ root.T for n, root in enumerate(roots)]
    )
    return x + _MEAN * (2 * y - 1)[:, np.newaxis], y, domain

  x_train, y_train, domain_train = draw(_NUM_TRAIN)
  x_test, y_test, domain_test = draw(_NUM_TEST)
  return dataset_lib.create_dataset(
      'fedbn_synthetic',
      x_train,
      y_train,
      x_test,
      y_test,
      num_classes=2,
      domain_train=domain_train,
      domain_test=domain_test,
      domain_names=DOMAIN_NAMES,
  )
