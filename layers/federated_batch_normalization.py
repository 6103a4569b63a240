"""Batch normalization by statistics that do not depend on the batch."""

from typing import Any, Optional

import keras
from keras import ops
import numpy as np

from tff_bn.layers import batch_moments


@keras.saving.register_keras_serializable(package='tff_bn')
class FederatedBatchNormalization(keras.layers.BatchNormalization):
  """Layer that normalizes its inputs by its moving statistics, always.

  A drop-in for `keras.layers.BatchNormalization`, with the same arguments,
  configuration and weights. What one example becomes does not depend on the
  other examples of its batch, so it does not depend on how the data is split
  over clients either, as long as they have the same moving statistics.

  Importantly, the layer works differently during training and during
  inference only in that training updates its statistics.

  **During training** (i.e. when using `fit()` or when calling the layer/model
  with the argument `training=True`), the layer returns
  `gamma * (batch - moving_mean) / sqrt(moving_variance + epsilon) + beta`, with
  the moving statistics as they were before this batch. They are constants: no
  gradient flows through them. Afterwards they are updated with the moments of
  the batch, where `K` is the number of values of a channel (batch size × height
  × width):

  - `moving_mean = moving_mean * momentum + mean(batch) * (1 - momentum)`
  - `moving_variance = moving_variance * momentum
    + var(batch) * K / (K - 1) * (1 - momentum)`

  The variance is the unbiased one, as in the paper; Keras's layer stores the
  biased one. With `K = 1` the factor is 1. An empty batch, or one that a mask
  excludes altogether, leaves the statistics as they are. The moments are
  computed in float32 at least, whatever the dtype of the inputs.

  **During inference** (i.e. when using `evaluate()` or `predict()` or when
  calling the layer/model with the argument `training=False`), and always if
  the layer has `trainable = False`, it is Keras's layer: it returns the same,
  and its statistics stay as they are.

  The moving statistics start as 0 and 1, so at first the layer trains without
  normalizing, and with the default momentum of 0.99 it takes about 100 steps
  until they are near those of the data. A smaller momentum (the paper has 0.9),
  or statistics taken from a trained model, shorten this.

  Weights can be copied from and to Keras's layer with `set_weights`. They
  cannot be loaded from a `.weights.h5` file of a model with Keras's layer,
  because Keras keeps the classes of the layers in it. Load such a file into the
  original model and convert that with `tff_bn.convert_batch_norm`.

  The layer works with every backend of Keras, but PyTorch cannot train it with
  `jit_compile=True`. Within a `tf.distribute` strategy, the statistics are
  updated with the moments of the batches of all replicas together, as if one
  device had seen them.

  Args:
    axis: Integer, the axis that should be normalized (typically the features
      axis). For instance, after a `Conv2D` layer with
      `data_format="channels_first"`, set `axis=1`.
    momentum: Momentum for the moving statistics.
    epsilon: Small float added to the variance to avoid dividing by zero.
    center: If True, add an offset of `beta` to the normalized tensor. If False,
      there is no `beta`.
    scale: If True, multiply by `gamma`. If False, there is no `gamma`.
    beta_initializer: Initializer for the beta weight.
    gamma_initializer: Initializer for the gamma weight.
    moving_mean_initializer: Initializer for the moving mean.
    moving_variance_initializer: Initializer for the moving variance.
    beta_regularizer: Optional regularizer for the beta weight.
    gamma_regularizer: Optional regularizer for the gamma weight.
    beta_constraint: Optional constraint for the beta weight.
    gamma_constraint: Optional constraint for the gamma weight.
    synchronized: Has no effect: the statistics of replicas are always pooled.
      As in Keras's layer, True needs the TensorFlow backend.
    **kwargs: As for Keras's layer: `trainable`, `name` and `dtype`. `renorm` is
      refused.

  Call arguments:
    inputs: Input tensor.
    training: Python boolean indicating whether the layer updates its moving
      statistics.
    mask: Binary tensor that, with an axis appended, can be broadcast to the
      inputs, such as `[batch, time]` for inputs `[batch, time, channels]`. The
      moments are computed from the positions where it is true; all positions
      are normalized.

  Input shape:
    Arbitrary.

  Output shape:
    Same shape as input.

  Raises:
    ValueError: If `axis` is not one integer, or `renorm` is true.

  Reference:
    - Guerraoui et al., Overcoming the Challenges of Batch Normalization in
      Federated Learning, 2024, Algorithm 2. Alone, the layer is the algorithm
      of one client.
  """

  def __init__(
      self,
      axis=-1,
      momentum=0.99,
      epsilon=1e-3,
      center=True,
      scale=True,
      beta_initializer='zeros',
      gamma_initializer='ones',
      moving_mean_initializer='zeros',
      moving_variance_initializer='ones',
      beta_regularizer=None,
      gamma_regularizer=None,
      beta_constraint=None,
      gamma_constraint=None,
      synchronized=False,
      **kwargs,
  ):
    if kwargs.get('renorm'):
      raise ValueError(
          f'renorm={kwargs["renorm"]} is about normalizing by the statistics of'
          ' the batch, which FederatedBatchNormalization does not do; leave it'
          ' out.'
      )
    if not isinstance(axis, (int, np.integer)):
      raise ValueError(f'axis={axis!r} must be one integer.')
    super().__init__(
        axis=axis,
        momentum=momentum,
        epsilon=epsilon,
        center=center,
        scale=scale,
        beta_initializer=beta_initializer,
        gamma_initializer=gamma_initializer,
        moving_mean_initializer=moving_mean_initializer,
        moving_variance_initializer=moving_variance_initializer,
        beta_regularizer=beta_regularizer,
        gamma_regularizer=gamma_regularizer,
        beta_constraint=beta_constraint,
        gamma_constraint=gamma_constraint,
        synchronized=synchronized,
        **kwargs,
    )

  def call(
      self,
      inputs: Any,
      training: Optional[bool] = None,
      mask: Optional[Any] = None,
  ) -> Any:
    """Normalizes by the moving statistics, then updates them in training.

    Args:
      inputs: The input.
      training: Whether to update the statistics.
      mask: Which values count for the statistics.

    Returns:
      The output, of the same shape and in the layer's compute dtype.
    """
    # Keras's own inference reads the statistics before they are written.
    outputs = super().call(inputs, training=False, mask=mask)
    if training and self.trainable:
      self._update_statistics(inputs, mask)
    return outputs

  def _update_statistics(self, inputs: Any, mask: Optional[Any]) -> None:
    """Updates the moving mean and variance with a batch."""
    count, mean, variance = _of_all_replicas(
        batch_moments.batch_moments(inputs, self.axis, mask)
    )
    variance *= count / ops.maximum(count - 1, 1)
    for variable, value in (
        (self.moving_mean, mean),
        (self.moving_variance, variance),
    ):
      dtype = keras.backend.result_type(variable.dtype, value.dtype)
      old = ops.cast(variable, dtype)
      new = old + (1.0 - self.momentum) * (ops.cast(value, dtype) - old)
      variable.assign(ops.where(count > 0, new, old))


def _of_all_replicas(
    moments: batch_moments.BatchMoments,
) -> batch_moments.BatchMoments:
  """Pools the moments of all replicas of a `tf.distribute` strategy."""
  if keras.backend.backend() != 'tensorflow':
    return moments
  import tensorflow as tf  # Keras has imported it.

  replica = tf.distribute.get_replica_context()
  if replica is None or replica.num_replicas_in_sync == 1:
    return moments
  count, total = replica.all_reduce(
      tf.distribute.ReduceOp.SUM, [moments.count, moments.count * moments.mean]
  )
  mean = tf.math.divide_no_nan(total, count)
  deviation = moments.variance + tf.math.square(moments.mean - mean)
  spread = replica.all_reduce(
      tf.distribute.ReduceOp.SUM, moments.count * deviation
  )
  return batch_moments.BatchMoments(
      count, mean, tf.math.divide_no_nan(spread, count)
  )
