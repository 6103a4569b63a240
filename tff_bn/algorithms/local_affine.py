"""Local affine parameters: scale and shift stay with the client.

Mills et al., Multi-Task Federated Learning for Personalised Deep Neural
Networks in Edge Computing, IEEE TPDS 2022.
"""

import dataclasses
from typing import Optional

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import LOCAL_AFFINE
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_local_affine']


def build_local_affine(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    local_layers: Optional[str] = None,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds federated averaging that keeps scale and shift local.

  All other variables, running statistics included, are averaged as in FedAvg.

  Args:
    model: The model, with batch normalization that has a scale or a shift.
    client_optimizer: The optimizer of local training.
    local_layers: Layers that stay with the client, too, with all their
      variables: a regular expression for whole names or paths of layers, see
      `tff_bn.partition.Partition`. Default: none.
    **options: See `tff_bn.algorithms.Options`.

  Returns:
    A process whose client state holds the client's scales and shifts.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or the model has
      no such variables that are trained.
  """
  return averaging.build_partitioned(
      model,
      dataclasses.replace(LOCAL_AFFINE, local_layers=local_layers),
      client_optimizer,
      **options,
  )
