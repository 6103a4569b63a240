"""Splits a dataset over clients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from tff_bn.common import checks
from tff_bn.common import seeding
from tff_bn.common import user_functions
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import federated
from tff_bn.data import label_shares
from tff_bn.data import splits


def split_dataset(
    dataset: dataset_lib.Dataset,
    split: str,
    num_clients: Optional[int],
    seed: int,
    **parameters: Any,
) -> federated.FederatedData:
  """Splits a dataset over clients.

  `tff_bn.data.splits` documents each split of the training data. The test data
  of each client has the label distribution of its training data; if samples
  have no single class, it is drawn in proportion to the client's number of
  training samples. With `domains` it is of the client's domain, with `natural`
  it is the client's own. If `natural` takes some of the dataset's clients, the
  test data of the others is left out.

  With `iid` and `samples_per_client`, clients share training samples, and they
  share test samples too: each client draws test samples in the same way. Their
  number is to `samples_per_client` as the dataset's number of test samples is
  to its number of training samples, rounded, and at least 1.

  Args:
    dataset: The dataset.
    split: A key of `splits.SPLITS`, or `package.module:NAME` for your own: a
      function of a `splits.SplitTask`, or a `splits.Split`.
    num_clients: The number of clients. Default: one for each domain with
      `domains`, all that the dataset has with `natural`, otherwise
      `splits.DEFAULT_NUM_CLIENTS`.
    seed: The seed of all random choices.
    **parameters: The options of the split by name, see `splits.PARAMETERS`:
      `classes_per_client` for `classes`, `dirichlet_alpha`, `dirichlet_by` and
      `dirichlet_prior` for `dirichlet`, `gamma` for `gamma`, `imbalance` for
      `unbalanced`, and `samples_per_client` for `iid`. Their defaults are those
      of the options. Other splits ignore them.

  Returns:
    The split data. The clients' ids are `client_0`, ...; with `domains` they
    are names of domains, with `natural` the dataset's `client_names`.

  Raises:
    TypeError: If no split has such a parameter, or an argument has the wrong
      type.
    ValueError: If the split is unknown or can't be imported, a parameter is not
      allowed, or the split does not suit the dataset: some splits need one
      class for each sample.
  """
  checks.check_type(
      'dataset',
      dataset,
      dataset_lib.Dataset,
      'be a tff_bn.data.Dataset, such as tff_bn.data.load_dataset(name)',
  )
  if num_clients is not None:
    checks.check_integer('num_clients', num_clients)
  checks.check_integer('seed', seed)
  splits.SPLIT.check(split)
  for name, value in parameters.items():
    if name not in splits.PARAMETERS:
      raise TypeError(
          f'{name!r} is not a parameter of a split; the parameters are'
          f' {", ".join(splits.PARAMETERS)}.'
      )
    if value is not None:
      splits.PARAMETERS[name].check(value)
  try:
    entry = splits.SPLITS[split]
    make = entry.load()
  except ValueError as error:
    raise ValueError(f'split={split}: {error}') from error
  if entry.needs_classes and not dataset.has_classes:
    raise ValueError(
        f'split={split} needs one class for each sample, but'
        f' dataset={dataset.name} has the task {dataset.task}; use split='
        f'{" or split=".join(_splits_without_classes(dataset))}.'
    )
  if entry.client is not None:
    return make(dataset, num_clients, seed)
  if num_clients is None:
    num_clients = splits.DEFAULT_NUM_CLIENTS
  arguments = {}
  for option in entry.options:
    value = parameters.get(option.name)
    arguments[option.name] = option.default if value is None else value
  if entry.draw is not None and any(arguments.values()):
    (samples_per_client,) = arguments.values()
    parts, test_parts = _draw(
        dataset, entry.draw, num_clients, samples_per_client, seed
    )
  else:
    label_shares.check_num_clients(
        num_clients, len(dataset.y_train), f'training samples in {dataset.name}'
    )
    task = splits.SplitTask(
        dataset.y_train, dataset.num_classes, num_clients, seed, dataset.task
    )
    if splits.SPLITS.is_users(split):
      parts = _call_users(split, make, task, arguments)
    else:
      parts = make(task, **arguments)
    train_classes, test_classes = _classes(dataset)
    test_parts = label_shares.split_in_proportion(
        _class_counts(train_classes, parts),
        test_classes,
        seeding.generator(seeding.Stream.TEST_SETS, seed),
    )
  digits = len(str(num_clients - 1))
  client_ids = [f'client_{n:0{digits}}' for n in range(num_clients)]
  return _federated_data(dataset, client_ids, parts, test_parts)


def _splits_without_classes(dataset: dataset_lib.Dataset) -> list[str]:
  """Returns the splits that a dataset without classes of samples can have."""
  impossible = set()
  if dataset.domain_train is None:
    impossible.add(splits.DOMAINS)
  if dataset.client_train is None:
    impossible.add(splits.NATURAL)
  return [
      name
      for name, entry in splits.SPLITS.items()
      if not entry.needs_classes and name not in impossible
  ]


def _classes(dataset: dataset_lib.Dataset) -> tuple[np.ndarray, np.ndarray]:
  """Returns the classes of the training and of the test samples.

  If the task has no class for each sample, all samples have the class 0: then
  clients get test samples in proportion to their training samples.
  """
  if dataset.has_classes:
    return dataset.y_train, dataset.y_test
  return (
      np.zeros(len(dataset.y_train), np.int32),
      np.zeros(len(dataset.y_test), np.int32),
  )


def _class_counts(
    classes: np.ndarray, parts: Sequence[np.ndarray]
) -> np.ndarray:
  """Counts the samples of each part and class."""
  num_classes = int(classes.max()) + 1
  return np.stack(
      [np.bincount(classes[part], minlength=num_classes) for part in parts]
  )


def _call_users(
    split: str,
    make: Callable[..., Any],
    task: splits.SplitTask,
    arguments: Mapping[str, Any],
) -> list[np.ndarray]:
  """Calls a user's function and checks what it returns."""
  subject = f'split={split}'
  result = user_functions.call(subject, make, task, **arguments)
  needed = (
      f'it must return a list of {task.num_clients} arrays, the positions of'
      " each client's training samples"
  )
  try:
    parts = [np.asarray(part) for part in result]
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'{subject}: its function returned {type(result).__name__}; {needed}.'
    ) from error
  if len(parts) != task.num_clients:
    raise ValueError(
        f'{subject}: its function returned {len(parts)} parts; {needed}.'
    )
  for number, part in enumerate(parts):
    if part.ndim != 1 or part.dtype.kind not in 'iu' or not part.size:
      raise ValueError(
          f'{subject}: part {number} of its result has the shape {part.shape}'
          f' and the dtype {part.dtype}; {needed}, and each at least one.'
      )
    if part.min() < 0 or part.max() >= len(task.labels):
      raise ValueError(
          f'{subject}: part {number} of its result has positions from'
          f' {part.min()} to {part.max()}, but there are {len(task.labels)}'
          ' training samples, whose positions count from 0.'
      )
  return parts


def _draw(
    dataset: dataset_lib.Dataset,
    draw: splits.Draw,
    num_clients: int,
    samples_per_client: int,
    seed: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Draws the training and test samples of clients that share samples."""
  label_shares.check_num_clients(num_clients)
  num_train, num_test = len(dataset.y_train), len(dataset.y_test)
  if not 1 <= samples_per_client <= num_train:
    raise ValueError(
        f'samples_per_client={samples_per_client} must be between 1 and the'
        f' {num_train} training samples in {dataset.name}.'
    )
  test_samples_per_client = max(
      1, round(samples_per_client * num_test / num_train)
  )
  parts, test_parts = (
      draw(num_samples, num_clients, number, seeding.generator(stream, seed))
      for stream, num_samples, number in (
          (seeding.Stream.SPLIT, num_train, samples_per_client),
          (seeding.Stream.TEST_SETS, num_test, test_samples_per_client),
      )
  )
  return parts, test_parts


def split_domains(
    dataset: dataset_lib.Dataset, num_clients: Optional[int], seed: int
) -> federated.FederatedData:
  """Gives each client data of one domain, see `split_dataset`."""
  if dataset.domain_train is None:
    raise ValueError(
        'split=domains needs a dataset with several domains, but'
        f' dataset={dataset.name} has none; use dataset=digits_domains or'
        ' dataset=domains:NAME=DATASET,NAME=DATASET, or another split.'
    )
  num_domains = len(dataset.domain_names)
  if num_clients is None:
    num_clients = num_domains
  label_shares.check_num_clients(
      num_clients,
      len(dataset.y_train),
      f'training samples in {dataset.name}',
  )
  train_classes, test_classes = _classes(dataset)
  parts = splits.split_by_domain(
      train_classes, dataset.domain_train, num_domains, num_clients, seed
  )
  counts = _class_counts(train_classes, parts)
  rng = seeding.generator(seeding.Stream.TEST_SETS, seed)
  by_domain = []
  for domain in range(num_domains):
    members = np.flatnonzero(dataset.domain_test == domain)
    dealt = label_shares.split_in_proportion(
        counts[domain::num_domains], test_classes[members], rng
    )
    by_domain.append([members[indices] for indices in dealt])
  client_ids = [
      dataset.domain_names[n % num_domains]
      + (f'_{n // num_domains}' if num_clients > num_domains else '')
      for n in range(num_clients)
  ]
  return _federated_data(
      dataset, client_ids, parts, splits.interleave(by_domain)
  )


def split_natural(
    dataset: dataset_lib.Dataset, num_clients: Optional[int], seed: int
) -> federated.FederatedData:
  """Takes the clients that the dataset has, see `split_dataset`."""
  if dataset.client_train is None:
    raise ValueError(
        f'split={splits.NATURAL} needs a dataset that has clients, but'
        f' dataset={dataset.name} has none; use another split.'
    )
  num_present = len(np.unique(dataset.client_train))
  if num_clients is None:
    num_clients = num_present
  label_shares.check_num_clients(
      num_clients, num_present, f'natural clients in {dataset.name}'
  )
  parts = splits.split_by_client(dataset.client_train, num_clients, seed)
  clients = dataset.client_train[[indices[0] for indices in parts]]
  if num_clients < num_present:
    dataset = _tested_by(dataset, clients)
  test_parts = (
      [np.arange(0)] * num_clients
      if dataset.client_test is None
      else splits.positions(dataset.client_test, clients)
  )
  client_ids = [dataset.client_names[client] for client in clients]
  return _federated_data(dataset, client_ids, parts, test_parts)


def _tested_by(
    dataset: dataset_lib.Dataset, clients: np.ndarray
) -> dataset_lib.Dataset:
  """Leaves out the test data of other natural clients, if they are known."""
  if dataset.client_test is None:
    return dataset
  kept = np.isin(dataset.client_test, clients)
  domains = dataset.domain_test
  return dataset.unchecked(
      x_test=dataset.x_test[kept],
      y_test=dataset.y_test[kept],
      client_test=dataset.client_test[kept],
      domain_test=None if domains is None else domains[kept],
  )


def _federated_data(
    dataset: dataset_lib.Dataset,
    client_ids: Sequence[str],
    parts: Sequence[np.ndarray],
    test_parts: Sequence[np.ndarray],
) -> federated.FederatedData:
  return federated.FederatedData(
      dataset,
      dict(zip(client_ids, parts)),
      dict(zip(client_ids, test_parts)),
  )
