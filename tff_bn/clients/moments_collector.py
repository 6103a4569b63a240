"""Collects the moments of batch normalization layers in local training."""

from collections.abc import Sequence
from typing import Optional, Protocol

import keras
import tensorflow as tf

from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm
from tff_bn.layers import batch_moments


class CorrectGradient(Protocol):
  """Returns a layer's input, through which another gradient flows back."""

  def __call__(  # noqa: D102
      self,
      layer: keras.layers.Layer,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
      count: tf.Tensor,
  ) -> tf.Tensor:
    ...


class MomentsCollector:
  """Collects moments and normalizes, by default with running statistics.

  An object is a `batch_norm_calls.TrainingCall`. For each layer it merges the
  moments of the inputs of all batches and calls. No gradient flows through the
  statistics.

  Attributes:
    variables: The collected moments: for each layer the number of values, the
      mean and the biased variance.
  """

  def __init__(
      self,
      moving_means: Sequence[keras.Variable],
      correct_gradient: Optional[CorrectGradient] = None,
      normalize: batch_norm_calls.TrainingCall = fused_batch_norm.inference,
  ):
    """Creates the variables.

    Args:
      moving_means: The running means of the trainable layers.
      correct_gradient: Changes the gradient of a layer's input. Its `count` is
        the number of values of each channel. Default: no change.
      normalize: Computes the output of a layer. Default: with its running
        statistics.
    """
    self._normalize = normalize
    self._correct_gradient = correct_gradient
    self._positions = {
        id(variable): i for i, variable in enumerate(moving_means)
    }
    self.variables = [
        tf.Variable(tf.zeros(shape, variable.dtype), trainable=False)
        for variable in moving_means
        for shape in ((), variable.shape, variable.shape)
    ]

  def __call__(
      self,
      layer: keras.layers.Layer,
      inputs: tf.Tensor,
      mask: Optional[tf.Tensor],
  ) -> tf.Tensor:
    """Collects the moments of a layer's inputs and computes its output."""
    variables = self._select(
        self.variables, self._positions[id(layer.moving_mean)]
    )
    if fused_batch_norm.applies(layer, inputs, mask):
      seen = fused_batch_norm.moments(inputs)
    else:
      seen = batch_moments.batch_moments(inputs, layer.axis, mask)
    if seen.count.shape.rank:
      raise ValueError(
          f'The batch normalization layer {layer.name!r} has a mask that'
          ' differs between channels, so they have different numbers of values.'
      )
    merged = batch_moments.merge_moments(
        batch_moments.Moments(*map(tf.convert_to_tensor, variables)),
        batch_moments.Moments(*(tf.cast(x, variables[0].dtype) for x in seen)),
    )
    for variable, value in zip(variables, merged):
      variable.assign(value)
    if self._correct_gradient is not None:
      inputs = self._correct_gradient(layer, inputs, mask, seen.count)
    return self._normalize(layer, inputs, mask)

  def _select(self, values: Sequence, position: int) -> Sequence:
    return values[3 * position : 3 * position + 3]

  def moments(
      self, layer: int, values: Sequence[tf.Tensor]
  ) -> batch_moments.Moments:
    """Returns the moments that a layer collected.

    Args:
      layer: The layer's position in `moving_means`.
      values: The values of `variables`.
    """
    return batch_moments.Moments(*self._select(values, layer))
