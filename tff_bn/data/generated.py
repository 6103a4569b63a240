"""Random data, generated offline.

Data of any shape, for trying out models and programs; and the synthetic data of
the FedBN paper (Li et al., ICLR 2021, appendix F).
"""

import math

import numpy as np

from tff_bn.catalog import datasets
from tff_bn.common import memory
from tff_bn.common import seeding
from tff_bn.data import dataset as dataset_lib

_SEED = 0
# The noise hides the class in a single pixel, but not in an example.
_NOISE = 0.25
# Of the FedBN paper's data.
DOMAIN_NAMES = ('identity', 'correlated')
_NUM_FEATURES = 10
_MEAN = 1.0
_CORRELATION = 0.5
_NUM_TRAIN = 500
_NUM_TEST = 500


def load_generated(name: str) -> dataset_lib.Dataset:
  """Generates random data that a model can learn.

  Each class has a random prototype with values in [0, 1]. An example is half
  the prototype of its class plus half uniform noise, with additional Gaussian
  noise of standard deviation 0.25, clipped to [0, 1]. The labels are balanced.
  The same name gives the same data.

  Args:
    name: `generated:SHAPE:CLASSES`, see `datasets.parse_generated`.

  Returns:
    The dataset, float32.

  Raises:
    ValueError: If the name has another form, or the data would not fit into
      memory.
  """
  task = datasets.parse_generated(name)
  num_examples = task.num_classes + task.num_train + task.num_test
  memory.check_fits(
      f'dataset={name} is too large: its {num_examples} examples and prototypes'
      ' of classes',
      num_examples * math.prod(task.shape) * np.dtype(np.float32).itemsize,
  )
  rng = seeding.generator(None, _SEED)
  prototypes = rng.random((task.num_classes, *task.shape), np.float32)

  def draw(number: int) -> tuple[np.ndarray, np.ndarray]:
    y = rng.permutation(np.arange(number) % task.num_classes)
    x = prototypes[y] + rng.random((number, *task.shape), np.float32)
    x /= 2
    x += _NOISE * rng.standard_normal(x.shape, np.float32)
    return np.clip(x, 0, 1, out=x), y

  return dataset_lib.create_dataset(
      name, *draw(task.num_train), *draw(task.num_test), task.num_classes
  )


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
