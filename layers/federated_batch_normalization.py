"""Batch normalization by statistics that do not depend on the batch."""

from typing import Any, Optional

import keras
from keras import ops

from tff_bn.layers import batch_moments
from tff_bn.layers import single_axis_batch_normalization


@keras.saving.register_keras_serializable(package='tff_bn')
class FederatedBatchNormalization(
    single_axis_batch_normalization.SingleAxisBatchNormalization
):
  """Layer that always normalizes its inputs by its moving statistics.

  A drop-in replacement for `keras.layers.BatchNormalization`, with the same
  arguments, configuration and weights. The output for one example does not
  depend on the other examples of the batch. So it does not depend on how the
  data is split over clients, if all clients have the same moving statistics.

  Training and inference differ only in the update of the statistics.

  **During training** (i.e. when using `fit()` or when calling the layer/model
  with the argument `training=True`), the layer returns
  `gamma * (batch - moving_mean) / sqrt(moving_variance + epsilon) + beta`, with
  the moving statistics before this batch. No gradient flows through them. Then
  the layer updates them with the moments of the batch, where `K` is the number
  of values of a channel (batch size × height × width):

  - `moving_mean = moving_mean * momentum + mean(batch) * (1 - momentum)`
  - `moving_variance = moving_variance * momentum
    + var(batch) * K / (K - 1) * (1 - momentum)`

  The layer stores the unbiased variance, as in the paper; Keras's layer stores
  the biased variance. With `K = 1` the factor is 1. An empty or fully masked
  batch does not change the statistics. The moments are computed in float64 for
  float64 inputs, otherwise in float32.

  **During inference** (i.e. when using `evaluate()` or `predict()` or when
  calling the layer/model with the argument `training=False`), and always if
  the layer has `trainable = False`, it behaves like Keras's layer.

  The moving statistics start at 0 and 1, so at first the layer does not
  normalize. With the default momentum of 0.99, they approach the statistics of
  the data after about 100 steps. A smaller momentum (0.9 in the paper) or the
  statistics of a trained model shorten this phase.

  Weights can be copied from and to Keras's layer with `set_weights`. They
  cannot be loaded from a `.weights.h5` file of a model with Keras's layer,
  because such a file contains the layers' classes. Load the file into the
  original model and convert the model with `tff_bn.convert_batch_norm`.

  The layer works with every backend of Keras, but PyTorch cannot train it with
  `jit_compile=True`. In a `tf.distribute` strategy, the statistics are updated
  with the pooled moments of all replicas.

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
    **kwargs: The arguments `trainable`, `name` and `dtype` of Keras layers.

  Call arguments:
    inputs: Input tensor.
    training: Python boolean indicating whether the layer updates its moving
      statistics.
    mask: Binary tensor that, with an axis appended, can be broadcast to the
      inputs, such as `[batch, time]` for inputs `[batch, time, channels]`. The
      moments are computed from the positions where it is true. All positions
      are normalized.

  Input shape:
    Arbitrary.

  Output shape:
    Same shape as input.

  Raises:
    ValueError: If `axis` is not one integer, or `renorm` is true.

  Reference:
    - Guerraoui et al., Overcoming the Challenges of Batch Normalization in
      Federated Learning, 2024, Algorithm 2. The layer is the algorithm for one
      client.
  """

  def call(
      self,
      inputs: Any,
      training: Optional[bool] = None,
      mask: Optional[Any] = None,
  ) -> Any:
    """Normalizes by the moving statistics, then updates them in training."""
    # This reads the statistics before they are updated.
    outputs = super().call(inputs, training=False, mask=mask)
    if not (training and self.trainable):
      return outputs
    count, mean, variance = batch_moments.of_all_replicas(
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
    return outputs
