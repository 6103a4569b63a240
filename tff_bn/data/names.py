"""Names of the datasets; importing this imports no TensorFlow."""

from collections.abc import Callable
import os
import re
from typing import NamedTuple, Optional

from tff_bn.common import spelling

# Name -> what the dataset is.
DATASET_NAMES = {
    'digits': "scikit-learn's 1,797 handwritten digits of 8x8 pixels (offline)",
    'digits_domains': (
        'the same digits in five domains: plain, inverted, low contrast, noisy'
        ' background, blurred and shifted (offline)'
    ),
    'emnist': (
        "TensorFlow Federated's EMNIST: digits of 3,383 writers, 28x28 pixels"
        ' (downloaded on first use)'
    ),
    'femnist': (
        "TensorFlow Federated's EMNIST with all 62 digits and letters of 3,400"
        ' writers, 28x28 pixels (downloaded on first use)'
    ),
    'emnist_synthetic': (
        'ten images in the format of emnist for each of two writers (offline)'
    ),
    'fedbn_synthetic': (
        'two classes of Gaussian points in two domains with different'
        ' covariances, as in appendix F of the FedBN paper (offline)'
    ),
}

_WITH_DOMAINS = ('digits_domains', 'fedbn_synthetic')

# The form of all other names of datasets.
OTHER_DATASETS = (
    'tfds:NAME (TensorFlow Datasets), npz:PATH or a path that ends in .npz (a'
    ' NumPy archive with x_train, y_train, x_test and y_test), series:PATH'
    ' (such an archive of series [samples, steps, features]), folder:PATH'
    ' (images in PATH/train/LABEL/ and PATH/test/LABEL/),'
    ' generated:SHAPE:CLASSES:TRAIN:TEST (random examples, for trying things'
    ' out; SHAPE is HxWxC or a number of features, and the numbers of training'
    ' and test examples may be left out), or domains:NAME=DATASET,NAME=DATASET'
    ' (several datasets as the domains of one; NAME= may be left out)'
)

TFDS_PREFIX = 'tfds:'
NPZ_PREFIX = 'npz:'
NPZ_SUFFIX = '.npz'
SERIES_PREFIX = 'series:'
FOLDER_PREFIX = 'folder:'
# A path follows them.
PATH_PREFIXES = (NPZ_PREFIX, SERIES_PREFIX, FOLDER_PREFIX)
GENERATED_PREFIX = 'generated:'
DOMAINS_PREFIX = 'domains:'

_GENERATED_NUMBERS = (200, 100)


def is_other_dataset(name: str) -> bool:
  """Whether a name has one of the forms of `OTHER_DATASETS`."""
  return name.startswith(
      (
          TFDS_PREFIX,
          *PATH_PREFIXES,
          GENERATED_PREFIX,
          DOMAINS_PREFIX,
      )
  ) or name.endswith(NPZ_SUFFIX)


def has_domains(name: str) -> bool:
  """Whether a dataset has several domains."""
  return name.startswith(DOMAINS_PREFIX) or name in _WITH_DOMAINS


def is_downloaded(name: str) -> bool:
  """Whether a dataset, or the dataset of a domain, may be downloaded."""
  if name.startswith(DOMAINS_PREFIX):
    return any(map(is_downloaded, parse_domains(name).values()))
  return name.startswith(TFDS_PREFIX) or name in ('emnist', 'femnist')


def is_community_dataset(name: str) -> bool:
  """Whether a dataset, or that of a domain, is read by downloaded code.

  TensorFlow Datasets runs it for names with a namespace: `tfds:SPACE:NAME`.
  """
  if name.startswith(DOMAINS_PREFIX):
    return any(
        map(is_community_dataset, parse_domains(name, fewest=1).values())
    )
  # A version comes after a colon, too, but begins with a digit or a star.
  return bool(re.match(rf'{TFDS_PREFIX}[^:]*:[^\d*]', name))


def is_quick(name: str) -> bool:
  """Whether loading a dataset takes a moment only: it is small and built in."""
  if name.startswith(DOMAINS_PREFIX):
    return all(map(is_quick, parse_domains(name, fewest=1).values()))
  return name.startswith(GENERATED_PREFIX) or not (
      is_downloaded(name) or is_other_dataset(name)
  )


class Generated(NamedTuple):
  """What a name `generated:...` asks for.

  Attributes:
    shape: The shape of an example: height, width and channels, or features.
    num_classes: The number of classes.
    num_train: The number of training examples.
    num_test: The number of test examples.
  """

  shape: tuple[int, ...]
  num_classes: int
  num_train: int
  num_test: int


def parse_generated(name: str) -> Generated:
  """Parses `generated:SHAPE:CLASSES`, optionally with `:TRAIN:TEST`.

  Args:
    name: The name of the dataset, for example `generated:32x32x3:10`.

  Returns:
    What it asks for. Default: 200 training and 100 test examples, or one for
    each class if there are more classes.

  Raises:
    ValueError: If the name has another form.
  """
  match = re.fullmatch(
      rf'{GENERATED_PREFIX}(\d+|\d+x\d+x\d+):(\d+)(?::(\d+))?(?::(\d+))?', name
  )
  if match is None:
    raise ValueError(
        f'dataset={name} must be generated:SHAPE:CLASSES or'
        ' generated:SHAPE:CLASSES:TRAIN:TEST, where SHAPE is'
        ' HEIGHTxWIDTHxCHANNELS or a number of features, for example'
        ' generated:32x32x3:10:500:100.'
    )
  shape, classes, *examples = match.groups()
  num_classes = int(classes)
  num_train, num_test = (
      max(default, num_classes) if number is None else int(number)
      for default, number in zip(_GENERATED_NUMBERS, examples)
  )
  generated = Generated(
      tuple(map(int, shape.split('x'))), num_classes, num_train, num_test
  )
  if min(*generated.shape, num_test) < 1 or num_classes < 2:
    raise ValueError(
        f'dataset={name} needs sizes of at least 1, and at least 2 classes.'
    )
  if num_train < num_classes:
    raise ValueError(
        f'dataset={name} asks for {num_train} training examples of'
        f' {num_classes} classes; it needs at least one of each class.'
    )
  return generated


def parse_domains(name: str, fewest: int = 2) -> dict[str, str]:
  """Parses `domains:NAME=DATASET,DATASET,...`.

  Args:
    name: The name of the dataset.
    fewest: The smallest number of domains.

  Returns:
    The name of each domain's dataset by the domain's name. A domain without a
    name has the last part of its dataset's name, without the suffix of a file.

  Raises:
    ValueError: If there are too few domains, if two have the same name, or if a
      dataset is not allowed as a domain.
  """
  sources: dict[str, str] = {}
  for text in name.removeprefix(DOMAINS_PREFIX).split(','):
    match = re.fullmatch(r'([\w.-]+)=(.*)', text)
    domain, source = match.groups() if match else (_domain_name(text), text)
    if not source:
      raise ValueError(
          f'dataset={name}: the domain {domain or text!r} has no dataset; write'
          ' domains:NAME=DATASET,NAME=DATASET.'
      )
    if source.startswith(DOMAINS_PREFIX):
      raise ValueError(
          f'dataset={name}: the domain {domain!r} is a list of domains; a'
          ' domain must be a single dataset.'
      )
    if domain in sources:
      raise ValueError(
          f'dataset={name} has two domains {domain!r}; name them:'
          ' domains:NAME=DATASET,NAME=DATASET.'
      )
    sources[domain] = source
  if len(sources) < fewest:
    raise ValueError(
        f'dataset={name} has a single domain; use at least two, or'
        f' {next(iter(sources.values()))} without `domains:`.'
    )
  return sources


def single_domain(name: str) -> Optional[tuple[str, str]]:
  """Returns the name and the dataset of `domains:NAME=DATASET`.

  Args:
    name: The name of a dataset.

  Returns:
    The two; None if the dataset has no domains or several.

  Raises:
    ValueError: See `parse_domains`.
  """
  if not name.startswith(DOMAINS_PREFIX):
    return None
  domains = parse_domains(name, fewest=1)
  return next(iter(domains.items())) if len(domains) == 1 else None


def short_name(name: str) -> str:
  """Returns a dataset's name for titles: without paths, or its domains' names.

  Args:
    name: The name of a dataset.

  Raises:
    ValueError: See `parse_domains`.
  """
  if name.startswith(DOMAINS_PREFIX):
    domains = list(parse_domains(name, fewest=1))
    return f'domains {spelling.name_some(domains)}'
  return _domain_name(name) or name


def _domain_name(source: str) -> str:
  """Returns a readable name for a dataset without a name."""
  for prefix in PATH_PREFIXES:
    if source.startswith(prefix) or source.endswith(NPZ_SUFFIX):
      path = source.removeprefix(prefix).rstrip('/')
      return os.path.basename(path).removesuffix(NPZ_SUFFIX)
  return source.removeprefix(TFDS_PREFIX)


def map_sources(name: str, change: Callable[[str], str]) -> str:
  """Applies a function to a dataset's name, or to the name of each domain's.

  Args:
    name: The name of a dataset.
    change: The function of the name of a dataset without domains.

  Returns:
    The new name, in which all domains have names.

  Raises:
    ValueError: See `parse_domains`.
  """
  if not name.startswith(DOMAINS_PREFIX):
    return change(name)
  return DOMAINS_PREFIX + ','.join(
      f'{domain}={change(source)}'
      for domain, source in parse_domains(name).items()
  )
