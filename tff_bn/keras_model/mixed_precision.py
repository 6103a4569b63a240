"""Training with layers that compute in 16 bits.

Keras's mixed dtype policies let layers compute in bfloat16 or float16, while
their variables stay float32. What is here keeps the rest exact: losses and
metrics are computed in float32, and the loss is scaled where float16, whose
smallest numbers are about 6e-8, would make gradients vanish.

Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tff_bn.layers import discovery

# As `keras.optimizers.LossScaleOptimizer`, but for the smallest one.
_INITIAL_SCALE = 2.0**15
_SMALLEST_SCALE = 1.0
_FACTOR = 2.0
_GROWTH_STEPS = 2000


def to_float32(outputs: Any) -> Any:
  """Casts a model's outputs, if they have 16 bits, for losses and metrics.

  Args:
    outputs: A nested structure of tensors.

  Returns:
    The structure, with float32 in place of float16 and bfloat16.
  """

  def cast(output):
    if output.dtype not in (tf.float16, tf.bfloat16):
      return output
    result = tf.cast(output, tf.float32)
    # Where Keras's losses and metrics look for the mask of a model's output.
    mask = getattr(output, '_keras_mask', None)
    if mask is not None:
      result._keras_mask = mask  # pylint: disable=protected-access
    return result

  return tf.nest.map_structure(cast, outputs)


def computes_in_float16(model: keras.Model) -> bool:
  """Whether any layer of a model computes in float16.

  Args:
    model: The model. Nested models and wrappers are searched.

  Returns:
    Whether its loss has to be scaled.
  """
  return any(
      layer.compute_dtype == 'float16' for layer in discovery.all_layers(model)
  )


class LossScale(NamedTuple):
  """A factor for the loss that adapts to what float16 can represent.

  It is halved after a step with gradients that are not finite, and doubled
  after 2000 good steps one after another, as Keras's `LossScaleOptimizer` does.

  Attributes:
    scale: float32 scalar, the factor.
    good_steps: int32 scalar, the number of good steps since it changed.
  """

  scale: tf.Tensor
  good_steps: tf.Tensor

  @classmethod
  def initial(cls) -> 'LossScale':
    """The factor at the start of training: 2^15."""
    return cls(tf.constant(_INITIAL_SCALE), tf.constant(0))

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """Multiplies a loss by the factor."""
    return loss * tf.cast(self.scale, loss.dtype)

  def unscale(self, gradients: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Divides gradients of the scaled loss by the factor."""
    return tuple(g / tf.cast(self.scale, g.dtype) for g in gradients)

  def after_step(self, finite: tf.Tensor) -> 'LossScale':
    """The factor for the next step.

    Args:
      finite: bool scalar, whether the step was a good one.

    Returns:
      The factor.
    """
    good_steps = tf.where(finite, self.good_steps + 1, 0)
    grows = good_steps >= _GROWTH_STEPS
    scale = tf.where(
        finite,
        tf.where(grows, self.scale * _FACTOR, self.scale),
        tf.maximum(self.scale / _FACTOR, _SMALLEST_SCALE),
    )
    # Not beyond float32.
    scale = tf.where(tf.math.is_finite(scale), scale, self.scale)
    return LossScale(scale, tf.where(grows, 0, good_steps))
