"""Several datasets side by side, as the domains of one dataset."""

from collections.abc import Callable, Mapping

import numpy as np

from tff_bn.data import dataset as dataset_lib
from tff_bn.data import names

_GREY = 1
_COLOR = 3


def load_domains(
    name: str, load: Callable[[str], dataset_lib.Dataset]
) -> dataset_lib.Dataset:
  """Joins datasets as domains.

  All datasets must have the same classes: label k of one has the meaning of
  label k of another. Grey images become RGB images if another domain has
  color. uint8 images are scaled to [0, 1] if another domain has floats.

  Args:
    name: `domains:NAME=DATASET,...`, see `names.parse_domains`.
    load: Loads the dataset of a domain by its name.

  Returns:
    The dataset, whose domains are in the order of the name.

  Raises:
    ValueError: If the name has another form, or if the datasets differ in the
      number of classes or in the shape of their examples.
  """
  datasets = {
      domain: load(source)
      for domain, source in names.parse_domains(name).items()
  }
  _check_same(
      name,
      'numbers of classes',
      {domain: str(d.num_classes) for domain, d in datasets.items()},
      'label k must mean the same in all domains.',
  )
  datasets = _with_same_channels(datasets)
  _check_same(
      name,
      'shapes',
      {domain: _shape_text(d) for domain, d in datasets.items()},
      'pass image_size=HEIGHTxWIDTH to resize images.',
  )
  parts = tuple(datasets.values())
  has_floats = any(part.x_train.dtype != np.uint8 for part in parts)

  def join(of: Callable[[dataset_lib.Dataset], np.ndarray]) -> np.ndarray:
    arrays = [of(part) for part in parts]
    if has_floats:
      arrays = [
          x / np.float32(255) if x.dtype == np.uint8 else x for x in arrays
      ]
    return np.concatenate(arrays)

  def number(lengths: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(parts), dtype=np.int32), lengths)

  return dataset_lib.create_dataset(
      name,
      join(lambda part: part.x_train),
      np.concatenate([part.y_train for part in parts]),
      join(lambda part: part.x_test),
      np.concatenate([part.y_test for part in parts]),
      num_classes=parts[0].num_classes,
      # Images have channels already.
      is_series=True,
      domain_train=number([len(part.y_train) for part in parts]),
      domain_test=number([len(part.y_test) for part in parts]),
      domain_names=tuple(datasets),
  )


def _check_same(
    name: str, what: str, values: Mapping[str, str], advice: str
) -> None:
  """Checks that all domains have the same value."""
  if len(set(values.values())) > 1:
    listing = ', '.join(f'{domain}: {v}' for domain, v in values.items())
    raise ValueError(
        f'dataset={name}: the domains have different {what} ({listing});'
        f' {advice}'
    )


def _shape_text(dataset: dataset_lib.Dataset) -> str:
  shape = dataset.input_shape
  if len(shape) == 1:
    return f'{shape[0]} features'
  return 'x'.join(map(str, shape))


def _with_same_channels(
    datasets: Mapping[str, dataset_lib.Dataset],
) -> dict[str, dataset_lib.Dataset]:
  """Turns grey images into RGB images if another domain has color."""
  if not any(d.input_shape[2:] == (_COLOR,) for d in datasets.values()):
    return dict(datasets)
  return {domain: _colored(d) for domain, d in datasets.items()}


def _colored(dataset: dataset_lib.Dataset) -> dataset_lib.Dataset:
  if dataset.input_shape[2:] != (_GREY,):
    return dataset
  return dataset.replace_samples(lambda x: np.repeat(x, _COLOR, axis=-1))
