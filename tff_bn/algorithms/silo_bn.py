"""SiloBN: running statistics stay with the client.

Andreux et al., Siloed Federated Learning for Multi-centric Histopathology
Datasets, DART 2020.
"""

import dataclasses
from typing import Optional

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import SILOBN
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_silo_bn']


def build_silo_bn(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    local_layers: Optional[str] = None,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds SiloBN, which keeps running mean and variance local.

  All other variables, scale and shift included, are averaged as in FedAvg.

  Args:
    model: The model, with batch normalization.
    client_optimizer: The optimizer of local training.
    local_layers: Layers that stay with the client, too, with all their
      variables: a regular expression for whole names or paths of layers, see
      `tff_bn.partition.Partition`. Default: none.
    **options: See `tff_bn.algorithms.Options`. `statistics_aggregator` has no
      effect, because no running statistics are sent.

  Returns:
    A process whose client state holds the client's running statistics.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or the model has
      no trained batch normalization, or a layer with `renorm=True` that is
      not local as a whole.
  """
  return averaging.build_partitioned(
      model,
      dataclasses.replace(SILOBN, local_layers=local_layers),
      client_optimizer,
      **options,
  )
