"""Fashion-MNIST, from the places where it usually is.

Xiao, Rasul, Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking
Machine Learning Algorithms, 2017, arXiv:1708.07747.
"""

from collections.abc import Sequence
import dataclasses
from typing import Optional

import numpy as np

from tff_bn.catalog import datasets
from tff_bn.data import appearances
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import idx_files

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
# Training images of MNIST, SVHN, USPS, SynthDigits and MNIST-M in appendix E.6
# of the FedBN paper (Li et al., ICLR 2021), table 15.
_DOMAIN_SIZES = {
    'plain': 5600,
    'inverted': 7943,
    'low_contrast': 743,
    'noisy_background': 39116,
    'blurred_shifted': 5600,
}


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
    The data of `load_fashion_mnist` in the domains of `appearances`. Their
    shares of the training images are those of table 15 in the FedBN paper,
    1.3 to 66 %. A domain has a fifth of the test images, with as many of each
    class as the others (up to one).

  Raises:
    ValueError: See `load_fashion_mnist`.
  """
  return appearances.in_domains(
      load_fashion_mnist(data_dir),
      'fashion_mnist_domains',
      domain_strength,
      _divide_by_sizes,
  )


def _divide_by_sizes(
    labels: np.ndarray, rng: np.random.Generator
) -> Sequence[np.ndarray]:
  num_images = len(labels)
  ends = np.cumsum([_DOMAIN_SIZES[name] for name in appearances.NAMES])
  ends = np.rint(num_images * ends / ends[-1]).astype(np.int64)
  return np.split(rng.permutation(num_images), ends[:-1])


def _named(name: str, dataset: dataset_lib.Dataset) -> dataset_lib.Dataset:
  return dataclasses.replace(dataset, name=name, class_names=_CLASS_NAMES)
