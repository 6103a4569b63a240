"""Loads a dataset by its name."""

from collections.abc import Sequence
import functools
import os
from typing import Optional

from tff_bn.common import checks
from tff_bn.common import spelling
from tff_bn.data import arrays
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import digits
from tff_bn.data import digits_domains
from tff_bn.data import domains
from tff_bn.data import emnist
from tff_bn.data import fedbn_synthetic
from tff_bn.data import generated
from tff_bn.data import image_folder
from tff_bn.data import images
from tff_bn.data import names
from tff_bn.data import npz_file
from tff_bn.data import tfds_source


def load_dataset(
    name: str,
    data_dir: Optional[str] = None,
    image_size: Optional[tuple[int, int]] = None,
    class_names: Optional[Sequence[str]] = None,
) -> dataset_lib.Dataset:
  """Loads a dataset into memory and checks it.

  Args:
    name: One of `names.DATASET_NAMES`, or a name described by
      `names.OTHER_DATASETS`.
    data_dir: The folder for downloaded datasets (`tfds:`, `emnist`
      and `femnist`).
      Default: the folder that their libraries choose.
    image_size: The height and width to resize images to. Default: no resizing.
    class_names: The names of the classes of a trained model in the order of its
      outputs, or their numbers as strings if they have no names. The dataset
      gets the labels of the model, and it may lack classes. Default: the
      dataset keeps its own labels.

  Returns:
    The dataset.

  Raises:
    TypeError: If the name is no string.
    ValueError: If the name is unknown or the data can't be used.
  """
  checks.check_type('dataset', name, str, 'be the name of a dataset')
  if not checks.is_utf8(name):
    raise ValueError(
        f'dataset={name!r} is not UTF-8, so files cannot record it; rename the'
        ' file or folder.'
    )
  if image_size is not None and min(image_size) < 1:
    raise ValueError(
        f'image_size={image_size[0]}x{image_size[1]}: height and width must'
        ' be at least 1.'
    )
  if data_dir is not None:
    data_dir = os.path.expanduser(data_dir)
  if class_names is not None:
    if not class_names:
      raise ValueError(
          f'dataset={name}: class_names is empty; give the names of the'
          " model's classes, or their numbers as strings."
      )
    class_names = dataset_lib.check_class_names(
        f'dataset={name}', class_names, len(class_names)
    )
  is_part = class_names is not None
  dataset = _load_resized(name, data_dir, image_size, is_part=is_part)
  return (
      dataset if class_names is None else classes.matched(dataset, class_names)
  )


def _load_resized(
    name: str,
    data_dir: Optional[str],
    image_size: Optional[tuple[int, int]],
    *,
    is_part: bool,
) -> dataset_lib.Dataset:
  """Loads a dataset, which may lack classes if `is_part` is true."""
  dataset = _load(name, data_dir, image_size, is_part=is_part)
  if image_size is None or dataset.input_shape[:-1] == tuple(image_size):
    return dataset
  if len(dataset.input_shape) != 3:
    raise ValueError(
        f'image_size={image_size[0]}x{image_size[1]} is for images, but'
        f' dataset={name} has {arrays.samples_text(dataset.input_shape)}.'
    )
  for x in (dataset.x_train, dataset.x_test):
    images.check_memory(
        name, len(x), image_size, x.shape[-1] * x.dtype.itemsize
    )
  return dataset.replace_samples(
      functools.partial(images.resize_array, image_size=image_size)
  )


def _load(
    name: str,
    data_dir: Optional[str],
    image_size: Optional[tuple[int, int]],
    *,
    is_part: bool,
) -> dataset_lib.Dataset:
  if name.startswith(names.TFDS_PREFIX):
    return tfds_source.load_tfds(name, data_dir, image_size)
  if name.startswith(names.DOMAINS_PREFIX):
    return domains.load_domains(
        name,
        functools.partial(
            _load_resized,
            data_dir=data_dir,
            image_size=image_size,
            is_part=True,
        ),
        is_part=is_part,
    )
  if name.startswith(names.GENERATED_PREFIX):
    return generated.load_generated(name)
  if name.startswith(names.FOLDER_PREFIX):
    return image_folder.load_image_folder(name, image_size, is_part=is_part)
  if names.is_other_dataset(name):
    return npz_file.load_npz(name, is_part=is_part)
  match name:
    case 'digits':
      return digits.load_digits()
    case 'digits_domains':
      return digits_domains.load_digits_domains()
    case 'emnist' | 'femnist':
      return emnist.load_emnist(data_dir, name)
    case 'emnist_synthetic':
      return emnist.load_emnist_synthetic()
    case 'fedbn_synthetic':
      return fedbn_synthetic.load_fedbn_synthetic()
  raise ValueError(
      f'dataset={name} is unknown; the datasets are'
      f' {", ".join(names.DATASET_NAMES)}, and {names.OTHER_DATASETS}.'
      f'{spelling.suggestion(name, names.DATASET_NAMES)}'
  )
