"""FixBN: batch normalization whose statistics are fixed after some rounds.

Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning,
arXiv:2303.06530.
"""

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.clients import client_work
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.processes import averaging
from tff_bn.processes import phased_process
from tff_bn.processes import requirements
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import Process

__all__ = ['build_fixbn']


def build_fixbn(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    fixbn_rounds: int,
    **options: Unpack[Options],
) -> Process:
  """Builds FixBN.

  In the first `fixbn_rounds` rounds it is FedAvg: clients normalize with the
  statistics of their batches, and the server averages the running statistics.
  From then on the clients normalize with the server's running statistics, which
  stay as they are; all other variables, scale and shift too, are trained and
  averaged as before.

  The running variance of the first phase is a mean of the clients' variances.
  It lacks the spread between the clients, as FedAvg's, unless
  `statistics_aggregator` is `tff_bn.aggregators.PooledMomentsFactory()`.

  Args:
    model: The model.
    client_optimizer: The client optimizer.
    fixbn_rounds: The number of rounds before the statistics are fixed, at
      least 1.
    **options: See `tff_bn.algorithms.Options`.

  Returns:
    A `tff.learning.templates.LearningProcess`; a `StatefulLearningProcess` if
    clients keep something, for `drift_correction` or as position encodings of
    their own. Its `next` runs the one or the other computation, see
    `tff_bn.processes.phased_process`.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed; or the model has
      no batch normalization layer that is trained.
  """
  requirements.check_positive_integer('fixbn_rounds', fixbn_rounds)
  requirements.trained_batch_norm_layers('FixBN', model)
  return phased_process.build_phased_process(
      [
          (
              fixbn_rounds,
              averaging.build_shared(model, client_optimizer, **options),
          ),
          (
              None,
              averaging.build_shared(
                  model,
                  client_optimizer,
                  build_work=client_work.FixedStatisticsWork,
                  **options,
              ),
          ),
      ]
  )
