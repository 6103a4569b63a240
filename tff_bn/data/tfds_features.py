"""Checks which classes the files of a dataset of TensorFlow Datasets name.

TensorFlow Datasets imports the modules of the classes in `features.json`, so a
dataset that somebody else has prepared could run code.
"""

from collections.abc import Iterator
import json
import pathlib
import re
from typing import Any

_PACKAGE = 'tensorflow_datasets.'
# The keys of a class, in the old form of the file and in the new one.
_KEYS = ('type', 'pythonClassName', 'python_class_name')


def check(name: str, data_dir: pathlib.Path) -> None:
  """Checks that a prepared dataset has classes of TensorFlow Datasets only.

  `name` is its name in TensorFlow Datasets. The folder of the prepared
  datasets, `data_dir`, need not exist.

  Raises:
    ValueError: If a file of the dataset names another class, or is damaged.
  """
  wanted = _plain(re.split('[/:,]', name)[0])
  # Below the dataset's name are a configuration, if it has some, and a version.
  paths = [
      path
      for pattern in ('*/*/features.json', '*/*/*/features.json')
      for path in data_dir.glob(pattern)
      if _plain(path.relative_to(data_dir).parts[0]) == wanted
  ]
  for path in sorted(paths):
    try:
      features = json.loads(path.read_bytes())
    except ValueError as error:
      raise ValueError(f'dataset=tfds:{name}: {path} is damaged.') from error
    for class_name in _classes(features):
      if not class_name.startswith(_PACKAGE):
        raise ValueError(
            f'dataset=tfds:{name}: {path} names the class {class_name}, which'
            ' is not imported because it is not part of TensorFlow Datasets.'
        )


def _plain(name: str) -> str:
  """Returns a name without what differs between `MyData` and `my_data`."""
  return name.replace('_', '').lower()


def _classes(value: Any) -> Iterator[str]:
  """Yields the names of the classes in a JSON value."""
  if isinstance(value, dict):
    for key, inner in value.items():
      if key in _KEYS and isinstance(inner, str):
        yield inner
      yield from _classes(inner)
  elif isinstance(value, list):
    for inner in value:
      yield from _classes(inner)
