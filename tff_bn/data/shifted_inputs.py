"""Shifted inputs: attackers whose data moves batch normalization statistics.

After SoDa: Xu, Zhang, Hu, On the Out-of-Distribution Backdoor Attack for
Federated Learning, MobiHoc 2025, arXiv:2509.13219. Of the paper, only the
abstract and the authors' code, github.com/JiiahaoXU/SoDa-BNGuard, were
available to us.

SoDa's attackers train on data of another distribution with the label of a
target class, and add terms to the loss that keep their weights near to honest
ones. So their running statistics give them away, and nothing else. Here the
labels stay right, and no term is needed: batch normalization undoes an affine
map of its inputs, so the same map of all samples moves the statistics alone.
"""

import dataclasses

import numpy as np

from tff_bn.catalog import rules
from tff_bn.data import attackers
from tff_bn.data import federated


def with_shifted_inputs(
    data: federated.FederatedData,
    num_attackers: int,
    share: float = rules.WHITE_SHARE.default,
) -> federated.FederatedData:
  """Moves the training inputs of the first clients towards the largest value.

  An input x becomes `(1 - share) x + share M`, where M is the largest value of
  its channel, or feature, in the training data. Pictures become brighter and
  lose contrast. If the first layer is dense, or a convolution without padding,
  and batch normalization follows, the outputs and gradients of training stay
  the same (except for ε), but the running statistics move. With padding, the
  rest changes a little.

  Labels and test data do not change.

  Args:
    data: The clients' data.
    num_attackers: The number of attackers, which are the first clients of
      `data.client_ids`.
    share: Greater than 0 and less than 1.

  Returns:
    The data with shifted inputs. Values of type uint8 are rounded. It has no
    recipe, because the recipe of `data` does not shift inputs.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If `num_attackers` is negative or larger than the number of
      clients, `share` is out of range, an attacker shares a sample with another
      client, or the inputs have numbers of categories.
  """
  attackers.check_arguments(data, num_attackers)
  rules.WHITE_SHARE.check(share)
  dataset = data.dataset
  if dataset.table is not None and dataset.table.category_counts:
    raise ValueError(
        f'dataset={dataset.name} has numbers of categories, which cannot be'
        ' shifted; use categories=one_hot, or another attack.'
    )
  shifted = attackers.training_samples(data, num_attackers, 'shifting inputs')
  inputs = dataset.x_train.copy()
  largest = inputs.max(axis=tuple(range(inputs.ndim - 1)))
  values = (1 - share) * inputs[shifted] + share * largest
  if inputs.dtype == np.uint8:
    values = np.rint(values)
  inputs[shifted] = values
  return dataclasses.replace(
      data, dataset=dataclasses.replace(dataset, x_train=inputs), recipe=None
  )
