"""FedPer: the head of the model stays with the client.

Arivazhagan, Aggarwal, Singh, Choudhary, Federated Learning with Personalization
Layers, arXiv 1912.00818, 2019.
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

__all__ = ['build_fed_per']


def build_fed_per(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    head_layers: Optional[str] = None,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds FedPer, which keeps the head of the model local.

  Clients train the whole model. All variables outside of the head, batch
  normalization included, are averaged as in FedAvg. To keep batch normalization
  local, too, use `build_fed_bn` with `local_layers`.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer of local training.
    head_layers: The personalization layers: a regular expression for whole
      names or paths of layers, see `tff_bn.partition.Partition`. Default: the
      last layer with a kernel.
    **options: See `tff_bn.algorithms.Options`.

  Returns:
    A process whose client state holds the client's head.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If an option has a value that is not allowed, or the head is
      none of the model's layers, or all of them.
  """
  head = head_lib.find(model, head_layers)
  return averaging.build_partitioned(
      model,
      Partition('fedper', frozenset(), local_layers=head),
      client_optimizer,
      **options,
  )
