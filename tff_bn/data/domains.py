"""Several datasets side by side, as the domains of one dataset."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Optional

import numpy as np

from tff_bn.catalog import datasets as catalog
from tff_bn.catalog import tasks
from tff_bn.data import arrays
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import label_counts
from tff_bn.data import loading

_GREY = 1
_COLOR = 3


def load_domains(
    name: str,
    data_dir: Optional[str] = None,
    image_size: Optional[tuple[int, int]] = None,
    *,
    task: Optional[str] = None,
    is_part: bool = False,
) -> dataset_lib.Dataset:
  """Loads datasets and joins them, see `join_domains` and `load_dataset`."""
  load = functools.partial(
      loading.load_resized,
      data_dir=data_dir,
      image_size=image_size,
      task=task,
      is_part=True,
  )
  return join_domains(
      name,
      {
          domain: load(source)
          for domain, source in catalog.parse_domains(name).items()
      },
      is_part=is_part,
  )


def join_domains(
    name: str,
    datasets: Mapping[str, dataset_lib.Dataset],
    *,
    is_part: bool = False,
    noun: str = 'domain',
) -> dataset_lib.Dataset:
  """Joins datasets as domains.

  All datasets need the same task. In a classification, the classes are the
  union of the datasets' classes, see `classes.union`: classes with the same
  name are one class, or with the same number if they have no names. A domain
  may lack classes. In other tasks, the domains' classes, or the columns of
  their labels, must be the same; a domain may lack some only in a segmentation
  without names of classes. Grey images become RGB images if another domain has
  color. uint8 images are scaled to [0, 1] if another domain has floats.

  Args:
    name: The name of the joined dataset.
    datasets: The dataset of each domain.
    is_part: Whether all domains together may lack training samples of a class,
      see `create_dataset`.
    noun: What errors call a domain.

  Returns:
    The dataset, whose domains are in the order of `datasets`.

  Raises:
    ValueError: If the datasets have different tasks, if their classes can't be
      matched, if no domain has training samples of a class, or if the datasets
      differ in the shape of their examples.
  """
  _check_same(
      name,
      'tasks',
      {domain: part.task for domain, part in datasets.items()},
      'pass the task, or use datasets with the same one.',
  )
  first = next(iter(datasets.values()))
  if first.task == tasks.CLASSIFICATION:
    class_names = classes.union(name, datasets)
    datasets = {
        domain: classes.relabeled(part, class_names)
        if class_names
        else classes.by_number(part)
        for domain, part in datasets.items()
    }
  else:
    class_names = first.class_names
    _check_same_classes(name, datasets)
  datasets = _with_same_channels(datasets)
  _check_same(
      name,
      'shapes',
      {domain: _shape_text(d) for domain, d in datasets.items()},
      'pass image_size=HEIGHTxWIDTH to resize images.',
      noun,
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

  dataset = dataset_lib.create_dataset(
      name,
      join(lambda part: part.x_train),
      np.concatenate([part.y_train for part in parts]),
      join(lambda part: part.x_test),
      np.concatenate([part.y_test for part in parts]),
      num_classes=_num_classes(parts),
      task=first.task,
      is_part=is_part,
      # Images have channels already.
      is_series=True,
      class_names=class_names,
      divisor=_common_divisor(parts) if has_floats else 1,
      image_size=_common_size(parts),
      domain_train=number([len(part.y_train) for part in parts]),
      domain_test=number([len(part.y_test) for part in parts]),
      domain_names=tuple(datasets),
  )
  if not is_part:
    _check_trained(dataset, noun)
  return dataset


def _num_classes(parts: Sequence[dataset_lib.Dataset]) -> Optional[int]:
  """Returns the number of classes; None if it is found from the labels."""
  if parts[0].num_classes is None:
    return None
  num_classes = max(part.num_classes or 0 for part in parts)
  if not parts[0].class_names and num_classes == 1 + max(
      max(part.y_train.max(), part.y_test.max()) for part in parts
  ):
    return None  # Gaps in the numbers are warned of.
  return num_classes


def _check_trained(dataset: dataset_lib.Dataset, noun: str) -> None:
  """Checks that some domain has training samples of each tested class."""
  if dataset.task not in (tasks.CLASSIFICATION, tasks.SEGMENTATION):
    return
  untrained = np.setdiff1d(
      arrays.present(dataset.y_test), arrays.present(dataset.y_train)
  )
  if untrained.size:
    names_or_numbers = label_counts.column_names(dataset)
    raise ValueError(
        f'dataset={dataset.name}: no {noun} has training samples of the class'
        f' {names_or_numbers[untrained[0]]}, of which there are test samples.'
        f' Add such samples to the training data of a {noun}, or remove them'
        ' from the test data.'
    )


def _common_divisor(
    parts: Sequence[dataset_lib.Dataset],
) -> Optional[float]:
  """Returns the divisor of all parts; `None` if they have several."""
  divisors = {part.total_divisor for part in parts}
  return divisors.pop() if len(divisors) == 1 else None


def _common_size(
    parts: Sequence[dataset_lib.Dataset],
) -> Optional[tuple[int, int]]:
  """Returns the size to which all parts were resized; `None`: not all."""
  sizes = {part.image_size for part in parts}
  return sizes.pop() if len(sizes) == 1 else None


def _check_same(
    name: str,
    what: str,
    values: Mapping[str, str],
    advice: str,
    noun: str = 'domain',
) -> None:
  """Checks that all domains have the same value."""
  if len(set(values.values())) > 1:
    listing = ', '.join(f'{domain}: {v}' for domain, v in values.items())
    raise ValueError(
        f'dataset={name}: the {noun}s have different {what} ({listing});'
        f' {advice}'
    )


def _check_same_classes(
    name: str, datasets: Mapping[str, dataset_lib.Dataset]
) -> None:
  """Checks that the labels of datasets have the same names and columns."""
  task = next(iter(datasets.values())).task
  _check_same(
      name,
      'names of classes',
      {d: ', '.join(part.class_names) for d, part in datasets.items()},
      f'with task={task}, all domains need the same ones in the same order.',
  )
  # The masks of a segmentation have the shapes of its images.
  if task != tasks.SEGMENTATION:
    _check_same(
        name,
        'numbers of columns in their labels',
        {d: str(part.num_outputs) for d, part in datasets.items()},
        f'with task={task}, all domains need the same columns.',
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
