"""Collects the moments of the inputs of batch normalization layers."""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.common import client_batches
from tff_bn.common import numerics
from tff_bn.keras_model import batch
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.dataset_function import DatasetFunction
from tff_bn.layers import batch_moments
from tff_bn.layers.batch_moments import Moments

# Returns a layer's input, through which another gradient flows back, from the
# layer, its input, its mask or `None`, and the number of values of a channel.
CorrectGradient = Callable[
    [keras.layers.Layer, tf.Tensor, Optional[tf.Tensor], tf.Tensor], tf.Tensor
]


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

    `moving_means` are the running means of the trainable layers, and
    `normalize` computes the output of a layer.
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
    if fused_batch_norm.applies(layer, inputs, mask):
      seen = fused_batch_norm.moments(inputs)
    else:
      seen = batch_moments.batch_moments(inputs, layer.axis, mask)
    self.add(layer, seen)
    if self._correct_gradient is not None:
      inputs = self._correct_gradient(layer, inputs, mask, seen.count)
    return self._normalize(layer, inputs, mask)

  def add(self, layer: keras.layers.Layer, seen: Moments) -> None:
    """Merges the moments of a batch into those of a layer."""
    if seen.count.shape.rank:
      raise ValueError(
          f'The batch normalization layer {layer.name!r} has a mask that'
          ' differs between channels, so they have different numbers of values.'
      )
    position = self._positions[id(layer.moving_mean)]
    variables = self.variables[3 * position : 3 * position + 3]
    merged = batch_moments.merge_moments(
        Moments(*map(tf.convert_to_tensor, variables)),
        Moments(*(tf.cast(x, variables[0].dtype) for x in seen)),
    )
    for variable, value in zip(variables, merged):
      variable.assign(value)

  def moments(self, layer: int, values: Sequence[tf.Tensor]) -> Moments:
    """Returns the moments that a layer collected.

    Args:
      layer: The layer's position in `moving_means`.
      values: The values of `variables`.
    """
    return Moments(*values[3 * layer : 3 * layer + 3])


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

    `moving_means` are the running means of the trainable batch normalization
    layers, whose moments are computed. `normalize` computes the output of a
    layer; by default as in training.
    """
    self._keras_model = model.keras_model
    self._skips_overflow = mixed_precision.computes_in_float16(
        model.keras_model
    )
    self._num_layers = len(moving_means)
    self._collector = MomentsCollector(moving_means, normalize=normalize)
    self._make_step = (
        tf.function(self._step, autograph=False, jit_compile=True)
        if jit_compile
        else self._step
    )
    self._function = DatasetFunction(
        self._loop,
        model.keras_model.weights,
        model.input_spec,
        [],
        model.keras_model,
        self._collector,
    )

  @property
  def is_random(self) -> bool:
    """Whether the model draws random numbers, so that a seed is needed."""
    return self._function.is_random

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

  def _loop(self, dataset: client_batches.Data) -> list[tf.Tensor]:
    """Returns the values of the collector's variables."""

    def collect(num_batches, element):
      def step():
        self._make_step(element[0])
        return num_batches + 1

      # As in `LocalTraining`.
      return tf.cond(batch.num_examples(element) > 0, step, lambda: num_batches)

    client_batches.fold(dataset, tf.zeros([], tf.int64), collect)
    return [tf.identity(variable) for variable in self._collector.variables]

  def run(
      self,
      values: Sequence[tf.Tensor],
      dataset: client_batches.Data,
      seed: Optional[tf.Tensor] = None,
  ) -> list[Moments]:
    """Computes the moments of each layer's inputs over all batches.

    For use in a `tff.tensorflow.computation`.

    Args:
      values: The values of all variables, in the order of `model.variables`.
      dataset: The batches. Empty batches are skipped.
      seed: An int64 vector of 2 elements, needed if `is_random`.
    """
    found = self._function(values, dataset, seed=seed)
    return [
        self._collector.moments(layer, found)
        for layer in range(self._num_layers)
    ]
