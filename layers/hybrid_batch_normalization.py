"""Batch normalization by a learned mixture of global and batch statistics."""

from typing import Any, Optional

import keras
from keras import ops

from tff_bn.layers import batch_moments
from tff_bn.layers import single_axis_batch_normalization


@keras.saving.register_keras_serializable(package='tff_bn')
class HybridBatchNormalization(
    single_axis_batch_normalization.SingleAxisBatchNormalization
):
  """Layer that normalizes by a mixture of moving and batch statistics.

  It has the same arguments and configuration as
  `keras.layers.BatchNormalization`, and one more trainable weight, `mixing`: θ,
  one number for each channel, which starts at 0. The share of the batch is
  `share = sigmoid(mixing)`, at first 1/2.

  **During training** (i.e. when using `fit()` or when calling the layer/model
  with the argument `training=True`), the layer returns
  `gamma * (batch - mean) / sqrt(variance + epsilon) + beta` with

  - `mean = moving_mean * (1 - share) + mean(batch) * share`
  - `variance = moving_variance * (1 - share) + var(batch) * share`

  where `var` is the biased variance. Gradients flow through the share and
  through the statistics of the batch. For an empty or fully masked batch the
  share is 0.

  **During inference** (i.e. when using `evaluate()` or `predict()` or when
  calling the layer/model with the argument `training=False`), and always if
  the layer has `trainable = False`, it behaves like Keras's layer: it
  normalizes by the moving statistics, and `mixing` has no effect.

  **The layer never changes its moving statistics**, which are the global
  statistics of all clients. `tff_bn.algorithms.build_hbn` computes them and
  keeps `mixing` on the client. A program that trains the layer in another way
  must assign `moving_mean` and `moving_variance` itself; until then they are
  0 and 1.

  `tff_bn.convert_batch_norm(model, to='hybrid')` replaces the batch
  normalization layers of a model.

  Statistics are computed in float64 for float64 inputs, otherwise in float32.
  The layer works with every backend of Keras.

  Args:
    axis: Integer, the axis that should be normalized (typically the features
      axis). For instance, after a `Conv2D` layer with
      `data_format="channels_first"`, set `axis=1`.
    momentum: Has no effect, because the layer does not move its statistics.
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
    synchronized: If True, the batch statistics are the statistics of all
      replicas of a `tf.distribute` strategy, as in Keras's layer. Needs the
      TensorFlow backend.
    **kwargs: The arguments `trainable`, `name` and `dtype` of Keras layers.

  Call arguments:
    inputs: Input tensor.
    training: Python boolean indicating whether the layer uses the statistics of
      the batch.
    mask: Binary tensor that, with an axis appended, can be broadcast to the
      inputs, such as `[batch, time]` for inputs `[batch, time, channels]`. The
      statistics of the batch are computed from the positions where it is true.
      All positions are normalized.

  Input shape:
    Arbitrary.

  Output shape:
    Same shape as input.

  Raises:
    ValueError: If `axis` is not one integer, or `renorm` is true.

  Reference:
    - Chen, Xu, Wu, Kittler, Hybrid Batch Normalisation: Resolving the Dilemma
      of Batch Normalisation in Federated Learning, ICML 2025, arXiv:2505.21877.
  """

  # θ, or None until the layer is built.
  mixing: Optional[keras.Variable] = None

  def build(self, input_shape: Any) -> None:
    """Creates the weights of Keras's layer, and `mixing`."""
    super().build(input_shape)
    self.mixing = self.add_weight(
        shape=(input_shape[self.axis],),
        name='mixing',
        initializer='zeros',
        trainable=True,
        autocast=False,
    )

  def _train(self, inputs: Any, batch: batch_moments.Moments) -> Any:
    dtype = inputs.dtype
    share = ops.sigmoid(ops.cast(self.mixing, dtype))
    share = ops.where(batch.count > 0, share, ops.zeros_like(share))
    mean, variance = (
        (1 - share) * ops.cast(moving, dtype) + share * of_batch
        for moving, of_batch in (
            (self.moving_mean, batch.mean),
            (self.moving_variance, batch.variance),
        )
    )
    gamma, beta = (
        None if weight is None else ops.cast(weight, dtype)
        for weight in (self.gamma, self.beta)
    )
    return self._normalize(inputs, mean, variance, gamma, beta)
