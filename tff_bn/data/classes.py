"""Matches the classes of several datasets by their names.

The classes of some datasets have numbers only. These numbers count as their
names: class 3 is the class `3`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tff_bn.catalog import tasks
from tff_bn.common import spelling
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import label_counts


def numbers(num_classes: int) -> tuple[str, ...]:
  """Returns the numbers of classes as names."""
  return tuple(map(str, range(num_classes)))


def without_numbers(dataset: dataset_lib.Dataset) -> dataset_lib.Dataset:
  """Returns the dataset without names that are the numbers of the classes."""
  if dataset.class_names == numbers(dataset.num_outputs):
    return dataset.unchecked(class_names=())
  return dataset


def without_unused(dataset: dataset_lib.Dataset) -> dataset_lib.Dataset:
  """Returns a dataset of named classes without those that have no sample."""
  return relabeled(dataset, _present(dataset))


def union(
    name: str, datasets: Mapping[str, dataset_lib.Dataset]
) -> tuple[str, ...]:
  """Returns the names of the classes of several datasets.

  Args:
    name: The name of the dataset that consists of them, which errors name.
    datasets: The datasets by domain.

  Returns:
    The names that occur in any of the datasets, sorted. If all datasets have
    the same names in the same order, this order is kept. Empty if the classes
    of a dataset have numbers only: then the classes of all have numbers.

  Raises:
    ValueError: If the classes of some datasets have numbers only, and the names
      in the others are not such numbers.
  """
  orders = {d: part.class_names for d, part in datasets.items()}
  found = set().union(*orders.values())
  numbered = [domain for domain, order in orders.items() if not order]
  if not numbered:
    if len(set(orders.values())) == 1:
      return next(iter(orders.values()))
    return tuple(sorted(found))
  largest = max(datasets[domain].num_outputs for domain in numbered)
  known = all(_is_number(n) and int(n) < largest for n in found)
  # Other numbers might count from 1, or be gapless in the other datasets.
  if not known and found != set(numbers(len(found))):
    domain = next(domain for domain in orders if domain not in numbered)
    raise ValueError(
        f'dataset={name}: the classes of the domain {domain} have names'
        f' ({spelling.name_some(orders[domain])}), but the classes of'
        f' {numbered[0]} have only the numbers 0 to'
        f' {datasets[numbered[0]].num_outputs - 1}, so they cannot be matched.'
        ' Use datasets whose classes have names for all domains, such as'
        ' folder:PATH.'
    )
  return ()


def by_number(dataset: dataset_lib.Dataset) -> dataset_lib.Dataset:
  """Returns a dataset whose labels are the numbers that its classes have.

  Its classes have numbers only, or numbers as names.
  """
  if not dataset.class_names:
    return dataset
  return _relabeled(
      dataset, int, num_classes=1 + max(map(int, dataset.class_names))
  )


def relabeled(
    dataset: dataset_lib.Dataset, names: Sequence[str]
) -> dataset_lib.Dataset:
  """Returns a dataset whose labels are positions in other names.

  The names may lack only classes of which the dataset has no sample. If they
  are its classes already, the same object is returned.
  """
  names = tuple(names)
  if dataset.class_names == names:
    return dataset
  positions = {name: label for label, name in enumerate(names)}
  return _relabeled(
      dataset,
      positions.__getitem__,
      num_classes=len(names),
      class_names=names,
  )


def _relabeled(
    dataset: dataset_lib.Dataset,
    label_of: Callable[[str], int],
    num_classes: int,
    class_names: tuple[str, ...] = (),
) -> dataset_lib.Dataset:
  """Returns a dataset with other labels, given a function of the names."""
  old = _labels(dataset)
  new = np.array([label_of(name) for name in _present(dataset)], np.int32)
  return dataset.unchecked(
      y_train=new[np.searchsorted(old, dataset.y_train)],
      y_test=new[np.searchsorted(old, dataset.y_test)],
      num_classes=num_classes,
      class_names=class_names,
  )


def matched(
    dataset: dataset_lib.Dataset, names: Sequence[str]
) -> dataset_lib.Dataset:
  """Gives a dataset the labels of a trained model; it may lack classes.

  `names` are the names of the model's classes in the order of its outputs. For
  classes without names, they are their numbers. Only the labels of a
  classification are changed. In other tasks, the names must be the same, and a
  segmentation without names may lack the last classes.

  Raises:
    ValueError: If a class of the dataset is not one of the model's, if only one
      of them has names, or if the task has no classes.
  """
  names = tuple(names)
  if dataset.task != tasks.CLASSIFICATION:
    return _with_same_classes(dataset, names)
  model_has_names = names != numbers(len(names))
  present = _present(dataset)
  if bool(dataset.class_names) != model_has_names and not all(
      map(_is_number, names if model_has_names else present)
  ):
    named, other = 'its classes', 'the classes of the model'
    if model_has_names:
      named, other = other, named
    raise ValueError(
        f'dataset={dataset.name} cannot be matched with the model: {named} have'
        f' names ({spelling.name_some(names if model_has_names else present)}),'
        f' but {other} have only numbers. Use a dataset whose classes have'
        f' {"names" if model_has_names else "numbers"}.'
    )
  unknown = [name for name in present if name not in names]
  if unknown:
    raise ValueError(
        f'dataset={dataset.name} has classes that the model does not know:'
        f' {spelling.name_some(unknown)}. Its classes are'
        f' {spelling.name_some(names)}.'
        f'{spelling.suggestion(unknown[0], names)}'
    )
  if not dataset.class_names and not model_has_names:
    return dataset  # It keeps its number of classes.
  return relabeled(dataset, names)


def _with_same_classes(
    dataset: dataset_lib.Dataset, names: tuple[str, ...]
) -> dataset_lib.Dataset:
  """Checks the names of a trained model for tasks other than classification."""
  if dataset.num_classes is None:
    raise ValueError(
        f'dataset={dataset.name} has the task {dataset.task}, which has no'
        f' classes, but the model has {len(names)}:'
        f' {spelling.name_some(names)}.'
    )
  own = dataset.class_names or numbers(dataset.num_classes)
  if own == names:
    return dataset
  may_lack = dataset.task == tasks.SEGMENTATION and not dataset.class_names
  if may_lack and own == names[: len(own)]:
    return dataset.unchecked(num_classes=len(names))
  raise ValueError(
      f'dataset={dataset.name} has the classes {spelling.name_some(own)}, but'
      f' the model has {spelling.name_some(names)}; with task={dataset.task},'
      ' they must be the same, in the same order.'
  )


def missing_by_domain(dataset: dataset_lib.Dataset) -> dict[str, list[str]]:
  """Returns the names or numbers of the classes that domains lack.

  Only domains that have no training samples of some class are in the result. A
  regression has no classes.
  """
  missing: dict[str, list[str]] = {}
  if dataset.num_classes is None or not dataset.domain_names:
    return missing
  names = label_counts.column_names(dataset)
  counts = label_counts.count(
      dataset,
      [
          np.flatnonzero(dataset.domain_train == number)
          for number in range(len(dataset.domain_names))
      ],
  )
  for domain, row in zip(dataset.domain_names, counts):
    lacking = [name for name, count in zip(names, row) if not count]
    if lacking:
      missing[domain] = lacking
  return missing


def _labels(dataset: dataset_lib.Dataset) -> np.ndarray:
  """Returns the labels of which a dataset has samples, in their order."""
  return np.union1d(dataset.y_train, dataset.y_test)


def _present(dataset: dataset_lib.Dataset) -> list[str]:
  """Returns the names, or numbers, of the classes with samples."""
  names = dataset.class_names
  return [names[n] if names else str(n) for n in _labels(dataset).tolist()]


def _is_number(name: str) -> bool:
  return name.isdecimal() and name == str(int(name))
