"""The base class of this package's batch normalization layers."""

from typing import Any, Optional

import keras
from keras import ops
import numpy as np

from tff_bn.layers import batch_moments


class SingleAxisBatchNormalization(keras.layers.BatchNormalization):
  """Keras's layer, restricted to the arguments that our layers support.

  Layers that are derived from it have the same arguments, configuration and
  weights as `keras.layers.BatchNormalization`, apart from batch
  renormalization.

  Raises:
    ValueError: If `axis` is not one integer, or `renorm` is true.
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
          f'renorm={kwargs["renorm"]} is not supported by'
          f' {type(self).__name__}, which normalizes in its own way; leave it'
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
    """Computes the layer; see the call arguments of the class."""
    if not (training and self.trainable):
      return super().call(inputs, training=False, mask=mask)
    # Keras's layer computes inputs in 16 bits in float32, too.
    dtype = keras.backend.result_type(inputs.dtype, 'float32')
    inputs = ops.cast(inputs, dtype)
    if mask is not None and len(mask.shape) != len(inputs.shape) - 1:
      raise ValueError(
          f'mask has the shape {tuple(mask.shape)}, but must have one axis less'
          f' than the inputs, whose shape is {tuple(inputs.shape)}.'
      )
    batch = batch_moments.batch_moments(
        inputs, self.axis, mask, differentiable=True
    )
    if self.synchronized:
      batch = batch_moments.of_all_replicas(batch)
    return ops.cast(self._train(inputs, batch), self.compute_dtype)

  def _train(self, inputs: Any, batch: batch_moments.Moments) -> Any:
    """Computes the output in training, and moves the statistics.

    Args:
      inputs: The input, in float32 or float64.
      batch: The moments of the batch, through which gradients flow. With
        `synchronized`, of all replicas of a `tf.distribute` strategy.
    """
    raise NotImplementedError

  def _normalize(
      self, inputs: Any, mean: Any, variance: Any, gamma: Any, beta: Any
  ) -> Any:
    """Returns `gamma * (inputs - mean) / sqrt(variance + epsilon) + beta`."""
    return ops.batch_normalization(
        inputs,
        mean,
        variance,
        axis=self.axis,
        offset=beta,
        scale=gamma,
        epsilon=self.epsilon,
    )
