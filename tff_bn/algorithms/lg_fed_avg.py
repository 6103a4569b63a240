"""LG-FedAvg: the representation stays with the client, the head is shared.

Liang, Liu, Liu, Salakhutdinov, Morency, Think Locally, Act Globally: Federated
Learning with Local and Global Representations, arXiv 2001.01523, 2020.
"""

from typing import Optional

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import Partition
from tff_bn.processes import averaging
from tff_bn.processes import head_layers as head_lib
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_lg_fed_avg']


def build_lg_fed_avg(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    head_layers: Optional[str] = None,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds LG-FedAvg, which shares the head of the model only.

  It is the opposite of FedPer: all other layers, batch normalization included,
  are the client's own. Clients train the whole model.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer of local training.
    head_layers: The shared layers: a regular expression for whole names or
      paths of layers, see `tff_bn.partition.Partition`. Default: the last layer
      with a kernel.
    **options: See `tff_bn.algorithms.Options`.

  Returns:
    A process whose client state holds all variables outside of the head.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If an option has a value that is not allowed, or the head is
      none of the model's layers.
  """
  head = head_lib.find(model, head_layers)
  return averaging.build_partitioned(
      model,
      Partition('lg_fedavg', frozenset(), shared_layers=head),
      client_optimizer,
      **options,
  )
