"""Keras's batch normalization with TensorFlow's fused operations.

Keras 3 computes batch normalization with plain operations, each of which makes
another pass over memory. For images with the channels last, TensorFlow has
fused operations that make one or two passes, forward and backward. The
functions here return the same numbers as Keras's layer, up to rounding.

XLA expands the fused operations to E[x²] − E[x]² and x·a + b. Where the mean of
a channel is much larger than its deviation, as in pictures with values up to
255, both are differences of large numbers that lose most of their digits. So
the functions use plain operations on centered values where XLA compiles, which
fuses these itself.
"""

from collections.abc import Collection
from typing import Optional

import keras
import tensorflow as tf

# TensorFlow has no public function that tells whether XLA compiles a graph.
from tensorflow.python.ops import control_flow_util

from tff_bn.layers.batch_moments import Moments

# A subclass of Keras's layer with one of these methods may compute something
# else.
_COMPUTING_METHODS = frozenset(
    ['__call__', 'call', '_moments', '_renorm_correction_and_moments']
)


def own_method(
    layer: keras.layers.BatchNormalization,
    known: Collection[type] = (keras.layers.BatchNormalization,),
) -> Optional[str]:
  """Returns the name of a method with which a subclass may differ from Keras.

  It is `None` if the layer computes the same as one of the `known` classes,
  which include Keras's.
  """
  for parent in type(layer).__mro__:
    if parent in known:
      return None
    own = sorted(_COMPUTING_METHODS & vars(parent).keys())
    if own:
      return own[0]
  raise TypeError(f'{layer!r} is not a batch normalization layer.')


def applies(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> bool:
  """Returns whether the fused operations can compute a layer.

  They can for images with the channels last and no mask, in float32 or 16 bits.
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
  """Returns γ and β of a layer, or 1 and 0 if it has none."""
  mean = layer.moving_mean
  gamma = (
      tf.ones(mean.shape, mean.dtype) if layer.gamma is None else layer.gamma
  )
  beta = tf.zeros(mean.shape, mean.dtype) if layer.beta is None else layer.beta
  return tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)


def num_values(inputs: tf.Tensor) -> tf.Tensor:
  """Returns the number of values in each channel of images, as a float32."""
  return tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), tf.float32)


def _xla_compiles() -> bool:
  """Returns whether XLA will compile the operations that are traced now."""
  return control_flow_util.GraphOrParentsInXlaContext(
      tf.compat.v1.get_default_graph()
  )


def _centered(inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Centers images with plain operations, through which gradients flow.

  Returns:
    The images minus the mean of each channel, in float32; the means and the
    biased variances.
  """
  axes = [0, 1, 2]
  values = tf.cast(inputs, tf.float32)
  # A sum of many large values loses digits, so this is only close to the mean.
  # The differences from it are small, so their sum keeps its digits.
  near_mean = tf.stop_gradient(tf.reduce_mean(values, axes))
  differences = values - near_mean
  rest = tf.reduce_mean(differences, axes)
  # The deviations add up to 0, so no gradient flows through their mean.
  deviations = differences - tf.stop_gradient(rest)
  variance = tf.reduce_mean(tf.math.square(deviations), axes)
  return differences - rest, near_mean + rest, variance


def moments(inputs: tf.Tensor) -> Moments:
  """Computes the moments of images as `batch_moments` does, but faster.

  The images are `[batch, height, width, channels]`. No gradient flows through
  the results.
  """
  count = num_values(inputs)
  if _xla_compiles():
    return Moments(count, *_centered(tf.stop_gradient(inputs))[1:])
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
  # The operation returns the unbiased variance, on GPUs NaN for one value.
  bias = tf.math.divide_no_nan(
      tf.maximum(count - 1, tf.ones_like(count)), count
  )
  variance = result.batch_variance * bias
  return Moments(
      count,
      result.batch_mean,
      tf.where(count > 1, variance, tf.zeros_like(variance)),
  )


def normalize_by(
    inputs: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tf.Tensor:
  """Normalizes images by given statistics, which get no gradient.

  The images are `[batch, height, width, channels]`, and so is the result, in
  their dtype. γ, β, the mean and the biased variance are float32 vectors with
  one value for each channel.
  """
  mean, variance = tf.stop_gradient(mean), tf.stop_gradient(variance)
  if _xla_compiles():
    scale = gamma * tf.math.rsqrt(variance + epsilon)
    outputs = (tf.cast(inputs, tf.float32) - mean) * scale + beta
    return tf.cast(outputs, inputs.dtype)
  return tf.raw_ops.FusedBatchNormV3(
      x=inputs,
      scale=gamma,
      offset=beta,
      mean=mean,
      variance=variance,
      epsilon=epsilon,
      is_training=False,
  ).y


def move_statistics(
    layer: keras.layers.BatchNormalization, seen: Moments
) -> None:
  """Moves the running statistics as Keras does, if there are values."""
  for variable, value in (
      (layer.moving_mean, seen.mean),
      (layer.moving_variance, seen.variance),
  ):
    old = tf.convert_to_tensor(variable)
    new = old * layer.momentum + tf.cast(value, old.dtype) * (
        1.0 - layer.momentum
    )
    variable.assign(tf.where(seen.count > 0, new, old))


def training(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> tf.Tensor:
  """Computes a layer as Keras does in training; a `TrainingCall`."""
  if (
      layer.renorm
      or layer.synchronized
      or own_method(layer)
      or not applies(layer, inputs, mask)
  ):
    return type(layer).call(layer, inputs, training=True, mask=mask)
  gamma, beta = affine_weights(layer)
  if _xla_compiles():
    centered, mean, variance = _centered(inputs)
    for variable, value in (
        (layer.moving_mean, mean),
        (layer.moving_variance, variance),
    ):
      old = tf.convert_to_tensor(variable)
      variable.assign(old * layer.momentum + value * (1.0 - layer.momentum))
    scale = gamma * tf.math.rsqrt(variance + layer.epsilon)
    return tf.cast(centered * scale + beta, layer.compute_dtype)
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
  # The operation adds the unbiased variance of the N values, on GPUs NaN for
  # one value. Keras adds the biased variance, which is (N - 1) / N times as
  # large.
  count = num_values(inputs)
  kept = layer.momentum * old_variance
  added = result.batch_variance - kept
  layer.moving_variance.assign(
      tf.where(count > 1, result.batch_variance - added / count, kept)
  )
  return tf.cast(result.y, layer.compute_dtype)


def by_batch(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> tf.Tensor:
  """Computes a layer of any class as Keras's layer does; a `TrainingCall`.

  Batch renormalization is left out.
  """
  renorm = layer.renorm
  layer.renorm = False
  try:
    return keras.layers.BatchNormalization.call(
        layer, inputs, training=True, mask=mask
    )
  finally:
    layer.renorm = renorm


def inference(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Optional[tf.Tensor],
) -> tf.Tensor:
  """Normalizes by the running statistics and keeps them; a `TrainingCall`."""
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
