"""FedStein: shrunk statistics are shared, scale and shift stay with the client.

Gupta, Jangid, Sethi, FedStein: Enhancing Multi-Domain Federated Learning
Through James-Stein Estimator, arXiv:2410.03499.
"""

import dataclasses
from typing import Optional

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import LOCAL_AFFINE
from tff_bn.keras_model.shared_weights import Statistics
from tff_bn.layers.batch_moments import Moments
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_fed_stein', 'james_stein']


def build_fed_stein(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    local_layers: Optional[str] = None,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds FedStein: averaging with James-Stein estimates of the statistics.

  Scale and shift stay with the client, as in
  `tff_bn.algorithms.build_local_affine`. After each round, the server replaces
  the averaged moving mean of each layer, and its averaged moving variance, by
  `james_stein` of this vector. Clients go on from there, so a moving statistic
  is shrunk again in each round.

  Of the paper, only the abstract was available, which says that the estimates
  are shared; the estimator is that of the work on which it builds (see
  `james_stein`).

  Args:
    model: The model, with batch normalization that has a scale or a shift.
    client_optimizer: The optimizer of local training.
    local_layers: See `tff_bn.algorithms.build_local_affine`.
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
      move_statistics=_shrink,
      **options,
  )


def james_stein(values: tf.Tensor) -> tf.Tensor:
  """Shrinks a vector of estimates towards 0, see Khoshsirat and Kambhamettu.

  The vector v of c channels becomes

      (1 - (c-2) Var(v) / ‖v‖²) v

  where Var(v) is the variance over the channels (Improving Normalization with
  the James-Stein Estimator, WACV 2024). As ‖v‖² = c (Var(v) + mean(v)²), the
  factor lies between 2/c, for channels with mean 0, and 1, for channels with
  the same value. With one or two channels, nothing changes.

  Args:
    values: A vector of floats.

  Returns:
    A vector of the same shape and type.
  """
  wide = tf.cast(values, tf.float64)
  num_free = max(int(values.shape[0]) - 2, 0)
  share = tf.math.divide_no_nan(
      num_free * tf.math.reduce_variance(wide),
      tf.reduce_sum(tf.square(wide)),
  )
  return tf.cast((1 - share) * wide, values.dtype)


def _shrink(number: int, before: Statistics, moments: Moments) -> Statistics:
  """Returns the estimates; a `MoveStatistics`."""
  del number, before
  return james_stein(moments.mean), james_stein(moments.variance)
