"""The keyword arguments of all builders."""

from collections.abc import Callable
from typing import Any, Optional, TypedDict

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import model_update
from tff_bn.clients.drift_correction import DriftCorrection


class Options(TypedDict, total=False):
  """The keyword arguments of all builders.

  Attributes:
    server_optimizer: The optimizer that applies the averaged update of the
      trainable variables at the server. Default: SGD with learning rate 1: the
      average is the new model.
    local_steps: How many batches each client takes from the front of its
      dataset in a round. Default `None`: all.
    local_epochs: How many times each client goes through its dataset before
      `local_steps` cuts it off. Default: 1.
    client_weighting: `'num_examples'` (default): clients count by the number of
      examples that they trained on; `'uniform'`: all clients count alike.
    client_weight_decay: λ of the coupled L2 decay, which adds λ times the
      variable to the gradient of every trainable variable. Default: 0.
    client_learning_rate_schedule: Maps the number of finished rounds (an int32
      scalar tensor) to the client's learning rate. Default: constant.
    client_warmup_steps: Over how many local steps the client's learning rate
      rises linearly at the start of each round, see
      `tff_bn.clients.local_training_config.LocalTrainingConfig`. Default: 0.
    client_gradient_clip_norm: The largest global norm of a batch's gradient; a
      longer one is scaled down to it. Default: any.
    drift_correction: What clients do against drifting apart, a
      `tff_bn.clients.drift_correction.DriftCorrection`, such as
      `tff_bn.algorithms.FedProx(0.001)`. Default: nothing.
    model_aggregator: A `tff.aggregators` factory for all that clients send but
      the running statistics: the updates of the trainable variables and of
      other state, control variates. Default: the weighted mean.
    statistics_aggregator: An unweighted factory over moments for the running
      statistics, such as `tff_bn.aggregators.PooledMomentsFactory()`; or a
      `tff_bn.aggregators.Rule` in place of the naive mean. Default: the naive
      mean.
    seed: Determines dropout and other random layers, together with the round
      and the client's data; and the phases of personal position encodings,
      together with the client's number, see
      `tff_bn.StatefulLearningProcess.personalize`. Default: 0.
    jit_compile: Whether XLA compiles the clients' steps; see
      `tff_bn.clients.local_training_config.LocalTrainingConfig`. Default: no.
  """

  server_optimizer: Optional[tff.learning.optimizers.Optimizer]
  local_steps: Optional[int]
  local_epochs: int
  client_weighting: str
  client_weight_decay: float
  client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]]
  client_warmup_steps: int
  client_gradient_clip_norm: Optional[float]
  drift_correction: Optional[DriftCorrection]
  model_aggregator: Optional[model_update.AggregationFactory]
  statistics_aggregator: Optional[tff.aggregators.UnweightedAggregationFactory]
  seed: int
  jit_compile: bool
