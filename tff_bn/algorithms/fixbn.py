"""FixBN: batch normalization with statistics that are fixed after some rounds.

Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning,
arXiv:2303.06530.
"""

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.catalog import algorithms
from tff_bn.clients.local_training import FixedStatisticsWork
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
  """Builds FixBN: FedAvg, then FedAvg with fixed running statistics.

  In the first `fixbn_rounds` rounds, clients normalize with the statistics of
  their batches, and the server averages the running statistics. From then on,
  clients normalize with the server's running statistics, which no longer
  change. All other variables, scale and shift included, are still trained and
  averaged.

  As in FedAvg, the running variance of the first phase is the mean of the
  clients' variances, without the spread between the clients' means.
  `statistics_aggregator=tff_bn.aggregators.PooledMomentsFactory()` adds it.

  Args:
    model: The model.
    client_optimizer: The client optimizer.
    fixbn_rounds: The number of rounds of the first phase, at least 1.
    **options: See `tff_bn.algorithms.Options`.

  Returns:
    A `tff.learning.templates.LearningProcess`; a `StatefulLearningProcess` if
    clients keep a state, for `drift_correction` or for personal position
    encodings. Its `next` runs the computation of the current phase, see
    `tff_bn.processes.phased_process`.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or the model has
      no trainable batch normalization layer, or one with `renorm=True`.
  """
  algorithms.FIXBN_ROUNDS.check(fixbn_rounds)
  requirements.trained_batch_norm_layers('FixBN', model)
  requirements.check_no_renorm(
      'FixBN',
      model,
      'it fixes the running means and variances, but the layer keeps further'
      ' running statistics',
  )
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
                  build_work=FixedStatisticsWork,
                  **options,
              ),
          ),
      ]
  )
