"""Batch normalization by statistics that do not depend on the batch."""

from typing import Any, Optional

import tensorflow as tf

from tff_bn.layers import batch_moments

# Arguments of Keras's layer, inherited from TensorFlow 1, that change what the
# statistics of the batch are used for.
_REFUSED_ARGUMENTS = ('renorm', 'virtual_batch_size', 'adjustment')


@tf.keras.saving.register_keras_serializable(package='tff_bn')
class FederatedBatchNormalization(tf.keras.layers.BatchNormalization):
  """Layer that normalizes its inputs by its moving statistics, always.

  A drop-in for `tf.keras.layers.BatchNormalization`, with the same arguments,
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

  The variance is always the unbiased one, as in the paper (Keras stores the
  biased one where it has no fused kernel). With `K = 1` the factor is 1. An
  empty batch, or one that a mask excludes altogether, leaves the statistics as
  they are.

  **During inference** (i.e. when using `evaluate()` or `predict()` or when
  calling the layer/model with the argument `training=False`), and always if
  the layer has `trainable = False`, it is Keras's layer: it returns the same,
  and its statistics stay as they are.

  The moving statistics start as 0 and 1, so at first the layer trains without
  normalizing, and with the default momentum of 0.99 it takes about 100 steps
  until they are near those of the data. A smaller momentum (the paper has 0.9),
  or statistics taken from a trained model, shorten this.

  Weights can be copied from and to Keras's layer with `set_weights`, and loaded
  from a checkpoint or an HDF5 file of a model that has it; from a `.weights.h5`
  file they can't, for Keras keeps the layers' classes in it. Load such a file
  into the model that it is of and convert that with
  `tff_bn.convert_batch_norm`.

  Used within a `tf.distribute` strategy, the statistics are updated with the
  moments of all replicas' batches together, as if one device had seen them.

  Args:
    axis: Integer or a list of integers, the axis that should be normalized
      (typically the features axis). For instance, after a `Conv2D` layer with
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
    synchronized: As in Keras's layer, True means not to use fused kernels. The
      statistics of the replicas are pooled in any case.
    **kwargs: As for Keras's layer: `fused`, `trainable`, `name` and `dtype`.
      `renorm`, `virtual_batch_size` and `adjustment` are refused.

  Call arguments:
    inputs: Input tensor.
    training: Python boolean, or a boolean tensor, indicating whether the layer
      updates its moving statistics.
    mask: Binary tensor that, with an axis appended, can be broadcast to the
      inputs, such as `[batch, time]` for inputs `[batch, time, channels]`. It
      tells the positions for which the moments are computed; all positions are
      normalized. Keras's fused kernels (4-D and 5-D inputs, but for
      `fused=False`) ignore it with a warning, and so does this layer.

  Input shape:
    Arbitrary. Use the keyword argument `input_shape` (tuple of integers, does
    not include the samples axis) when using this layer as the first layer in a
    model.

  Output shape:
    Same shape as input.

  Raises:
    ValueError: If one of the refused arguments is given.

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
    for argument in _REFUSED_ARGUMENTS:
      if kwargs.get(argument):
        raise ValueError(
            f'{argument}={kwargs[argument]} is about normalizing by the'
            ' statistics of the batch, which FederatedBatchNormalization does'
            ' not do; leave it out.'
        )
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

  @tf.autograph.experimental.do_not_convert
  def call(
      self,
      inputs: tf.Tensor,
      training: Any = None,
      mask: Optional[tf.Tensor] = None,
  ) -> tf.Tensor:
    """Normalizes by the moving statistics, then updates them in training.

    Args:
      inputs: The input.
      training: Whether to update the statistics.
      mask: Where values count for the statistics.

    Returns:
      The output, of the same shape and in the layer's compute dtype.
    """
    # Keras's own inference reads the statistics; they are written after that.
    outputs = super().call(inputs, training=False, mask=mask)
    if training is None:
      training = tf.keras.backend.learning_phase()
    known = tf.get_static_value(training)
    if known is None or known:

      def update():
        return self._update_statistics(
            tf.cast(inputs, self.compute_dtype),
            None if self.fused else mask,
            tf.constant(True) if known else tf.cast(training, tf.bool),
        )

      # Which leaves it out in a frozen layer, and while a functional model is
      # built.
      self.add_update(update)
    return outputs

  def _update_statistics(
      self, inputs: tf.Tensor, mask: Optional[tf.Tensor], training: tf.Tensor
  ) -> list[tf.Tensor]:
    """Updates the moving mean and variance with a batch.

    Args:
      inputs: The input.
      mask: Where values count.
      training: bool scalar, whether to update them.

    Returns:
      The updated values.
    """
    moments = batch_moments.batch_moments(inputs, self.axis, mask)
    count, mean, variance = _of_all_replicas(moments)
    one = tf.ones_like(count)
    variance *= count / tf.maximum(count - one, one)
    updated = []
    for variable, value in (
        (self.moving_mean, mean),
        (self.moving_variance, variance),
    ):
      old = tf.convert_to_tensor(variable)
      # Not rounded to float32, as Keras does.
      rate = tf.convert_to_tensor(1.0 - self.momentum, old.dtype)
      new = old + rate * (tf.cast(value, old.dtype) - old)
      new = tf.where(tf.logical_and(training, count > 0), new, old)
      updated.append(variable.assign(new))
    return updated


def _of_all_replicas(
    moments: batch_moments.BatchMoments,
) -> batch_moments.BatchMoments:
  """Pools the moments of all replicas: the law of total variance."""
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
