"""Batch renormalization: batch normalization corrected by moving statistics."""

import math
import numbers
from typing import Any

import keras
from keras import ops

from tff_bn.layers import batch_moments
from tff_bn.layers import single_axis_batch_normalization


@keras.saving.register_keras_serializable(package='tff_bn')
class BatchRenormalization(
    single_axis_batch_normalization.SingleAxisBatchNormalization
):
  """Layer that normalizes by batch and corrects to its moving statistics.

  It has the same weights as `keras.layers.BatchNormalization`, and two more
  arguments, `r_max` and `d_max`.

  **During training** (i.e. when using `fit()` or when calling the layer/model
  with the argument `training=True`), the layer returns `gamma * (r * (batch -
  mean(batch)) / deviation(batch) + d) + beta` with

  - `deviation(batch) = sqrt(var(batch) + epsilon)`
  - `moving_deviation = sqrt(moving_variance + epsilon)`
  - `r = clip(deviation(batch) / moving_deviation, 1 / r_max, r_max)`
  - `d = clip((mean(batch) - moving_mean) / moving_deviation, -d_max, d_max)`

  where `var` is the biased variance. Gradients flow through the statistics of
  the batch, but not through `r` and `d`. Where nothing is clipped, the output
  equals the output by the moving statistics before this batch. With `r_max=1`
  and `d_max=0`, the layer equals Keras's. Then the layer updates its moving
  statistics as Keras's layer does:

  - `moving_mean = moving_mean * momentum + mean(batch) * (1 - momentum)`
  - `moving_variance = moving_variance * momentum + var(batch) * (1 - momentum)`

  The paper averages deviations instead of variances. An empty or fully masked
  batch is normalized by the moving statistics, which it does not change.

  **During inference** (i.e. when using `evaluate()` or `predict()` or when
  calling the layer/model with the argument `training=False`), and always if
  the layer has `trainable = False`, it behaves like Keras's layer: it
  normalizes by the moving statistics.

  The paper begins with `r_max=1` and `d_max=0` and relaxes both in the first
  40,000 steps to the values that are the defaults here. Keras's own
  `BatchNormalization(renorm=True)` keeps three more variables for each channel.

  `tff_bn.convert_batch_norm(model, to='batch_renorm')` replaces the batch
  normalization layers of a model.

  Statistics are computed in float64 for float64 inputs, otherwise in float32.
  The layer works with every backend of Keras.

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
    synchronized: If True, the batch statistics are the statistics of all
      replicas of a `tf.distribute` strategy, as in Keras's layer. Needs the
      TensorFlow backend.
    r_max: The largest correction of the scale, at least 1.
    d_max: The largest correction of the mean, at least 0.
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
    ValueError: If an argument is not allowed.

  Reference:
    - Ioffe, Batch Renormalization: Towards Reducing Minibatch Dependence in
      Batch-Normalized Models, NeurIPS 2017, arXiv:1702.03275.
  """

  def __init__(
      self,
      *args: Any,
      r_max: float = 3.0,
      d_max: float = 5.0,
      **kwargs: Any,
  ):
    for name, value in (('r_max', r_max), ('d_max', d_max)):
      if not isinstance(value, numbers.Real):
        raise TypeError(f'{name} must be a number, but is {value!r}.')
    if not 1 <= r_max < math.inf:
      raise ValueError(f'r_max={r_max} must be a number, at least 1.')
    if not 0 <= d_max < math.inf:
      raise ValueError(f'd_max={d_max} must be a number, at least 0.')
    super().__init__(*args, **kwargs)
    self.r_max = float(r_max)
    self.d_max = float(d_max)

  def _train(self, inputs: Any, batch: batch_moments.Moments) -> Any:
    moving_mean, moving_variance = (
        ops.cast(variable, inputs.dtype)
        for variable in (self.moving_mean, self.moving_variance)
    )
    mean = ops.where(batch.count > 0, batch.mean, moving_mean)
    variance = ops.where(batch.count > 0, batch.variance, moving_variance)
    deviation = ops.sqrt(moving_variance + self.epsilon)
    r = ops.sqrt(variance + self.epsilon) / deviation
    d = (mean - moving_mean) / deviation
    r = ops.stop_gradient(ops.clip(r, 1 / self.r_max, self.r_max))
    d = ops.stop_gradient(ops.clip(d, -self.d_max, self.d_max))
    for variable, old, new in (
        (self.moving_mean, moving_mean, mean),
        (self.moving_variance, moving_variance, variance),
    ):
      variable.assign(old * self.momentum + new * (1 - self.momentum))
    gamma, beta = r, d
    if self.gamma is not None:
      scale = ops.cast(self.gamma, inputs.dtype)
      gamma, beta = scale * r, scale * d
    if self.beta is not None:
      beta += ops.cast(self.beta, inputs.dtype)
    return self._normalize(inputs, mean, variance, gamma, beta)

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments for `from_config`."""
    return {**super().get_config(), 'r_max': self.r_max, 'd_max': self.d_max}
