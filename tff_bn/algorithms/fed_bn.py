"""FedBN: batch normalization stays with the client.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization, ICLR 2021, algorithm 1.
"""

import dataclasses
from typing import Optional

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import FEDBN
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_fed_bn']


def build_fed_bn(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    local_layers: Optional[str] = None,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds FedBN, which keeps scale, shift, running mean and variance local.

  All other variables are averaged as in FedAvg. The local variables of a new
  client start from the model's initial values.

  Args:
    model: The model, with batch normalization.
    client_optimizer: The optimizer of local training.
    local_layers: Layers that stay with the client, too, with all their
      variables: a regular expression for whole names or paths of layers, see
      `tff_bn.partition.Partition`. Default: none.
    **options: See `tff_bn.algorithms.Options`. `statistics_aggregator` has no
      effect, because no running statistics are sent.

  Returns:
    A process whose client state holds the client's batch normalization
    variables.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or the model has
      no trained batch normalization, or a layer with `renorm=True` that is
      not local as a whole.
  """
  return averaging.build_partitioned(
      model,
      dataclasses.replace(FEDBN, local_layers=local_layers),
      client_optimizer,
      **options,
  )
