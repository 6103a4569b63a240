"""A pass over a client's data that only computes moments."""

from collections.abc import Sequence
from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.clients.moments_collector import MomentsCollector
from tff_bn.common import numerics
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.stateless_function import StatelessFunction
from tff_bn.layers.batch_moments import Moments


class StatisticsPass:
  """Computes the moments of the inputs of batch normalization layers.

  The model runs in training mode, without gradients. Its variables keep their
  values.
  """

  def __init__(
      self,
      model: BatchNormModel,
      moving_means: Sequence[keras.Variable],
      *,
      jit_compile: bool = False,
      normalize: batch_norm_calls.TrainingCall = fused_batch_norm.training,
  ):
    """Traces the pass.

    Args:
      model: The model.
      moving_means: The running means of the trainable batch normalization
        layers, whose moments are computed.
      jit_compile: Whether XLA compiles the steps.
      normalize: Computes the output of a layer. Default: as in training.
    """
    self._keras_model = model.keras_model
    self._skips_overflow = mixed_precision.computes_in_float16(
        model.keras_model
    )
    self._num_layers = len(moving_means)
    self._collector = MomentsCollector(moving_means, normalize=normalize)
    self._make_step = (
        tf.function(self._step, jit_compile=True) if jit_compile else self._step
    )
    with batch_norm_calls.replaced(model.keras_model, self._collector):
      self._function = StatelessFunction(
          self._loop,
          model.keras_model.weights,
          tf.data.DatasetSpec(model.input_spec),
      )

  @property
  def is_random(self) -> bool:
    """Whether the model draws random numbers, so that a seed is needed."""
    return self._function.is_random

  @tf.autograph.experimental.do_not_convert
  def _step(self, x: Any) -> None:
    """Adds the values of a batch."""
    variables = self._collector.variables
    before = [tf.identity(variable) for variable in variables]
    self._keras_model(x, training=True)
    if not self._skips_overflow:
      return
    # Local training skips a batch where float16 overflows, too.
    after = [tf.identity(variable) for variable in variables]
    is_finite = numerics.all_finite(after)
    for variable, value in zip(
        variables, numerics.where(is_finite, after, before)
    ):
      variable.assign(value)

  def _loop(self, dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns the values of the collector's variables."""
    # As in `LocalTraining`.
    for x, y in iter(dataset):
      if tf.shape(tf.nest.flatten(y)[0])[0] > 0:
        self._make_step(x)
    return [tf.identity(variable) for variable in self._collector.variables]

  def run(
      self,
      values: Sequence[tf.Tensor],
      dataset: tf.data.Dataset,
      seed: Optional[tf.Tensor] = None,
  ) -> list[Moments]:
    """Computes the moments, inside a `tff.tensorflow.computation`.

    Args:
      values: The values of all variables, in the order of `model.variables`.
      dataset: The batches. Empty batches are skipped.
      seed: An int64 vector of 2 elements, needed if `is_random`.

    Returns:
      The moments of each layer's inputs over all batches, in the order of
      `moving_means`.
    """
    found = self._function(values, dataset, seed=seed)
    return [
        self._collector.moments(layer, found)
        for layer in range(self._num_layers)
    ]
