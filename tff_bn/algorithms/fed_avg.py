"""Federated Averaging that averages batch normalization statistics, too.

McMahan et al., Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017; with a server optimizer: Reddi et al.,
Adaptive Federated Optimization, ICLR 2021 (FedOpt).

`tff.learning.algorithms.build_weighted_fed_avg` sends trainable variables only
and drops the moving mean and variance. Here all variables that training can
change are aggregated.
"""

import dataclasses
from typing import Optional

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import Process

__all__ = ['build_fed_avg']


def build_fed_avg(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    local_layers: Optional[str] = None,
    **options: Unpack[Options],
) -> Process:
  """Builds FedAvg, which shares every variable that training can change.

  In a round, each client trains the server's model on its own data. The
  server applies the mean difference of the trainable variables with its
  optimizer, and takes the aggregated running statistics as they are:

  *   by default the naive mean of the means and of the variances,
  *   with `statistics_aggregator=tff_bn.aggregators.PooledMomentsFactory()`
      their law of total variance.

  Only the phases of personal position encodings stay with the client, see
  `tff_bn.layers.PositionEncoding`.

  Types, if clients keep nothing: `initialize: ( -> S@SERVER)`, `next:
  (<S@SERVER, {B*}@CLIENTS> -> <state=S@SERVER, metrics=M@SERVER>)`.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer of local training. Its state starts afresh
      in each round.
    local_layers: Layers that stay with the client, with all their variables: a
      regular expression for whole names or paths of layers, see
      `tff_bn.partition.Partition`. Default: none.
    **options: See `tff_bn.algorithms.Options`.

  Returns:
    A `tff.learning.templates.LearningProcess`; a `StatefulLearningProcess` if
    clients keep a state: local layers, the state of `drift_correction`, or
    personal position encodings.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed.
  """
  return averaging.build_shared(
      model,
      client_optimizer,
      partition=dataclasses.replace(FEDAVG, local_layers=local_layers),
      **options,
  )
