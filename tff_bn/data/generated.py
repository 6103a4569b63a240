"""Random data of any shape, for trying out models and programs offline."""

import math

import numpy as np

from tff_bn.common import memory
from tff_bn.common import seeding
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import names

_SEED = 0
# The noise hides the class in a single pixel, but not in an example.
_NOISE = 0.25


def load_generated(name: str) -> dataset_lib.Dataset:
  """Generates random data that a model can learn.

  Each class has a random prototype with values in [0, 1]. An example is half
  the prototype of its class plus half uniform noise, with additional Gaussian
  noise of standard deviation 0.25, clipped to [0, 1]. The labels are balanced.
  The same name gives the same data.

  Args:
    name: `generated:SHAPE:CLASSES`, see `names.parse_generated`.

  Returns:
    The dataset, float32.

  Raises:
    ValueError: If the name has another form, or the data would not fit into
      memory.
  """
  task = names.parse_generated(name)
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
