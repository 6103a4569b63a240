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

  def _as_computed(self, inputs: Any) -> Any:
    """Casts inputs in 16 bits to float32, as Keras's layer does."""
    dtype = keras.backend.result_type(inputs.dtype, 'float32')
    return ops.cast(inputs, dtype)

  def _differentiable_moments(
      self, inputs: Any, mask: Optional[Any]
  ) -> batch_moments.Moments:
    """Computes the moments of a batch, through which gradients flow.

    Args:
      inputs: The input.
      mask: Which values to include.

    Returns:
      The moments; of all replicas of a `tf.distribute` strategy if the layer is
      synchronized.

    Raises:
      ValueError: If the mask has the wrong rank.
    """
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
    return batch
