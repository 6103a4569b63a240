"""Training with layers that compute in 16 bits.

Keras's mixed dtype policies let layers compute in bfloat16 or float16, while
their variables stay float32. The functions here keep the rest exact: losses and
metrics are computed in float32, and the loss is scaled so that gradients do not
vanish in float16, whose smallest number is about 6e-8.

Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tff_bn.layers import discovery

# As in `keras.optimizers.LossScaleOptimizer`, except for the smallest scale.
_INITIAL_SCALE = 2.0**15
_SMALLEST_SCALE = 1.0
_FACTOR = 2.0
_GROWTH_STEPS = 2000


def loss_dtype(dtype: Any) -> tf.DType:
  """Returns the dtype of an output in losses and metrics."""
  dtype = tf.as_dtype(dtype)
  return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def to_float32(outputs: Any) -> Any:
  """Casts float16 and bfloat16 outputs to float32, for losses and metrics.

  Other dtypes in the structure and the masks of outputs are kept.
  """

  def cast(output):
    dtype = loss_dtype(output.dtype)
    if dtype == output.dtype:
      return output
    result = tf.cast(output, dtype)
    # Keras's losses and metrics read the mask of an output from here.
    mask = getattr(output, '_keras_mask', None)
    if mask is not None:
      result._keras_mask = mask
    return result

  return tf.nest.map_structure(cast, outputs)


def computes_in_float16(model: keras.Model) -> bool:
  """Returns whether a layer computes in float16, so the loss must be scaled."""
  return any(
      layer.compute_dtype == 'float16' for layer in discovery.all_layers(model)
  )


class LossScale(NamedTuple):
  """A factor for the loss that adapts to the range of float16.

  As in Keras's `LossScaleOptimizer`, a step with gradients that are not finite
  halves the factor, and 2000 finite steps in a row double it.

  Attributes:
    scale: The factor, a float32 scalar.
    good_steps: The number of finite steps since the last change, an int32
      scalar.
  """

  scale: tf.Tensor
  good_steps: tf.Tensor

  @classmethod
  def initial(cls) -> 'LossScale':
    """Returns the factor at the start of training, 2^15."""
    return cls(tf.constant(_INITIAL_SCALE), tf.constant(0))

  @property
  def can_shrink(self) -> tf.Tensor:
    """Whether the factor is larger than the smallest one."""
    return self.scale > _SMALLEST_SCALE

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """Multiplies a loss by the factor."""
    return loss * tf.cast(self.scale, loss.dtype)

  def unscale(self, gradients: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Divides gradients of the scaled loss by the factor."""
    return tuple(g / tf.cast(self.scale, g.dtype) for g in gradients)

  def after_step(self, finite: tf.Tensor) -> 'LossScale':
    """Returns the factor after a step whose gradients were finite, or not."""
    good_steps = tf.where(finite, self.good_steps + 1, 0)
    grows = good_steps >= _GROWTH_STEPS
    scale = tf.where(
        finite,
        tf.where(grows, self.scale * _FACTOR, self.scale),
        tf.maximum(self.scale / _FACTOR, _SMALLEST_SCALE),
    )
    # The scale must not overflow float32.
    scale = tf.where(tf.math.is_finite(scale), scale, self.scale)
    return LossScale(scale, tf.where(grows, 0, good_steps))
