"""Single: each client trains alone, the baseline SingleSet of FedBN.

Li et al., FedBN, ICLR 2021, section 5.1.
"""

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import SINGLE
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_single']


def build_single(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds training in which each client trains alone and sends no variable.

  The server sees the training metrics only.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer of local training. Its state starts afresh
      in each round.
    **options: See `tff_bn.algorithms.Options`. `server_optimizer`,
      `model_aggregator`, `statistics_aggregator`, `sum_aggregator`,
      `client_filter` and `drift_correction` would have no effect and must not
      be given; `client_weighting` has none.

  Returns:
    A process whose client state holds the client's whole model, except for
    variables that training cannot change.

  Raises:
    TypeError: If the optimizer has the wrong type.
    ValueError: If an option is given that must not be, or has a value that is
      not allowed.
  """
  averaging.check_left_out(
      'single, which shares nothing', options, averaging.SERVER_OPTIONS
  )
  return averaging.build_partitioned(model, SINGLE, client_optimizer, **options)
