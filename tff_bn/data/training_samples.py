"""Uses only some of a dataset's training data."""

from typing import Optional

import numpy as np

from tff_bn.catalog import datasets
from tff_bn.common import checks
from tff_bn.common import seeding
from tff_bn.data import dataset as dataset_lib


def draw_training_samples(
    dataset: dataset_lib.Dataset,
    seed: int,
    train_share: Optional[float] = None,
    samples_per_domain: Optional[int] = None,
) -> dataset_lib.Dataset:
  """Draws the training samples that are used; the test data stays the same.

  The samples of each domain are drawn at random (FedBN, sections 5.1 and D.2,
  truncates its datasets so). A dataset without domains counts as one domain for
  `train_share`. A larger share contains the samples of a smaller one.

  Args:
    dataset: The dataset.
    seed: Determines which samples are drawn.
    train_share: The share of each domain's training samples, rounded to a
      number of samples. Default: all.
    samples_per_domain: The largest number of training samples of a domain,
      after `train_share`. Default: no limit.

  Returns:
    The dataset with these training samples, in their old order.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If an argument is out of range, if a domain has no samples left,
      or if `samples_per_domain` is given for a dataset without domains.
  """
  checks.check_type(
      'dataset',
      dataset,
      dataset_lib.Dataset,
      'be a tff_bn.data.Dataset, such as tff_bn.data.load_dataset(name)',
  )
  checks.check_integer('seed', seed)
  if train_share is not None:
    datasets.TRAIN_SHARE.check(train_share)
  if samples_per_domain is not None:
    datasets.SAMPLES_PER_DOMAIN.check(samples_per_domain)
  if train_share is None and samples_per_domain is None:
    return dataset
  domains = dataset.domain_train
  if samples_per_domain is not None and domains is None:
    raise ValueError(
        f'samples_per_domain={samples_per_domain} needs a dataset with domains,'
        f' but dataset={dataset.name} has none; use train_share.'
    )
  if domains is None:
    domains = np.zeros(len(dataset.y_train), np.int32)
  chosen = []
  for domain in np.unique(domains):
    members = np.flatnonzero(domains == domain)
    number = len(members)
    if train_share is not None:
      number = round(train_share * number)
    if samples_per_domain is not None:
      number = min(number, samples_per_domain)
    if not number:
      where = dataset.name
      if dataset.domain_names:
        where = f'the domain {dataset.domain_names[domain]} of {where}'
      raise ValueError(
          f'train_share={train_share:g} leaves none of the {len(members)}'
          f' training samples of {where}; use a larger share.'
      )
    rng = seeding.generator(seeding.Stream.SUBSET, seed, int(domain))
    chosen.append(rng.permutation(members)[:number])
  return dataset.with_training_samples(np.sort(np.concatenate(chosen)))
