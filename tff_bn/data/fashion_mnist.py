"""Fashion-MNIST, from the places where it usually is.

Xiao, Rasul, Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking
Machine Learning Algorithms, 2017, arXiv:1708.07747.
"""

from collections.abc import Sequence
import dataclasses
from typing import Optional

import numpy as np

from tff_bn.catalog import datasets
from tff_bn.common import seeding
from tff_bn.data import appearances
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import idx_files
from tff_bn.data import label_shares

_DEBIAN_PACKAGE = 'dataset-fashion-mnist'
_DEBIAN_FOLDER = '/usr/share/datasets/fashion-mnist'
_TFDS_NAME = f'{datasets.TFDS.prefix}fashion_mnist'
_CLASS_NAMES = (
    'T-shirt/top',
    'Trouser',
    'Pullover',
    'Dress',
    'Coat',
    'Sandal',
    'Shirt',
    'Sneaker',
    'Bag',
    'Ankle boot',
)
_DOMAIN_SEED = 0
# Training images of MNIST, SVHN, USPS, SynthDigits and MNIST-M in appendix E.6
# of the FedBN paper (Li et al., ICLR 2021), table 15.
_DOMAIN_SIZES = {
    'plain': 5600,
    'inverted': 7943,
    'low_contrast': 743,
    'noisy_background': 39116,
    'blurred_shifted': 5600,
}
_WHITE = 255


def load_fashion_mnist(data_dir: Optional[str] = None) -> dataset_lib.Dataset:
  """Loads Fashion-MNIST from the first place that has it.

  The places are the IDX files in `data_dir`, those of the Debian package
  `dataset-fashion-mnist`, and TensorFlow Datasets, which downloads the data if
  it is not in `data_dir` or its own folder.

  Args:
    data_dir: A folder with the four IDX files, or the folder of prepared
      datasets of TensorFlow Datasets.

  Returns:
    60,000 training and 10,000 test images of shape `[28, 28, 1]`, uint8, of ten
    classes.

  Raises:
    ValueError: If no place has the data, or the files are damaged.
  """
  name = 'fashion_mnist'
  for folder in (data_dir, _DEBIAN_FOLDER):
    if folder is not None and idx_files.has_files(folder):
      return _named(name, idx_files.load_idx(datasets.IDX.prefix + folder))
  # The import takes seconds, and is needed only if there are no files.
  from tff_bn.data import tfds_source

  try:
    return _named(name, tfds_source.load_tfds(_TFDS_NAME, data_dir))
  except ValueError as error:
    given = 'not given' if data_dir is None else 'which has no such files'
    raise ValueError(
        f'dataset={name} is in none of its three places: data_dir with the four'
        f' IDX files ({given}); {_DEBIAN_FOLDER}, where `apt-get install'
        f' {_DEBIAN_PACKAGE}` puts them; TensorFlow Datasets ({error})'
    ) from error


def load_fashion_mnist_domains(
    data_dir: Optional[str] = None, domain_strength: Optional[float] = None
) -> dataset_lib.Dataset:
  """Loads Fashion-MNIST, each image in one of five domains of unequal size.

  Args:
    data_dir: See `load_fashion_mnist`.
    domain_strength: How much the domains differ, see
      `tff_bn.catalog.datasets.DOMAIN_STRENGTH`.

  Returns:
    The data of `load_fashion_mnist` in the domains of `appearances`. The
    numbers of training images are to each other as those of table 15 in the
    FedBN paper, 743 to 39,116. A domain has a fifth of the test images, with
    as many of each class as the others (up to one).

  Raises:
    ValueError: See `load_fashion_mnist`.
  """
  plain = load_fashion_mnist(data_dir)
  rng = seeding.generator(None, _DOMAIN_SEED)

  num_train = len(plain.x_train)
  ends = np.cumsum([_DOMAIN_SIZES[name] for name in appearances.NAMES])
  ends = np.rint(num_train * ends / ends[-1]).astype(np.int64)
  parts = np.split(rng.permutation(num_train), ends[:-1])
  x_train, domain_train = _shown(plain.x_train, parts, domain_strength, rng)

  parts = label_shares.deal_by_label(plain.y_test, len(appearances.NAMES), rng)
  x_test, domain_test = _shown(plain.x_test, parts, domain_strength, rng)
  return dataclasses.replace(
      plain,
      name='fashion_mnist_domains',
      x_train=x_train,
      x_test=x_test,
      domain_train=domain_train,
      domain_test=domain_test,
      domain_names=appearances.NAMES,
  )


def _shown(
    x: np.ndarray,
    parts: Sequence[np.ndarray],
    strength: Optional[float],
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns `appearances.show` of uint8 images, which stay uint8."""
  unit = x.astype(np.float32) / _WHITE
  shown, domain = appearances.show(unit, parts, strength, rng)
  return np.rint(shown * _WHITE).astype(np.uint8), domain


def _named(name: str, dataset: dataset_lib.Dataset) -> dataset_lib.Dataset:
  return dataclasses.replace(dataset, name=name, class_names=_CLASS_NAMES)
