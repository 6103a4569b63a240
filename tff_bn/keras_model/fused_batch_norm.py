"""Keras's batch normalization, computed by TensorFlow's fused operations.

Keras 3 computes batch normalization of plain operations, each of which goes
through memory once more. For images with the channels last, TensorFlow has
operations that do all of it in one or two passes, forward and backward. Here
they give the numbers that Keras's layer gives, up to rounding.
"""

from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.layers.batch_moments import Moments

# With one of these, a subclass of Keras's layer computes something else.
COMPUTING_METHODS = frozenset(
    ['__call__', 'call', '_moments', '_renorm_correction_and_moments']
)


def own_method(layer: keras.layers.BatchNormalization) -> Optional[str]:
  """Finds what a subclass of Keras's layer computes in its own way.

  Args:
    layer: The layer.

  Returns:
    The name of a method that replaces one of Keras's; `None` if the layer
    computes what Keras's does.
  """
  for parent in type(layer).__mro__:
    if parent is keras.layers.BatchNormalization:
      return None
    own = sorted(COMPUTING_METHODS & vars(parent).keys())
    if own:
      return own[0]
  raise TypeError(f'{layer!r} is no batch normalization layer.')


def applies(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> bool:
  """Whether the operations can compute a layer.

  Args:
    layer: The layer.
    inputs: Its input.
    mask: Its mask or `None`.

  Returns:
    `True` for images with the channels last and no mask, in float32 or 16 bits.
  """
  return (
      inputs.shape.rank == 4
      and layer.axis in (-1, 3)
      and mask is None
      and layer.variable_dtype == 'float32'
      and inputs.dtype in (tf.float32, tf.float16, tf.bfloat16)
  )


def affine_weights(
    layer: keras.layers.BatchNormalization,
) -> tuple[tf.Tensor, tf.Tensor]:
  """γ and β of a layer; 1 and 0 if it has none."""
  mean = layer.moving_mean
  gamma = (
      tf.ones(mean.shape, mean.dtype) if layer.gamma is None else layer.gamma
  )
  beta = tf.zeros(mean.shape, mean.dtype) if layer.beta is None else layer.beta
  return tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)


def _num_values(inputs: tf.Tensor) -> tf.Tensor:
  """The number of values of a channel, in float32."""
  return tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), tf.float32)


def moments(inputs: tf.Tensor) -> Moments:
  """The moments of images, through which no gradient flows.

  XLA compiles the operation to E[x²] − E[x]², which cancels digits where the
  mean is large against the deviation.

  Args:
    inputs: Images, `[batch, height, width, channels]`.

  Returns:
    What `tff_bn.layers.batch_moments.batch_moments` returns, faster.
  """
  one = tf.ones(inputs.shape[-1:])
  zero = tf.zeros_like(one)
  result = tf.raw_ops.FusedBatchNormV3(
      x=tf.stop_gradient(inputs),
      scale=one,
      offset=zero,
      mean=zero,
      variance=one,
      epsilon=1.0,
      is_training=True,
  )
  count = _num_values(inputs)
  # The operation returns the unbiased variance.
  bias = tf.math.divide_no_nan(
      tf.maximum(count - 1, tf.ones_like(count)), count
  )
  return Moments(count, result.batch_mean, result.batch_variance * bias)


def normalize_by(
    inputs: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tf.Tensor:
  """Normalizes images by given statistics, which get no gradient.

  Args:
    inputs: Images, `[batch, height, width, channels]`.
    gamma: γ, one float32 for each channel.
    beta: β, likewise.
    mean: The mean, likewise.
    variance: The biased variance, likewise.
    epsilon: What is added to the variance.

  Returns:
    The normalized images, in the inputs' dtype.
  """
  return tf.raw_ops.FusedBatchNormV3(
      x=inputs,
      scale=gamma,
      offset=beta,
      mean=tf.stop_gradient(mean),
      variance=tf.stop_gradient(variance),
      epsilon=epsilon,
      is_training=False,
  ).y


def training(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> tf.Tensor:
  """A `batch_norm_calls.TrainingCall` that computes what Keras does.

  Args:
    layer: The layer.
    inputs: Its input.
    mask: Its mask or `None`.

  Returns:
    The output.
  """
  if (
      layer.renorm
      or layer.synchronized
      or own_method(layer)
      or not applies(layer, inputs, mask)
  ):
    return type(layer).call(layer, inputs, training=True, mask=mask)
  gamma, beta = affine_weights(layer)
  old_variance = tf.convert_to_tensor(layer.moving_variance)
  result = tf.raw_ops.FusedBatchNormV3(
      x=inputs,
      scale=gamma,
      offset=beta,
      mean=tf.convert_to_tensor(layer.moving_mean),
      variance=old_variance,
      epsilon=layer.epsilon,
      exponential_avg_factor=1.0 - layer.momentum,
      is_training=True,
  )
  layer.moving_mean.assign(result.batch_mean)
  # The operation adds the unbiased variance of the N values, Keras the biased
  # one, which is (N - 1) / N times that.
  added = result.batch_variance - layer.momentum * old_variance
  layer.moving_variance.assign(
      result.batch_variance - added / _num_values(inputs)
  )
  return tf.cast(result.y, layer.compute_dtype)


def inference(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> tf.Tensor:
  """A `TrainingCall` that normalizes with the running statistics.

  Args:
    layer: The layer.
    inputs: Its input.
    mask: Its mask or `None`, which has no influence.

  Returns:
    The output. The running statistics stay as they are.
  """
  if own_method(layer) or not applies(layer, inputs, None):
    return type(layer).call(layer, inputs, training=False, mask=mask)
  outputs = normalize_by(
      inputs,
      *affine_weights(layer),
      tf.convert_to_tensor(layer.moving_mean),
      tf.convert_to_tensor(layer.moving_variance),
      layer.epsilon,
  )
  return tf.cast(outputs, layer.compute_dtype)
